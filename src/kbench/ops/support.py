"""Which tokens a filter may keep and a draw may answer, by the float64 definition.

Owns the sets between which every right answer lies. Tokens tied with the k-th largest, and tokens whose place relative
to the mass `p` is below what float32 sums can tell, may be kept or dropped; all others are certain. A draw from given
uniforms walks the cumulative mass in the order of token ids; a draw from a generator of its own is held to the support
(hard) and to a chi-square test (soft: it rejects a right answer with probability `ALPHA`). It knows no implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASS_TOLERANCE = 1e-4
"""Of the total mass: float32 sums of 128 k probabilities in any order are nearer than this."""
DRAW_TOLERANCE = 5e-5
"""Of the total mass, between a uniform and a token's end of the cumulative mass."""
ALPHA = 1e-6
"""Probability that a right generator is called wrong, a test."""
MIN_EXPECTED = 5.0
"""Bins of the chi-square test with fewer expected draws are merged."""
MIN_DRAWS = 64
NO_TOKEN = -1
"""The answer of a row in which every token is masked."""


@dataclass(frozen=True, slots=True)
class Support:
    """`certain` ⊆ what a right answer keeps ⊆ `possible`, bool `[rows, vocab]`; `mass` is float64, 0 off `possible`."""

    certain: Tensor
    possible: Tensor
    mass: Tensor

    @property
    def alive(self) -> Tensor:
        """Rows in which any token is left."""
        return self.possible.any(dim=-1)


