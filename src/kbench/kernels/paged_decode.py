"""The Triton kernels of `triton_paged`: a split of the KV length, then the merge of the splits.

Needs triton when imported. The KV length of every sequence is read on the device, so a captured launch stays right when
lengths change under it; only the number of splits is fixed at launch. Nothing beyond a sequence's length is loaded.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _paged_decode_split(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    scale_log2,
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
    per_split = tl.cdiv(tl.cdiv(kv_len, splits), BLOCK) * BLOCK
    first = split * per_split
    last = tl.minimum(first + per_split, kv_len)

    row = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + row
    real_row = row < GROUP

    q_place = q_ptr + sequence * q_stride_token + head[:, None] * q_stride_head
    dot_dim = tl.arange(0, DOT)
    q = tl.load(q_place + dot_dim[None, :], mask=real_row[:, None], other=0.0)
    largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    mixed = tl.zeros([GROUP_PADDED, HEAD_DIM], tl.float32)
    table = table_ptr + sequence * table_stride
    slot = tl.arange(0, BLOCK)

    for start in range(first, last, BLOCK):
        token = start + slot
        real = token < last
        page = tl.load(table + token // PAGE_SIZE, mask=real, other=0).to(tl.int64)
        place = page * kv_stride_page + (token % PAGE_SIZE) * kv_stride_slot + kv_head * kv_stride_head
        address = place[:, None] + dim[None, :]
        k = tl.load(k_ptr + place[:, None] + dot_dim[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        for begin in tl.static_range(DOT, HEAD_DIM, DOT):
            # Scaled before it is added, or the compiler would make one long sum of it again.
            part_q = tl.load(q_place + begin + dot_dim[None, :], mask=real_row[:, None], other=0.0)
            part_k = tl.load(k_ptr + place[:, None] + begin + dot_dim[None, :], mask=real[:, None], other=0.0)
            scores += tl.dot(part_q, tl.trans(part_k), input_precision="ieee") * scale_log2
        scores = tl.where(real[None, :], scores, float("-inf"))
        peak = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - peak[:, None])
        fade = tl.exp2(largest - peak)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + address, mask=real[:, None], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = peak

    some = total > 0.0
    answer = mixed / tl.where(some, total, 1.0)[:, None]
    if DIRECT:
        target = out_ptr + sequence * out_stride_token + head[:, None] * out_stride_head + dim[None, :]
        tl.store(target, answer.to(out_ptr.dtype.element_ty), mask=real_row[:, None])
    else:
        place_of = (sequence * kv_heads * GROUP + head) * splits + split
        lse = tl.where(some, largest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + place_of, lse, mask=real_row)
        tl.store(part_ptr + place_of[:, None] * HEAD_DIM + dim[None, :], answer, mask=real_row[:, None] & some[:, None])


@triton.jit
def _paged_decode_reduce(
    part_ptr,
    lse_ptr,
    out_ptr,
    out_stride_token,
    out_stride_head,
    splits,
    SPLITS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
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
    weights = tl.where(some, tl.exp2(lse - tl.where(peak > float("-inf"), peak, 0.0)), 0.0)
    total = tl.sum(weights, axis=0)
    part = tl.load(part_ptr + place[:, None] * HEAD_DIM + dim[None, :], mask=some[:, None], other=0.0)
    answer = tl.sum(part * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = out_ptr + sequence * out_stride_token + head * out_stride_head + dim
    tl.store(target, answer.to(out_ptr.dtype.element_ty))
