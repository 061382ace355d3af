"""The Triton kernel of fused sampling: one program a row, no sort.

Owns the device code only; launching is `kernels.triton_sampling`. A row goes through these passes, each over chunks:

1. mask the logits and write them to a float32 workspace; then penalise the tokens of the history there;
2. narrow a bracket around the k-th largest by counting what lies above its middle, until few enough candidates are
   left; where k is off, the same for the mass p by summing exponentials;
3. write the candidates out in the order of token ids, load them into registers, and finish both searches there;
4. walk the cumulative mass to the uniform.

Thresholds are exact: floats are compared as integers of the same order, and the bracket ends at neighbouring integers
or at exactly k. Where candidates never become few (k and p off, thousands of tied logits) the draw walks the whole row.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-2139095041)  # of -inf
VALUE_STEPS = tl.constexpr(20)  # bisection of values first: it forgets the 2^24 keys around zero


@triton.jit
def _key(x):
    """An int32 of the same order as the float32; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):
    """Rounded down, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _above(work, vocab, key, top, scale, CHUNK: tl.constexpr):
    """How many values have at least this key, and their mass."""
    count = tl.zeros((CHUNK,), tl.int32)
    mass = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, vocab, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = tl.load(work + at, mask=at < vocab, other=float("-inf"))
        kept = (_key(x) >= key) & (x > float("-inf"))
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp((x - top) * scale), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _sample_row(
    logits,
    history,
    prompt,
    repetition,
    presence,
    frequency,
    mask_bits,
    temperature,
    top_k,
    top_p,
    uniform,
    out,
    work,
    short_value,
    short_token,
    vocab,
    length,
    logits_stride,
    words,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    HISTORY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    work += row * vocab
    mask_bits += row * words
    history += row * length
    short_value += row * SHORT
    short_token += row * SHORT

    # 1. mask, then penalise
    for start in range(0, vocab, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < vocab
        x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        word = tl.load(mask_bits + at // 32, mask=inside, other=0)
        x = tl.where(((word >> (at % 32)) & 1) == 1, x, float("-inf"))
        tl.store(work + at, x, mask=inside)
    tl.debug_barrier()
    if length > 0:
        place = tl.arange(0, HISTORY)
        token = tl.load(history + place, mask=place < length, other=vocab)
        real = token < vocab
        start_of_answer = tl.load(prompt + row)
        times = tl.zeros((HISTORY,), tl.float32)
        for other in range(length):
            same = (token == tl.load(history + other)) & (other >= start_of_answer)
            times += same.to(tl.float32)
        x = tl.load(work + token, mask=real, other=0.0)
        factor = tl.load(repetition + row)
        x = tl.where(x > 0, x / factor, x * factor)
        x -= tl.load(frequency + row) * times
        x -= tl.where(times > 0, tl.load(presence + row), 0.0)
        tl.debug_barrier()  # a token that occurs twice: both lanes read before either writes
        tl.store(work + token, x, mask=real)
        tl.debug_barrier()

    # the largest and the smallest that is left
    largest = tl.full((CHUNK,), float("-inf"), tl.float32)
    smallest = tl.full((CHUNK,), float("inf"), tl.float32)
    for start in range(0, vocab, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = tl.load(work + at, mask=at < vocab, other=float("-inf"))
        largest = tl.maximum(largest, x)
        smallest = tl.minimum(smallest, tl.where(x > float("-inf"), x, float("inf")))
    top = tl.max(largest, 0)
    bottom = tl.min(smallest, 0)

    if top == float("-inf"):
        tl.store(out + row, -1)
    else:
        heat = tl.load(temperature + row)
        scale = tl.where(heat > 0, 1.0 / tl.where(heat > 0, heat, 1.0), 1.0)
        k = tl.load(top_k + row)
        k = tl.where((k <= 0) | (k > vocab), vocab, k)
        k = tl.where(heat > 0, k, 1)
        p = tl.load(top_p + row)
        p = tl.where(heat > 0, p, 1.0)
        point = tl.load(uniform + row)

        # 2. narrow. Invariant: what has at least the key `low` is enough, what has at least `high` is not.
        by_count = k < vocab
        by_mass = p < 1.0
        low = _key(bottom)
        high = _key(top) + 1
        low_value = bottom
        high_value = top
        count, whole = _above(work, vocab, low, top, scale, CHUNK)
        k = tl.minimum(k, count)
        steps = 0
        while by_count & (count > SHORT) & (count > k) & (low + 1 < high):
            value = 0.5 * low_value + 0.5 * high_value
            key = _middle(low, high)
            guess = _key(value)
            key = tl.where((steps < VALUE_STEPS) & (guess > low) & (guess < high), guess, key)
            new_count, new_mass = _above(work, vocab, key, top, scale, CHUNK)
            enough = new_count >= k
            low_value = tl.where(enough, value, low_value)
            high_value = tl.where(enough, high_value, value)
            low = tl.where(enough, key, low)
            high = tl.where(enough, high, key)
            count = tl.where(enough, new_count, count)
            whole = tl.where(enough, new_mass, whole)
            steps += 1
        counted = by_count & (count <= SHORT) & (count > k)  # the rest of this search happens in registers
        wanted = p * whole
        if by_mass & (count > SHORT):  # the k-th is exact here, or off: `whole` is the mass of what is left
            high = _key(top) + 1
            low_value = bottom
            high_value = top
            steps = 0
            while (count > SHORT) & (low + 1 < high):
                value = 0.5 * low_value + 0.5 * high_value
                key = _middle(low, high)
                guess = _key(value)
                key = tl.where((steps < VALUE_STEPS) & (guess > low) & (guess < high), guess, key)
                new_count, new_mass = _above(work, vocab, key, top, scale, CHUNK)
                enough = new_mass >= wanted
                low_value = tl.where(enough, value, low_value)
                high_value = tl.where(enough, high_value, value)
                low = tl.where(enough, key, low)
                high = tl.where(enough, high, key)
                count = tl.where(enough, new_count, count)
                steps += 1

        if count <= SHORT:
            # 3. candidates in the order of their ids, then everything in registers
            found = 0
            for start in range(0, vocab, CHUNK):
                at = start + tl.arange(0, CHUNK)
                x = tl.load(work + at, mask=at < vocab, other=float("-inf"))
                kept = (_key(x) >= low) & (x > float("-inf"))
                many = kept.to(tl.int32)
                slot = found + tl.cumsum(many, 0) - many
                tl.store(short_value + slot, x, mask=kept)
                tl.store(short_token + slot, at, mask=kept)
                found += tl.sum(many, 0)
            tl.debug_barrier()
            place = tl.arange(0, SHORT)
            x = tl.load(short_value + place, mask=place < found, other=float("-inf"))
            key = _key(x)
            mass = tl.where(place < found, tl.exp((x - top) * scale), 0.0)
            if counted:
                while low + 1 < high:
                    middle = _middle(low, high)
                    enough = tl.sum((key >= middle).to(tl.int32), 0) >= k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
                wanted = p * tl.sum(tl.where(key >= low, mass, 0.0), 0)
            if by_mass:
                high = _key(top) + 1
                while low + 1 < high:
                    middle = _middle(low, high)
                    enough = tl.sum(tl.where(key >= middle, mass, 0.0), 0) >= wanted
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
            mass = tl.where(key >= low, mass, 0.0)
            upto = tl.cumsum(mass, 0)
            target = point * tl.sum(mass, 0)
            last = tl.max(tl.where(mass > 0, place, 0), 0)
            hit = tl.min(tl.where((upto > target) & (mass > 0), place, last), 0)
            tl.store(out + row, tl.load(short_token + hit).to(tl.int64))
        else:
            # 4. the whole row
            _, total = _above(work, vocab, low, top, scale, CHUNK)
            target = point * total
            before = 0.0
            answer = -1
            last = 0
            for start in range(0, vocab, CHUNK):
                at = start + tl.arange(0, CHUNK)
                x = tl.load(work + at, mask=at < vocab, other=float("-inf"))
                kept = (_key(x) >= low) & (x > float("-inf"))
                mass = tl.where(kept, tl.exp((x - top) * scale), 0.0)
                some = tl.sum(mass, 0)
                upto = before + tl.cumsum(mass, 0)
                hit = tl.min(tl.where((upto > target) & (mass > 0), at, vocab), 0)
                answer = tl.where((answer < 0) & (hit < vocab), hit, answer)
                last = tl.maximum(last, tl.max(tl.where(mass > 0, at, 0), 0))
                before += some
            tl.store(out + row, tl.where(answer < 0, last, answer).to(tl.int64))
