"""From logits to tokens: penalties → mask → temperature → top-k → top-p → draw.

Owns the chain and the draw. A draw is a pure function of the request's seed and the token's position (counter-based
noise, Gumbel maximum), so that batching, preemption and chunking change no draw. It does not know the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kbench.engine.requests import Sampling

FULLY_MASKED_TOKEN = 0
"""What a row yields whose every token is masked: a defined token, not a random one and no failure of the batch."""

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


def sample(logits: Tensor, asks: Sequence[Ask]) -> Tensor:
    """One token a row of `[rows, vocab]` float32 logits, int64 `[rows]` on their device. Inputs are not changed."""
    if all(ask.sampling.plain for ask in asks):
        return logits.argmax(dim=-1)
    scores = logits.clone()
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
    if any(ask.sampling.top_k or ask.sampling.top_p < 1 for ask in asks):
        scores = _cut(scores, asks)
    return scores + gumbel([(ask.sampling.seed, ask.position) for ask in asks], scores.shape[-1], device)


def _cut(scores: Tensor, asks: Sequence[Ask]) -> Tensor:
    vocab = scores.shape[-1]
    top_k = torch.tensor([ask.sampling.top_k or vocab for ask in asks], device=scores.device).unsqueeze(-1)
    top_p = torch.tensor([ask.sampling.top_p for ask in asks], device=scores.device).unsqueeze(-1)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(vocab, device=scores.device) >= top_k, float("-inf"))
    mass = ranked.softmax(dim=-1)
    # A token stays while the mass before it is below p: the likeliest one always does.
    drop = (mass.cumsum(dim=-1) - mass >= top_p) | torch.isneginf(ranked)
    return scores.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), float("-inf"))


def gumbel(keys: Sequence[tuple[int, int]], vocab: int, device: torch.device) -> Tensor:
    """Gumbel noise float32 `[rows, vocab]`, a function of each row's (seed, position) only, on any device."""
    starts = [_signed(_mix(_mix(seed % _WORD) + position)) for seed, position in keys]
    state = torch.tensor(starts, dtype=torch.int64, device=device).unsqueeze(-1)
    counter = torch.arange(1, vocab + 1, dtype=torch.int64, device=device)
    word = state + counter * _signed(_GOLDEN)
    word = (word ^ _shifted(word, 30)) * _signed(_MIX_1)
    word = (word ^ _shifted(word, 27)) * _signed(_MIX_2)
    word = word ^ _shifted(word, 31)
    uniform = (_shifted(word, 40).to(torch.float32) + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


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
