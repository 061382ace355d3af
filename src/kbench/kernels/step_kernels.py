"""Triton kernels that an engine step needs and no operation of level 1 is: embedding with the first norm, rotation with
the KV write, and the argmax of logits. Needs triton when imported.

They join what stands next to each other in a decode step, because there a kernel costs its launch, not its bytes. Each
element is read and written by one thread, so that rotating in place races with nothing.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _embed_rms_norm(
    tokens_ptr,
    feed_ptr,
    sampled_ptr,
    table_ptr,
    weight_ptr,
    hidden_ptr,
    out_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    FEED: tl.constexpr,
):
    """One row: its embedding and the norm of it.

    FEED: where `feed` is not negative, the token is `sampled[feed]`: one that only the device knows yet.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    if FEED:
        source = tl.load(feed_ptr + row)
        fed = tl.load(sampled_ptr + tl.maximum(source, 0)).to(tl.int64)
        token = tl.where(source >= 0, fed, token)
    place = tl.arange(0, BLOCK)
    inside = place < HIDDEN
    x = tl.load(table_ptr + token * HIDDEN + place, mask=inside, other=0.0)
    tl.store(hidden_ptr + row * HIDDEN + place, x, mask=inside)
    wide = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + place, mask=inside, other=0.0)
    normed = (wide * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HIDDEN + place, normed * weight, mask=inside)


@triton.jit
def _rope_kv_write(
    qkv_ptr,
    k_pool,
    v_pool,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    row_stride,
    page_size,
    page_stride,
    slot_stride,
    head_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    NORM: tl.constexpr,
):
    """One token and one head of `[q | k | v]`: q is normed and turned in place, k likewise into its slot, v is copied.

    HALF: half of the elements that turn, paired (i, i + HALF); those behind 2 * HALF are passed on. NORM: q and k are
    normed a head first, each rounded to the dtype as the unfused norm does. A negative slot writes nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, HALF_PADDED)
    inside = i < HALF
    source = qkv_ptr + token * row_stride + head * DIM
    a = tl.load(source + i, mask=inside, other=0.0)
    b = tl.load(source + HALF + i, mask=inside, other=0.0)
    j = 2 * HALF + tl.arange(0, REST_PADDED)
    behind = j < DIM
    c = tl.load(source + j, mask=behind, other=0.0)

    slot = tl.load(slots_ptr + token)
    kv_head = tl.where(head < Q_HEADS + KV_HEADS, head - Q_HEADS, head - Q_HEADS - KV_HEADS)
    place = slot // page_size * page_stride + slot % page_size * slot_stride + kv_head.to(tl.int64) * head_stride

    if head < Q_HEADS + KV_HEADS:
        if NORM:
            wide_a, wide_b, wide_c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
            squares = tl.sum(wide_a * wide_a + wide_b * wide_b, axis=0) + tl.sum(wide_c * wide_c, axis=0)
            factor = 1.0 / tl.sqrt(squares / DIM + eps)
            norm = q_norm_ptr
            if head >= Q_HEADS:
                norm = k_norm_ptr
            a = (wide_a * factor).to(a.dtype) * tl.load(norm + i, mask=inside, other=0.0)
            b = (wide_b * factor).to(b.dtype) * tl.load(norm + HALF + i, mask=inside, other=0.0)
            c = (wide_c * factor).to(c.dtype) * tl.load(norm + j, mask=behind, other=0.0)
        position = tl.load(positions_ptr + token).to(tl.int64)
        cos = tl.load(cos_ptr + position * HALF + i, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + position * HALF + i, mask=inside, other=0.0).to(tl.float32)
        first, second = a.to(tl.float32), b.to(tl.float32)
        turned_a = (first * cos - second * sin).to(a.dtype)
        turned_b = (second * cos + first * sin).to(b.dtype)
        if head < Q_HEADS:
            tl.store(source + i, turned_a, mask=inside)
            tl.store(source + HALF + i, turned_b, mask=inside)
            if NORM:
                tl.store(source + j, c, mask=behind)
        elif slot >= 0:
            tl.store(k_pool + place + i, turned_a, mask=inside)
            tl.store(k_pool + place + HALF + i, turned_b, mask=inside)
            tl.store(k_pool + place + j, c, mask=behind)
    elif slot >= 0:
        tl.store(v_pool + place + i, a, mask=inside)
        tl.store(v_pool + place + HALF + i, b, mask=inside)
        tl.store(v_pool + place + j, c, mask=behind)


@triton.jit
def _argmax_part(logits_ptr, value_ptr, token_ptr, vocab, row_stride, CHUNK: tl.constexpr):
    """The largest of one chunk of one row and its token; of equals the first."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, axis=0)
    first = tl.min(tl.where(x == best, token, 2147483647), axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(value_ptr + place, best)
    tl.store(token_ptr + place, first)


@triton.jit
def _argmax_merge(value_ptr, token_ptr, out_ptr, sampled_ptr, chunks, CHUNKS: tl.constexpr):
    """The largest of a row's chunks. Written twice: for the host, and for the step that is fed from the device."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    value = tl.load(value_ptr + row * chunks + chunk, mask=inside, other=float("-inf"))
    token = tl.load(token_ptr + row * chunks + chunk, mask=inside, other=2147483647)
    best = tl.max(value, axis=0)
    # A row of NaN equals nothing: it yields token 0, as a row of -inf does.
    first = tl.min(tl.where(inside & (value == best), token, 2147483647), axis=0)
    answer = tl.where(first == 2147483647, 0, first).to(tl.int64)
    tl.store(out_ptr + row, answer)
    tl.store(sampled_ptr + row, answer)
