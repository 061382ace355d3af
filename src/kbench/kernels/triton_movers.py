"""Appending and converting keys and values in Triton: launching only. The kernels are in `kernels.row_kernels`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.kernels.triton_elementwise import power_of_two
from kbench.ops.base import Outputs

TOKENS = 16
"""Tokens of one program of a conversion."""


class TritonAppend(PlainKernel):
    """One program a token and block of its elements."""

    name = "triton-kv-append"

    def __init__(self) -> None:
        from kbench.kernels import row_kernels

        self._kernel: Any = row_kernels._append

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        k, v, pool = state["k"], state["v"], state["k_to"]
        elements = k.shape[1] * k.shape[2]
        block = min(1_024, power_of_two(elements))
        if len(k):
            self._kernel[(len(k), -(-elements // block))](
                k,
                v,
                pool,
                state["v_to"],
                state["slots"],
                k.stride(0),
                v.stride(0),
                state["page_size"],
                *strides(pool, state["layout_to"]),
                k.shape[2],
                elements,
                BLOCK=block,
                num_warps=4,
            )
        return pool, state["v_to"]


class TritonConvert(PlainKernel):
    """One program for 16 tokens of a sequence; the grid is as wide as the longest sequence's table."""

    name = "triton-convert-pages"

    def __init__(self) -> None:
        from kbench.kernels import row_kernels

        self._kernel: Any = row_kernels._convert

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        source, target = state["k_from"], state["k_to"]
        table_from, table_to = state["table_from"], state["table_to"]
        longest = table_from.shape[1] * state["page_size_from"]
        heads = source.shape[2 if state["layout_from"] == "NHD" else 1]
        elements = heads * source.shape[3]
        self._kernel[(-(-longest // TOKENS), len(table_from))](
            source,
            state["v_from"],
            target,
            state["v_to"],
            table_from,
            table_to,
            state["lengths"],
            table_from.shape[1],
            table_to.shape[1],
            state["page_size_from"],
            state["page_size_to"],
            *strides(source, state["layout_from"]),
            *strides(target, state["layout_to"]),
            source.shape[3],
            elements,
            TOKENS=TOKENS,
            BLOCK=min(512, power_of_two(elements)),
            num_warps=4,
        )
        return target, state["v_to"]


def strides(pool: Tensor, layout: str) -> tuple[int, int, int]:
    """Elements from page to page, slot to slot, head to head."""
    slot, head = (1, 2) if layout == "NHD" else (2, 1)
    return pool.stride(0), pool.stride(slot), pool.stride(head)
