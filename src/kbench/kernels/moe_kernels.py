"""Triton kernels around the experts' products: route, sort rows by expert, SiLU-mul, gather, weighted sum.

Imports Triton, and whoever imports this pays for it. Nothing here waits for the device or needs atomics: answers do not
depend on the order in which programs run.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _route(
    logits,
    weights,
    ids,
    stride,
    experts,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
):
    """The `TOP_K` most probable experts of one token, of equal ones the first, and their weights, which add up to 1."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    slot = tl.arange(0, TOP_K_PADDED)
    free = expert < experts
    values = tl.load(logits + token * stride + expert, mask=free, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, 0)
    shares = tl.zeros((TOP_K_PADDED,), dtype=tl.float32)
    chosen = tl.zeros((TOP_K_PADDED,), dtype=tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(tl.where(free, values, float("-inf")), 0)
        found = tl.min(tl.where(free & (values == best), expert, experts - 1), 0)
        free = free & (expert != found)
        shares = tl.where(slot == place, tl.exp(best - largest), shares)
        chosen = tl.where(slot == place, found, chosen)
    at = token * TOP_K + slot
    tl.store(weights + at, shares / tl.sum(shares, 0), mask=slot < TOP_K)
    tl.store(ids + at, chosen.to(ids.dtype.element_ty), mask=slot < TOP_K)


@triton.jit
def _sort_by_expert(
    ids,
    expert_map,
    source,
    place,
    offsets,
    size,
    experts,
    MAPPED: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A counting sort, stable: program e counts what goes before expert e, then writes the rows of e in order.

    source[row] = flat place in `ids`; with PLACED, place[flat place] = row, -1 where the expert is not here.
    """
    own = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    mine = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, size, BLOCK):
        at = start + lane
        expert = tl.load(ids + at, mask=at < size, other=-1).to(tl.int32)
        if MAPPED:
            expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1)
        before += ((expert >= 0) & (expert < own)).to(tl.int32)
        mine += (expert == own).to(tl.int32)
        if PLACED:
            tl.store(place + at, -1, mask=(at < size) & (expert < 0))  # by every program: they all write the same
    row = tl.sum(before, 0)
    tl.store(offsets + own, row)
    if own == experts - 1:
        tl.store(offsets + experts, row + tl.sum(mine, 0))
    for start in range(0, size, BLOCK):
        at = start + lane
        expert = tl.load(ids + at, mask=at < size, other=-1).to(tl.int32)
        if MAPPED:
            expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1)
        chosen = (expert == own).to(tl.int32)
        to = row + tl.cumsum(chosen, 0) - chosen
        tl.store(source + to, at, mask=chosen > 0)
        if PLACED:
            tl.store(place + at, to, mask=chosen > 0)
        row += tl.sum(chosen, 0)


@triton.jit
def _gather_rows(x, source, offsets, rows, width, stride_x, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """rows[r] = x[source[r] // TOP_K] for every row that is somebody's."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offsets + experts):
        token = (tl.load(source + row) // TOP_K).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        tl.store(rows + row * width + column, tl.load(x + token * stride_x + column, mask=inside), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, offsets, width, experts, BLOCK: tl.constexpr):
    """out[r] = silu(gate) * up, gate and up the halves of gate_up[r], for every row that is somebody's."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offsets + experts):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        answer = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + row * width + column, answer.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_sum(rows, weights, place, out, width, stride_out, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = the sum of weights · rows over the token's experts; those that are not here add nothing."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + slot).to(tl.int64)
        share = tl.load(weights + token * TOP_K + slot)
        if row >= 0:
            total += share * tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * stride_out + column, total.to(out.dtype.element_ty), mask=inside)
