"""A fused RMSNorm for `kernel_truth.py`: one program a row, the row in registers. Needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, width, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < width
    x = tl.load(x_ptr + row * width + column, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=real, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + epsilon)
    tl.store(out_ptr + row * width + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=real)
