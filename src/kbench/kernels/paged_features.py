"""Triton kernels of paged attention with a window, a soft cap, sinks and a log-sum-exp: decode by splits, and prefill.

Needs triton when imported. Lengths are read on the device; nothing outside what a query sees is loaded. Scores are kept
in base 2, the log-sum-exp that is stored is natural.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _capped(scores, softcap):
    """softcap * tanh(scores / softcap), in base 2: exact to float32 near 0 as well, where exponentials cancel."""
    x = scores / softcap
    squared = x * x
    near = squared * (-0.05396825396825397 + squared * (0.021869488536155203 - 0.008863235529902197 * squared))
    near = x * (1.0 + squared * (-0.3333333333333333 + squared * (0.13333333333333333 + near)))
    fade = tl.exp2(tl.abs(x) * -2.885390081777927)  # exp(-2 |x|)
    far = tl.where(x < 0.0, -1.0, 1.0) * (1.0 - fade) / (1.0 + fade)
    return tl.where(squared < 0.09, near, far) * softcap * LOG2_E


@triton.jit
def _decode_split(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    sink_ptr,
    out_ptr,
    lse_out_ptr,
    part_ptr,
    lse_ptr,
    scale,
    softcap,
    window,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    kv_stride_page,
    kv_stride_slot,
    kv_stride_head,
    table_stride,
    splits,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """One sequence, one KV head with all its query heads, one split. DIRECT: there is one split, write the answer.

    DOT: elements of the head that one dot product adds up; where it is less than HEAD_DIM, partial sums are added.
    """
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    kv_heads = tl.num_programs(1)

    kv_len = tl.load(lens_ptr + sequence)
    low = 0
    if WINDOW:
        low = tl.maximum(kv_len - window, 0)
    begin = low // BLOCK * BLOCK
    per_split = tl.cdiv(tl.cdiv(kv_len - begin, splits), BLOCK) * BLOCK
    first = begin + split * per_split
    last = tl.minimum(first + per_split, kv_len)

    row = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, HEAD_DIM)
    dot_dim = tl.arange(0, DOT)
    head = kv_head * GROUP + row
    real_row = row < GROUP
    q_place = q_ptr + sequence * q_stride_token + head[:, None] * q_stride_head
    q = tl.load(q_place + dot_dim[None, :], mask=real_row[:, None], other=0.0)
    largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    mixed = tl.zeros([GROUP_PADDED, HEAD_DIM], tl.float32)
    table = table_ptr + sequence * table_stride
    slot = tl.arange(0, BLOCK)

    for start in range(first, last, BLOCK):
        token = start + slot
        real = token < last
        if WINDOW:
            real = real & (token >= low)
        page = tl.load(table + token // PAGE_SIZE, mask=real, other=0).to(tl.int64)
        place = page * kv_stride_page + (token % PAGE_SIZE) * kv_stride_slot + kv_head * kv_stride_head
        k = tl.load(k_ptr + place[:, None] + dot_dim[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        for offset in tl.static_range(DOT, HEAD_DIM, DOT):
            # Scaled before it is added, or the compiler would make one long sum of it again.
            part_q = tl.load(q_place + offset + dot_dim[None, :], mask=real_row[:, None], other=0.0)
            part_k = tl.load(k_ptr + place[:, None] + offset + dot_dim[None, :], mask=real[:, None], other=0.0)
            scores += tl.dot(part_q, tl.trans(part_k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = _capped(scores, softcap)
        else:
            scores = scores * LOG2_E
        scores = tl.where(real[None, :], scores, float("-inf"))
        peak = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - peak[:, None])
        fade = tl.exp2(largest - peak)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + place[:, None] + dim[None, :], mask=real[:, None], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = peak

    if DIRECT:
        if SINKS:
            sink = tl.load(sink_ptr + head, mask=real_row, other=0.0) * LOG2_E
            peak = tl.maximum(largest, sink)
            fade = tl.exp2(largest - peak)
            total = total * fade + tl.exp2(sink - peak)
            mixed = mixed * fade[:, None]
            largest = peak
        some = total > 0.0
        answer = mixed / tl.where(some, total, 1.0)[:, None]
        target = out_ptr + sequence * out_stride_token + head[:, None] * out_stride_head + dim[None, :]
        tl.store(target, answer.to(out_ptr.dtype.element_ty), mask=real_row[:, None])
        if LSE:
            lse = tl.where(some, largest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
            tl.store(lse_out_ptr + sequence * kv_heads * GROUP + head, lse * LN_2, mask=real_row)
    else:
        some = total > 0.0
        answer = mixed / tl.where(some, total, 1.0)[:, None]
        place_of = (sequence * kv_heads * GROUP + head) * splits + split
        lse = tl.where(some, largest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + place_of, lse, mask=real_row)
        tl.store(part_ptr + place_of[:, None] * HEAD_DIM + dim[None, :], answer, mask=real_row[:, None] & some[:, None])


@triton.jit
def _decode_reduce(
    part_ptr,
    lse_ptr,
    sink_ptr,
    out_ptr,
    lse_out_ptr,
    out_stride_token,
    out_stride_head,
    splits,
    SPLITS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """One sequence and query head: the splits weighted by their mass. Splits without keys hold no value: not loaded."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    split = tl.arange(0, SPLITS_PADDED)
    dim = tl.arange(0, HEAD_DIM)
    place = (sequence * heads + head) * splits + split
    lse = tl.load(lse_ptr + place, mask=split < splits, other=float("-inf"))
    some = lse > float("-inf")
    peak = tl.max(lse, axis=0)
    if SINKS:
        sink = tl.load(sink_ptr + head) * LOG2_E
        peak = tl.maximum(peak, sink)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    weights = tl.where(some, tl.exp2(lse - base), 0.0)
    total = tl.sum(weights, axis=0)
    if SINKS:
        total += tl.exp2(sink - base)
    part = tl.load(part_ptr + place[:, None] * HEAD_DIM + dim[None, :], mask=some[:, None], other=0.0)
    answer = tl.sum(part * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = out_ptr + sequence * out_stride_token + head * out_stride_head + dim
    tl.store(target, answer.to(out_ptr.dtype.element_ty))
    if LSE:
        merged = tl.where(total > 0.0, base + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(lse_out_ptr + sequence * heads + head, merged * LN_2)


@triton.jit
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    start_ptr,
    block_sequence_ptr,
    block_query_ptr,
    sink_ptr,
    out_ptr,
    lse_out_ptr,
    scale,
    softcap,
    window,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    kv_stride_page,
    kv_stride_slot,
    kv_stride_head,
    table_stride,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """QUERIES queries of one sequence with all query heads of one KV head: row `query * GROUP + head of the group`."""
    block = tl.program_id(1)
    kv_head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    sequence = tl.load(block_sequence_ptr + block).to(tl.int64)
    first_query = tl.load(block_query_ptr + block)
    first_row = tl.load(start_ptr + sequence)
    query_len = tl.load(start_ptr + sequence + 1) - first_row
    kv_len = tl.load(lens_ptr + sequence)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    dot_dim = tl.arange(0, DOT)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real_row = (row < QUERIES * GROUP) & (query < query_len)
    packed = (first_row + query).to(tl.int64)
    position = kv_len - query_len + query

    stop = tl.minimum(kv_len, kv_len - query_len + first_query + QUERIES)
    stop = tl.where(first_query < query_len, stop, 0)  # a program of a captured launch that has no query this time
    begin = 0
    if WINDOW:
        begin = tl.maximum(kv_len - query_len + first_query + 1 - window, 0) // BLOCK * BLOCK

    q_place = q_ptr + packed[:, None] * q_stride_token + head[:, None] * q_stride_head
    q = tl.load(q_place + dot_dim[None, :], mask=real_row[:, None], other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    table = table_ptr + sequence * table_stride
    slot = tl.arange(0, BLOCK)

    for start in range(begin, stop, BLOCK):
        token = start + slot
        real = token < stop
        page = tl.load(table + token // PAGE_SIZE, mask=real, other=0).to(tl.int64)
        place = page * kv_stride_page + (token % PAGE_SIZE) * kv_stride_slot + kv_head * kv_stride_head
        k = tl.load(k_ptr + place[:, None] + dot_dim[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        for offset in tl.static_range(DOT, HEAD_DIM, DOT):
            part_q = tl.load(q_place + offset + dot_dim[None, :], mask=real_row[:, None], other=0.0)
            part_k = tl.load(k_ptr + place[:, None] + offset + dot_dim[None, :], mask=real[:, None], other=0.0)
            scores += tl.dot(part_q, tl.trans(part_k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = _capped(scores, softcap)
        else:
            scores = scores * LOG2_E
        seen = real[None, :] & (token[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (token[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(peak > float("-inf"), peak, 0.0)  # a row may see nothing of this tile
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(largest - base)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + place[:, None] + dim[None, :], mask=real[:, None], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = peak

    if SINKS:
        sink = tl.load(sink_ptr + head, mask=real_row, other=0.0) * LOG2_E
        peak = tl.maximum(largest, sink)
        fade = tl.exp2(largest - peak)
        total = total * fade + tl.exp2(sink - peak)
        mixed = mixed * fade[:, None]
        largest = peak
    some = total > 0.0
    answer = mixed / tl.where(some, total, 1.0)[:, None]
    target = out_ptr + packed[:, None] * out_stride_token + head[:, None] * out_stride_head + dim[None, :]
    tl.store(target, answer.to(out_ptr.dtype.element_ty), mask=real_row[:, None])
    if LSE:
        lse = tl.where(some, largest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse_out_ptr + packed * kv_heads * GROUP + head, lse * LN_2, mask=real_row)
