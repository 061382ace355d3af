"""Merging partial attention outputs: plain torch, and one Triton kernel."""

from __future__ import annotations

from typing import Any

import torch

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs

BLOCK_ELEMENTS = 4_096
"""Of one part in one program."""


class TorchMerge(PlainKernel):
    """Weights by the largest log-sum-exp, then a weighted sum: a dozen kernels."""

    name = "torch-merge"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        outputs, lse = state["outputs"], state["lse"]
        mass = lse.masked_fill(torch.isposinf(lse), float("-inf"))
        peak = mass.amax(dim=0)
        base = torch.where(torch.isfinite(peak), peak, 0.0)
        weights = torch.exp(mass - base)
        total = weights.sum(dim=0)
        held = torch.where((weights > 0)[..., None], outputs.float(), 0.0)
        mixed = (held * weights[..., None]).sum(dim=0) / torch.where(total > 0, total, 1.0)[..., None]
        return mixed.to(outputs.dtype), base + torch.log(total)


class TritonMerge(PlainKernel):
    """One pass over the parts with a running maximum: every part is read once, nothing is stored in between."""

    name = "triton-merge"

    def __init__(self) -> None:
        from kbench.kernels import triton_merge

        self._kernel: Any = triton_merge._merge

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        outputs, lse = state["outputs"], state["lse"]
        parts, rows, heads, dim = outputs.shape
        total = rows * heads
        if total == 0:
            return out
        padded = 1 << (dim - 1).bit_length()
        block = max(1, min(16, BLOCK_ELEMENTS // padded))
        self._kernel[(-(-total // block),)](
            outputs,
            lse,
            out[0],
            out[1],
            total,
            parts,
            HEAD_DIM=dim,
            PADDED=padded,
            BLOCK=1 << (block.bit_length() - 1),
            num_warps=4,
        )
        return out
