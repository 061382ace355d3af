"""The Triton kernels of RoPE, SiLU-mul, fp8 rows and KV movement. Device code only."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _silu_mul(x, out, row_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + width + at, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _to_fp8_grid(y):
    """Nearest, ties to even, to three bits of mantissa; below 2^-6 to multiples of 2^-9."""
    bits = y.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (y + 24576.0) - 24576.0  # the last bit of 1.5 * 2^14 is 2^-9
    return tl.where(tl.abs(y) < 0.015625, small, normal)


@triton.jit
def _quant_row(x, values, scales, row_stride, width, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    """Two passes over the row: the second finds it in L1 or L2.

    `ROUND`: for Triton's interpreter, whose conversion does not round to the nearest."""
    row = tl.program_id(0).to(tl.int64)
    x += row * row_stride
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)))
    top = tl.max(largest, 0)
    scale = tl.where(top > 0, top / 448.0, 1.0)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32) / scale
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        if ROUND:
            y = _to_fp8_grid(y)
        tl.store(values + row * width + at, y.to(tl.float8e4nv), mask=at < width)


@triton.jit
def _turn_heads(x, out, token, token_stride, heads, dim, half, cos, sin, PAIR, HEADS: tl.constexpr, HALF: tl.constexpr):
    """`PAIR` 1: pairs (2i, 2i + 1); 0: (i, i + half)."""
    head = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (i < half)
    first = head * dim + tl.where(PAIR == 1, 2 * i, i)
    second = head * dim + tl.where(PAIR == 1, 2 * i + 1, i + half)
    a = tl.load(x + token * token_stride + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + token * token_stride + second, mask=inside, other=0.0).to(tl.float32)
    own = out + token * heads * dim
    tl.store(own + first, (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(own + second, (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)
    rest = 2 * half
    while rest < dim:  # what is not turned
        at = rest + i
        some = (head < heads) & (at < dim)
        y = tl.load(x + token * token_stride + head * dim + at, mask=some, other=0.0)
        tl.store(own + head * dim + at, y, mask=some)
        rest += HALF


@triton.jit
def _rope(
    q,
    k,
    positions,
    cos_table,
    sin_table,
    q_out,
    k_out,
    q_stride,
    k_stride,
    q_heads,
    kv_heads,
    dim,
    half,
    PAIR,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    i = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_table + position * half + i, mask=i < half, other=0.0)
    sin = tl.load(sin_table + position * half + i, mask=i < half, other=0.0)
    _turn_heads(q, q_out, token, q_stride, q_heads, dim, half, cos, sin, PAIR, Q_HEADS, HALF)
    _turn_heads(k, k_out, token, k_stride, kv_heads, dim, half, cos, sin, PAIR, KV_HEADS, HALF)


@triton.jit
def _append(
    k,
    v,
    k_pool,
    v_pool,
    slots,
    row_stride_k,
    row_stride_v,
    page_size,
    page_stride,
    slot_stride,
    head_stride,
    dim,
    elements,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if slot >= 0:
        inside = at < elements
        place = slot // page_size * page_stride + slot % page_size * slot_stride
        to = place + (at // dim).to(tl.int64) * head_stride + at % dim
        tl.store(k_pool + to, tl.load(k + token * row_stride_k + at, mask=inside), mask=inside)
        tl.store(v_pool + to, tl.load(v + token * row_stride_v + at, mask=inside), mask=inside)


@triton.jit
def _convert(
    k_from,
    v_from,
    k_to,
    v_to,
    table_from,
    table_to,
    lengths,
    width_from,
    width_to,
    size_from,
    size_to,
    page_stride_from,
    slot_stride_from,
    head_stride_from,
    page_stride_to,
    slot_stride_to,
    head_stride_to,
    dim,
    elements,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    length = tl.load(lengths + sequence)
    if tl.program_id(0) * TOKENS < length:
        live = token < length
        page_from = tl.load(table_from + sequence * width_from + token // size_from, mask=live, other=0).to(tl.int64)
        page_to = tl.load(table_to + sequence * width_to + token // size_to, mask=live, other=0).to(tl.int64)
        start_from = page_from * page_stride_from + token % size_from * slot_stride_from
        start_to = page_to * page_stride_to + token % size_to * slot_stride_to
        for first in range(0, elements, BLOCK):
            at = first + tl.arange(0, BLOCK)[None, :]
            inside = live[:, None] & (at < elements)
            head = at // dim
            source = start_from[:, None] + head * head_stride_from + at % dim
            target = start_to[:, None] + head * head_stride_to + at % dim
            tl.store(k_to + target, tl.load(k_from + source, mask=inside), mask=inside)
            tl.store(v_to + target, tl.load(v_from + source, mask=inside), mask=inside)
