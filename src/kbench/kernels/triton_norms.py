"""The Triton kernels of RMSNorm, alone and with the residual addition. Needs triton when imported."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rmsnorm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    out_stride,
    sum_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """One row. It is held in registers where BLOCK covers it, else read again for the second pass.

    ADD: x + residual is rounded to the dtype before it is normed, because the next layer reads it so.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK):
        column = start + place
        inside = column < HIDDEN
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
        if ADD:
            residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(sum_ptr + row * sum_stride + column, x, mask=inside)
        wide = x.to(tl.float32)
        squares += wide * wide
    factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / HIDDEN + eps)
    for start in tl.static_range(0, HIDDEN, BLOCK):
        column = start + place
        inside = column < HIDDEN
        if HIDDEN > BLOCK:
            if ADD:
                x = tl.load(sum_ptr + row * sum_stride + column, mask=inside, other=0.0)
            else:
                x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        normed = (x.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + column, normed * weight, mask=inside)