def support(
    values: Tensor, k: Tensor, p: Tensor, temperature: Tensor, *, slack: float = 0.0, tolerance: float = MASS_TOLERANCE
) -> Support:
    """Top-k, then top-p of what is left, of float64 `values` `[rows, vocab]`, `-inf` where masked.

    k is off where it is 0 or at least the vocabulary, p where it is 1 or more; temperature 0 leaves the largest.
    `slack`: values nearer than this share of the row's largest magnitude count as tied.
    """
    rows, vocab = values.shape
    if not rows:
        empty = torch.zeros((0, vocab), dtype=torch.bool, device=values.device)
        return Support(empty, empty, values.clone())
    height = max(1, (1 << 23) // vocab)
    parts = [
        _support(values[part], k[part, None], p[part, None], temperature[part, None], slack, tolerance)
        for part in (slice(top, top + height) for top in range(0, rows, height))
    ]
    return Support(*(torch.cat([getattr(part, name) for part in parts]) for name in ("certain", "possible", "mass")))


def _support(values: Tensor, k: Tensor, p: Tensor, temperature: Tensor, slack: float, tolerance: float) -> Support:
    vocab = values.shape[1]
    finite = torch.isfinite(values)
    top = values.amax(dim=-1, keepdim=True)
    near = slack * torch.where(finite, values.abs(), 0.0).amax(dim=-1, keepdim=True)
    greedy = temperature == 0
    scaled = (values - torch.where(torch.isfinite(top), top, 0.0)) / torch.where(greedy, 1.0, temperature.double())
    mass = torch.where(finite, scaled.exp(), 0.0)
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    count = torch.where((k <= 0) | (k > vocab), vocab, k).long()
    count = torch.where(greedy, 1, count)
    kth = ordered.gather(1, count - 1)
    possible = finite & (values >= kth - near)
    exactly = possible.sum(dim=-1, keepdim=True) <= count
    certain = torch.where(exactly, possible, finite & (values > kth + near))

    sorted_mass = mass.gather(1, order)
    before = torch.nn.functional.pad(sorted_mass.cumsum(dim=-1), (1, 0))
    keys = -ordered
    above = before.gather(1, torch.searchsorted(keys, keys - near))
    others = before.gather(1, torch.searchsorted(keys, keys + near, right=True)) - sorted_mass
    above, others = (torch.empty_like(mass).scatter_(1, order, own) for own in (above, others))
    least, most = before.gather(1, count), torch.where(possible, mass, 0.0).sum(dim=-1, keepdim=True)
    off = (p >= 1) | greedy
    first = finite & (values >= top - near)
    alone = first & (first.sum(dim=-1, keepdim=True) == 1)
    share = p.double()
    possible &= off | first | (above < (share + tolerance) * most)
    certain &= off | alone | (others < (share - tolerance) * least)
    return Support(certain & possible, possible, torch.where(possible, mass, 0.0))


def kept_problem(kept: Tensor, own: Support, least_count: Tensor, least_mass: Tensor) -> str:
    """What is wrong with the tokens that a filter kept, or an empty string.

    `least_count`, `least_mass` `[rows]`: of the tokens in question, so many or so much must be kept.
    """
    stray, lost = kept & ~own.possible, own.certain & ~kept
    for wrong, what in ((stray, "was kept"), (lost, "was dropped")):
        if bool(wrong.any()):
            row, token = (int(index) for index in wrong.nonzero()[0])
            return f"token {token} of row {row} {what}; {int(wrong.any(dim=-1).sum())} of {len(kept)} rows are wrong"
    few = kept.sum(dim=-1) < least_count
    few |= torch.where(kept, own.mass, 0.0).sum(dim=-1) < least_mass
    if bool(few.any()):
        return f"row {int(few.nonzero()[0, 0])} keeps too little"
    return ""


def inverse_cdf(own: Support, uniform: Tensor) -> Tensor:
    """The first token whose cumulative mass exceeds `uniform` of the total, int64 `[rows]`; NO_TOKEN in dead rows."""
    total = own.mass.cumsum(dim=-1)
    last = own.mass.shape[1] - 1 - (own.mass > 0).flip(-1).int().argmax(dim=-1)
    target = uniform.double()[:, None] * total[:, -1:]
    token = torch.searchsorted(total, target, right=True)[:, 0]
    return torch.where(own.alive, torch.minimum(token, last), NO_TOKEN)


def draw_problem(tokens: Tensor, own: Support, uniform: Tensor | None) -> str:
    """What is wrong with drawn tokens, or an empty string. Without `uniform`: support and, for enough draws from the
    same distribution, its frequencies."""
    rows, vocab = own.mass.shape
    inside = (tokens >= 0) & (tokens < vocab)
    at = tokens.clamp(0, vocab - 1)[:, None]
    allowed = torch.where(own.alive, inside & own.possible.gather(1, at)[:, 0], tokens == NO_TOKEN)
    if not bool(allowed.all()):
        row = int((~allowed).nonzero()[0, 0])
        return (
            f"token {int(tokens[row])} of row {row} cannot be drawn; {int((~allowed).sum())} of {rows} rows are wrong"
        )
    if uniform is None:
        return _frequency_problem(tokens, own)
    low, high = _ends(own, at)
    point = uniform.double()
    off = own.alive & ((point < low - DRAW_TOLERANCE) | (point > high + DRAW_TOLERANCE))
    if bool(off.any()):
        row = int(off.nonzero()[0, 0])
        where = f"{float(low[row]):.6f} to {float(high[row]):.6f}"
        text = f"token {int(tokens[row])} of row {row} has the cumulative mass {where}, the uniform is"
        return f"{text} {float(point[row]):.6f}; {int(off.sum())} of {rows} rows are wrong"
    return ""


def _ends(own: Support, at: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest start and the highest end of a token's piece of the cumulative mass, over all right sets."""
    sure = torch.where(own.certain, own.mass, 0.0)
    loose = own.mass - sure
    sure_to, loose_to = sure.cumsum(dim=-1), loose.cumsum(dim=-1)
    total, spare = sure_to[:, -1], loose_to[:, -1]
    here_sure, here_loose = sure_to.gather(1, at)[:, 0], loose_to.gather(1, at)[:, 0]
    start = here_sure - sure.gather(1, at)[:, 0]
    after = spare - here_loose + loose.gather(1, at)[:, 0]
    low = start / (total + after).clamp_min(1e-300)
    high = (here_sure + here_loose) / (total + here_loose).clamp_min(1e-300)
    return low, high


def _frequency_problem(tokens: Tensor, own: Support) -> str:
    rows = len(tokens)
    if rows < MIN_DRAWS or not bool(own.alive.all()) or not bool((own.mass == own.mass[:1]).all()):
        return ""
    expected = own.mass[0] / own.mass[0].sum() * rows
    seen = torch.bincount(tokens, minlength=len(expected)).double()
    chance = chi_square(seen, expected)
    return f"chi-square test of {rows} draws: p = {chance:.1e}, alpha = {ALPHA:.0e}" if chance < ALPHA else ""


def chi_square(seen: Tensor, expected: Tensor) -> float:
    """The p-value, with all bins of fewer than MIN_EXPECTED expected merged into one."""
    from scipy.stats import chi2  # only where a generator of its own is judged

    order = expected.argsort(descending=True)
    seen, expected = seen[order], expected[order]
    bins = int((expected >= MIN_EXPECTED).sum())
    rest = float(expected[bins:].sum())
    if 0 < rest < MIN_EXPECTED and bins:
        bins -= 1  # the last whole bin takes the rest
    observed = torch.cat([seen[:bins], seen[bins:].sum()[None]])
    wanted = torch.cat([expected[:bins], expected[bins:].sum()[None]])
    keep = wanted > 0
    observed, wanted = observed[keep], wanted[keep]
    if len(wanted) < 2:
        return 1.0
    statistic = float(((observed - wanted).square() / wanted).sum())
    return float(chi2.sf(statistic, len(wanted) - 1))
