"""The Triton kernels that draw tokens: temperature, top-k and top-p with Gumbel noise of a counter. Needs triton when
imported.

A draw is the largest of score + noise among the tokens that top-k and top-p keep. Nothing is sorted for it: the largest
of all tokens is kept with probability p or more, and one pass over the row tells whether it is (how much stands before
it in rank). Where it is not, the next largest is tried. `engine.sampler` is the definition, ties included: of equal
scores the lower token ranks first, of equal sums the lower token is drawn.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(-7046029254386353131)  # SplitMix64's constants as int64
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)
NOBODY = tl.constexpr(2147483647)
LOWEST = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def _gumbel(state, token):
    """Noise of `engine.sampler.gumbel`, a function of the row's state and the token."""
    word = state + (token.to(tl.int64) + 1) * GOLDEN
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * MIX_1
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * MIX_2
    word = word ^ ((word >> 31) & 0x1FFFFFFFF)
    uniform = (((word >> 40) & 0xFFFFFF).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return -tl.log(-tl.log(uniform))


@triton.jit
def _key(x):
    """An int32 of the same order as the float32; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _draw_part(
    logits_ptr,
    heat_ptr,
    state_ptr,
    value_ptr,
    token_ptr,
    top_ptr,
    mass_ptr,
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
):
    """Of one chunk of one row: the largest of score + noise and its token, the largest score, and the mass below it.

    Heat 0: the row is greedy, and there is no noise.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    heat = tl.load(heat_ptr + row)
    x = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    score = tl.div_rn(x, tl.where(heat > 0, heat, 1.0) + tl.zeros_like(x))
    noise = tl.where(heat > 0, _gumbel(tl.load(state_ptr + row), token), 0.0)
    noisy = score + noise
    best = tl.max(noisy, axis=0)
    first = tl.min(tl.where(noisy == best, token, NOBODY), axis=0)
    top = tl.max(score, axis=0)
    base = tl.where(top > float("-inf"), top, 0.0)
    place = row * tl.num_programs(1) + chunk
    tl.store(value_ptr + place, best)
    tl.store(token_ptr + place, first)
    tl.store(top_ptr + place, top)
    tl.store(mass_ptr + place, tl.sum(tl.exp(score - base), axis=0))


@triton.jit
def _scores(logits, at, vocab, heat):
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, heat + tl.zeros_like(x))


@triton.jit
def _top_k_mass(logits, vocab, heat, top, k, BLOCK: tl.constexpr):
    """Mass of the k largest scores: bisection for the k-th, then a sum; tied scores count as often as k has room."""
    low, high = LOWEST, _key(top) + 1  # at least k have the key `low`, fewer than k have `high`
    count = vocab
    while (low + 1 < high) & (count != k):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        found = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            found += ((_key(_scores(logits, at, vocab, heat)) >= middle) & (at < vocab)).to(tl.int32)
        total = tl.sum(found, axis=0)
        low = tl.where(total >= k, middle, low)
        count = tl.where(total >= k, total, count)
        high = tl.where(total >= k, high, middle)
    above = tl.zeros((BLOCK,), tl.float32)
    more = tl.zeros((BLOCK,), tl.int32)
    least = float("inf")
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _scores(logits, at, vocab, heat)
        kept = (_key(x) >= low) & (at < vocab)
        least = tl.minimum(least, tl.min(tl.where(kept, x, float("inf")), axis=0))
        above += tl.where(kept, tl.exp(x - top), 0.0)
        more += kept.to(tl.int32)
    extra = (tl.sum(more, axis=0) - k).to(tl.float32)  # ties beyond k, all of them the least
    return tl.sum(above, axis=0) - extra * tl.exp(least - top)


@triton.jit
def _draw_merge(
    logits_ptr,
    heat_ptr,
    top_k_ptr,
    top_p_ptr,
    state_ptr,
    value_ptr,
    token_ptr,
    top_ptr,
    mass_ptr,
    out_ptr,
    sampled_ptr,
    vocab,
    row_stride,
    chunks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the largest score + noise of those that are kept. Written twice, as the argmax is."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    values = tl.load(value_ptr + row * chunks + chunk, mask=inside, other=float("-inf"))
    tokens = tl.load(token_ptr + row * chunks + chunk, mask=inside, other=NOBODY)
    best = tl.max(values, axis=0)
    token = tl.min(tl.where(inside & (values == best), tokens, NOBODY), axis=0)
    token = tl.where((token == NOBODY) | (best == float("-inf")), 0, token)  # all masked, or not a number

    heat = tl.load(heat_ptr + row)
    k = tl.load(top_k_ptr + row)
    k = tl.where((k <= 0) | (k > vocab), vocab, k)
    p = tl.load(top_p_ptr + row)
    if (heat > 0) & ((k < vocab) | (p < 1.0)) & (best > float("-inf")):
        tops = tl.load(top_ptr + row * chunks + chunk, mask=inside, other=float("-inf"))
        masses = tl.load(mass_ptr + row * chunks + chunk, mask=inside, other=0.0)
        top = tl.max(tops, axis=0)
        whole = tl.sum(masses * tl.exp(tops - top), axis=0)
        if (k < vocab) & (p < 1.0):
            whole = _top_k_mass(logits, vocab, heat, top, k, BLOCK)
        state = tl.load(state_ptr + row)
        kept = False
        while not kept:
            own = tl.div_rn(tl.load(logits + token).to(tl.float32), heat)
            before = tl.zeros((BLOCK,), tl.float32)
            count = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = _scores(logits, at, vocab, heat)
                first = ((x > own) | ((x == own) & (at < token))) & (at < vocab)
                before += tl.where(first, tl.exp(x - top), 0.0)
                count += first.to(tl.int32)
            kept = (tl.sum(count, axis=0) < k) & ((p >= 1.0) | (tl.sum(before, axis=0) < p * whole))
            if not kept:
                best_next = tl.full((BLOCK,), float("-inf"), tl.float32)
                token_next = tl.full((BLOCK,), NOBODY, tl.int32)
                for start in range(0, vocab, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    noisy = _scores(logits, at, vocab, heat) + _gumbel(state, at)
                    left = ((noisy < best) | ((noisy == best) & (at > token))) & (at < vocab)
                    better = left & (noisy > best_next)
                    best_next = tl.where(better, noisy, best_next)
                    token_next = tl.where(better, at, token_next)
                best = tl.max(best_next, axis=0)
                token = tl.min(tl.where(best_next == best, token_next, NOBODY), axis=0)
                kept = token == NOBODY  # nothing is left: cannot be, the likeliest token is always kept
                token = tl.where(kept, 0, token)
    tl.store(out_ptr + row, token.to(tl.int64))
    tl.store(sampled_ptr + row, token.to(tl.int64))
