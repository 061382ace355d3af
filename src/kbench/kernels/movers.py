"""Appending, copying and converting keys and values in plain torch: advanced indexing, one gather and one scatter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs


class TorchAppend(PlainKernel):
    """An indexed write of all new tokens; which of them are stored is looked up in the plan."""

    name = "torch-kv-append"

    def plan(self, state: dict[str, Any]) -> Any:
        slots = state["slots"]
        kept = (slots >= 0).nonzero()[:, 0]
        every = len(kept) == len(slots)
        return Slots.of(slots[kept], state["page_size"]), None if every else kept

    def run(self, state: dict[str, Any], plan: Any, out: Outputs) -> Outputs:
        slots, kept = plan
        for rows, pool in (("k", "k_to"), ("v", "v_to")):
            put(state[pool], slots, state[rows] if kept is None else state[rows][kept], state["layout_to"])
        return state["k_to"], state["v_to"]


class TorchCopyPages(PlainKernel):
    """index_select of the source pages, index_copy to the targets: the data go through a temporary."""

    name = "torch-copy-pages"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        for name in ("k_to", "v_to"):
            state[name].index_copy_(0, state["targets"], state[name].index_select(0, state["sources"]))
        return state["k_to"], state["v_to"]


class TorchConvert(PlainKernel):
    """Token by token: slots of both sides in the plan, one gather and one scatter in the call."""

    name = "torch-convert"

    def plan(self, state: dict[str, Any]) -> Any:
        return tuple(
            Slots.of(slots_of(state[f"table_{side}"], state["lengths"], state[f"page_size_{side}"]),
                     state[f"page_size_{side}"])
            for side in ("from", "to")
        )  # fmt: skip

    def run(self, state: dict[str, Any], plan: Any, out: Outputs) -> Outputs:
        source, target = plan
        for name in ("k", "v"):
            pool = state[f"{name}_from"]
            rows = pool[source.page, source.offset] if state["layout_from"] == "NHD" else None
            rows = pool[source.page, :, source.offset] if rows is None else rows
            put(state[f"{name}_to"], target, rows, state["layout_to"])
        return state["k_to"], state["v_to"]


@dataclass(frozen=True, slots=True)
class Slots:
    page: Tensor
    offset: Tensor

    @classmethod
    def of(cls, slots: Tensor, page_size: int) -> Slots:
        return cls(slots // page_size, slots % page_size)


def put(pool: Tensor, slots: Slots, rows: Tensor, layout: str) -> None:
    if layout == "NHD":
        pool[slots.page, slots.offset] = rows
    else:
        pool[slots.page, :, slots.offset] = rows


def slots_of(table: Tensor, lengths: Tensor, page_size: int) -> Tensor:
    """Slots of all tokens of all sequences; a mask over the padded table, so one read of the device."""
    positions = torch.arange(table.shape[1] * page_size, device=table.device)
    slots = table.long().repeat_interleave(page_size, dim=1) * page_size + positions % page_size
    return slots[positions < lengths[:, None]]
