"""From logits to tokens: penalties → mask → temperature → top-k → top-p → draw.

Owns the chain and the draw. A draw is a pure function of the request's seed and the token's position (counter-based
noise, Gumbel maximum), so that batching, preemption and chunking change no draw. It does not know the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kbench.engine.requests import Sampling

FULLY_MASKED_TOKEN = 0
"""What a row yields whose every token is masked: a defined token, not a random one and no failure of the batch."""

_SHORT = 1_024
"""Where every row keeps at most so many tokens, nothing is as wide as the vocabulary but one top-k."""

_NOTHING = nullcontext()

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = 2**64


@dataclass(frozen=True, slots=True)
class Ask:
    """One row's request for a token."""

    sampling: Sampling
    position: int
    """Index of the token that is drawn, counted from the prompt's first token."""
    tokens: Sequence[int]
    """Prompt and output so far."""
    prompt_tokens: int


def plain(asks: Sequence[Ask]) -> bool:
    """Whether one argmax of the logits as they are is the answer of every row."""
    return all(ask.sampling.plain for ask in asks)


def sample(logits: Tensor, asks: Sequence[Ask], copying: AbstractContextManager[object] = _NOTHING) -> Tensor:
    """One token a row of `[rows, vocab]` logits of any dtype, int64 `[rows]` on their device. Inputs are not changed.

    Where all rows are greedy nothing is copied or widened; else the chain works on a float32 copy, 4 bytes a row and
    token of the vocabulary, which is made inside `copying`.
    """
    if plain(asks):
        return logits.argmax(dim=-1)
    with copying:
        scores = logits.to(torch.float32, copy=True)
    for row, ask in enumerate(asks):
        if ask.sampling.penalised:
            _penalise(scores[row], ask)
        if ask.sampling.masked:
            _mask(scores[row], ask.sampling)
    dead = torch.isneginf(scores).all(dim=-1)
    drawn = [row for row, ask in enumerate(asks) if ask.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=scores.device)
        chosen = [asks[row] for row in drawn]
        scores[rows] = _noisy(scores[rows], chosen)
    return torch.where(dead, FULLY_MASKED_TOKEN, scores.argmax(dim=-1))


def _penalise(row: Tensor, ask: Ask) -> None:
    sampling = ask.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(ask.tokens)), device=row.device)
        old = row[seen]
        row[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    counts = Counter(ask.tokens[ask.prompt_tokens :])
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        tokens = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), device=row.device, dtype=row.dtype)
        row[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times


def _mask(row: Tensor, sampling: Sampling) -> None:
    if sampling.allowed:
        keep = torch.zeros(row.shape[0], dtype=torch.bool, device=row.device)
        keep[torch.tensor(sorted(sampling.allowed), device=row.device)] = True
        row.masked_fill_(~keep, float("-inf"))
    if sampling.banned:
        row[torch.tensor(sorted(sampling.banned), device=row.device)] = float("-inf")


def _noisy(scores: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Scores of rows that draw, cut by top-k and top-p, with Gumbel noise: their maximum is the draw."""
    device = scores.device
    heat = torch.tensor([ask.sampling.temperature for ask in asks], device=device, dtype=scores.dtype)
    scores = scores / heat.unsqueeze(-1)
    keys = [(ask.sampling.seed, ask.position) for ask in asks]
    if all(0 < ask.sampling.top_k <= _SHORT for ask in asks):
        return _noisy_short(scores, asks, keys)
    if any(ask.sampling.top_k or ask.sampling.top_p < 1 for ask in asks):
        scores = _cut(scores, asks)
    return scores + gumbel(keys, scores.shape[-1], device)


def _noisy_short(scores: Tensor, asks: Sequence[Ask], keys: Sequence[tuple[int, int]]) -> Tensor:
    """The same where every row keeps few tokens: ranking, softmax and noise for these alone, the rest is -inf.

    Of equal scores the lower token ranks first, as a stable sort ranks them: a score and its token make one integer,
    and integers that differ have one order on every device and in every batch.
    """
    vocab, device = scores.shape[-1], scores.device
    most = min(vocab, max(ask.sampling.top_k for ask in asks))
    bits = scores.view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # as the floats are, -0.0 with 0.0
    place = torch.arange(vocab, device=device)
    order = (ordered * 2**32 - place).topk(most, dim=-1).indices
    ranked = scores.gather(-1, order)
    kept, drop = _keep(ranked, asks)
    noise = gumbel(keys, vocab, device, order)
    return torch.full_like(scores, float("-inf")).scatter_(-1, order, kept.masked_fill(drop, float("-inf")) + noise)


def _cut(scores: Tensor, asks: Sequence[Ask]) -> Tensor:
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    drop = _keep(ranked, asks)[1]
    return scores.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), float("-inf"))


def _keep(ranked: Tensor, asks: Sequence[Ask]) -> tuple[Tensor, Tensor]:
    """Ranked scores with those beyond top-k at -inf, and which of them top-k or top-p drop."""
    device, width = ranked.device, ranked.shape[-1]
    top_k = torch.tensor([ask.sampling.top_k or width for ask in asks], device=device).unsqueeze(-1)
    top_p = torch.tensor([ask.sampling.top_p for ask in asks], device=device).unsqueeze(-1)
    ranked = ranked.masked_fill(torch.arange(width, device=device) >= top_k, float("-inf"))
    mass = ranked.softmax(dim=-1)
    # A token stays while the mass before it is below p: the likeliest one always does.
    return ranked, (mass.cumsum(dim=-1) - mass >= top_p) | torch.isneginf(ranked)


def gumbel(keys: Sequence[tuple[int, int]], vocab: int, device: torch.device, tokens: Tensor | None = None) -> Tensor:
    """Gumbel noise float32 `[rows, vocab]`, a function of each row's (seed, position) only, on any device.

    `tokens`: int64 `[rows, some]`, the noise of these tokens only.
    """
    starts = [noise_state(seed, position) for seed, position in keys]
    state = torch.tensor(starts, dtype=torch.int64, device=device).unsqueeze(-1)
    counter = tokens + 1 if tokens is not None else torch.arange(1, vocab + 1, dtype=torch.int64, device=device)
    word = state + counter * _signed(_GOLDEN)
    word = (word ^ _shifted(word, 30)) * _signed(_MIX_1)
    word = (word ^ _shifted(word, 27)) * _signed(_MIX_2)
    word = word ^ _shifted(word, 31)
    uniform = (_shifted(word, 40).to(torch.float32) + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def noise_state(seed: int, position: int) -> int:
    """Where a row's noise begins, as an int64."""
    return _signed(_mix(_mix(seed % _WORD) + position))


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch shifts int64 arithmetically."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _mix(word: int) -> int:
    """SplitMix64 on Python integers (Steele, Lea, Flood 2014); `gumbel` is the same on tensors."""
    word = (word + _GOLDEN) % _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) % _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) % _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
