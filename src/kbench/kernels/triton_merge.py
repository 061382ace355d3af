"""The Triton kernel that merges partial attention outputs. Needs triton when imported."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merge(
    parts_ptr,
    lse_ptr,
    out_ptr,
    lse_out_ptr,
    rows,
    parts,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows (a row is one query token and head) of all parts; a part without mass is not loaded."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, PADDED)
    real = row < rows
    inside = real[:, None] & (dim < HEAD_DIM)[None, :]
    place = row[:, None] * HEAD_DIM + dim[None, :]
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, PADDED], tl.float32)
    for part in range(parts):
        above = tl.cast(part, tl.int64) * rows
        lse = tl.load(lse_ptr + above + row, mask=real, other=float("-inf"))
        some = (lse > float("-inf")) & (lse < float("inf"))
        lse = tl.where(some, lse, float("-inf"))
        peak = tl.maximum(largest, lse)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        weight = tl.exp(lse - base)
        fade = tl.exp(largest - base)
        values = tl.load(parts_ptr + above * HEAD_DIM + place, mask=inside & some[:, None], other=0.0)
        total = total * fade + weight
        mixed = mixed * fade[:, None] + values.to(tl.float32) * weight[:, None]
        largest = peak
    some = total > 0.0
    answer = mixed / tl.where(some, total, 1.0)[:, None]
    tl.store(out_ptr + place, answer.to(out_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(some, largest + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse_out_ptr + row, lse, mask=real)
