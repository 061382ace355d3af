"""RoPE, SiLU-mul and fp8 rows in Triton: launching only. The kernels are in `kernels.row_kernels`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs


def power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


class TritonSiluMul(PlainKernel):
    """One pass: both halves in, the product out."""

    name = "triton-silu-mul"

    def __init__(self) -> None:
        from kbench.kernels import row_kernels

        self._kernel: Any = row_kernels._silu_mul

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        x = state["x"]
        rows, width = len(x), x.shape[1] // 2
        if rows:
            block = min(1_024, power_of_two(width))
            self._kernel[(rows, -(-width // block))](x, out[0], x.stride(0), width, BLOCK=block, num_warps=4)
        return out[0]


class TritonQuantFp8(PlainKernel):
    """One program a row, two passes over it."""

    name = "triton-quant-fp8"

    def __init__(self) -> None:
        from kbench.kernels import row_kernels

        self._kernel: Any = row_kernels._quant_row

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        x = state["x"]
        if len(x):
            block = min(4_096, power_of_two(x.shape[1]))
            values, scales = out
            crude = x.device.type == "cpu"  # the interpreter
            self._kernel[(len(x),)](x, values, scales, x.stride(0), x.shape[1], BLOCK=block, ROUND=crude, num_warps=8)
        return out


class TritonRope(PlainKernel):
    """One program a token: the row of the tables is read once for all heads."""

    name = "triton-rope"

    def __init__(self) -> None:
        from kbench.kernels import row_kernels

        self._kernel: Any = row_kernels._rope

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        q, k = state["q"], state["k"]
        half = state["cos"].shape[1]
        if len(q):
            self._kernel[(len(q),)](
                q,
                k,
                state["positions"],
                state["cos"],
                state["sin"],
                *out,
                q.stride(0),
                k.stride(0),
                q.shape[1],
                k.shape[1],
                q.shape[2],
                half,
                int(state["interleaved"]),
                Q_HEADS=power_of_two(q.shape[1]),
                KV_HEADS=power_of_two(k.shape[1]),
                HALF=max(16, power_of_two(half)),
                num_warps=4,
            )
        return out
