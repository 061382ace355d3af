"""The Triton kernel of `sm_clock`. Needs triton when imported, and a CUDA device when launched."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stamp(rows_ptr):
    """Each program: its multiprocessor, that one's cycles, and the device's nanoseconds, read together."""
    stamp = tl.inline_asm_elementwise(
        "{\n.reg .u32 place;\nmov.u32 place, %smid;\ncvt.u64.u32 $0, place;\n"
        "mov.u64 $1, %clock64;\nmov.u64 $2, %globaltimer;\n}",
        "=l,=l,=l",
        args=[],
        dtype=(tl.int64, tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )
    row = rows_ptr + tl.program_id(0) * 3
    tl.store(row, stamp[0])
    tl.store(row + 1, stamp[1])
    tl.store(row + 2, stamp[2])
