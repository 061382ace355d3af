"""The kernel of `cuda.RemembersOnDevice`: rows are normed, slowly, only where a flag says that they changed."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

PASSES = 200
"""So that what is skipped is worth skipping."""


@triton.jit
def _norm_if_changed(x, weight, eps, kept, answer, changed, width, PASSES: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(changed) != 0.0:
        row = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        inside = column < width
        for _ in range(PASSES):
            values = tl.load(x + row * width + column, mask=inside, other=0.0)
            wide = values.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
            normed = (wide * scale).to(values.dtype) * tl.load(weight + column, mask=inside, other=0.0)
            tl.store(answer + row * width + column, normed, mask=inside)
            tl.store(kept + row * width + column, values, mask=inside)
            tl.debug_barrier()


def remembered_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kept: torch.Tensor,
    answer: torch.Tensor,
    changed: torch.Tensor,
) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _norm_if_changed[(rows,)](x, weight, eps, kept, answer, changed, width, PASSES=PASSES, BLOCK=block)
