"""How one error rate is shared: across hypotheses (Holm) and across looks at growing data (spending).

Owns both procedures. It does not know regimes or sessions: hypotheses are p values, looks are amounts of information.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kbench.stats.sample import Floats, Values, finite_values, fraction, positive

_REACH = 8.5
"""Standard deviations below which a normal density is nothing to double precision."""


@dataclass(frozen=True, slots=True)
class Holm:
    """What Holm's procedure says, in the order in which the p values were given."""

    adjusted: tuple[float, ...]
    rejected: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """One look: reject when the one-sided p value is at most `nominal_alpha` (the statistic at least `z`)."""

    information: float
    """Share of the final information, 1 at the last look."""
    spent: float
    """Error spent up to and including this look."""
    nominal_alpha: float
    z: float


def holm(p_values: Values, alpha: float) -> Holm:
    """Holm's step-down procedure: the chance of one false rejection or more is at most `alpha`.

    Source: Holm, Scand. J. Statist. 6 (1979) 65–70. Valid under any dependence of the p values. Adjusted p values
    compare with `alpha` directly.
    """
    p = finite_values(p_values, "p_values")
    outside = np.flatnonzero((p < 0.0) | (p > 1.0))
    if outside.size:
        raise ValueError(f"p_values[{outside[0]}] is {p[outside[0]]}, must lie between 0 and 1")
    fraction(alpha, "alpha")
    order = np.argsort(p, kind="stable")
    stepped = np.minimum(np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)), 1.0)
    adjusted = np.empty_like(p)
    adjusted[order] = stepped
    return Holm(tuple(adjusted.tolist()), tuple((adjusted <= alpha).tolist()))


def obf_spending(alpha: float, looks: Sequence[float], *, final: float | None = None) -> tuple[Look, ...]:
    """Boundaries of a one-sided group-sequential test with O'Brien–Fleming-type error spending.

    Source: Lan & DeMets, Biometrika 70 (1983) 659–663, spending a(t) = 2 - 2 Φ(z_{alpha/2} / sqrt t); boundaries by
    the recursive integration of Armitage, McPherson & Rowe, J. Roy. Statist. Soc. A 132 (1969) 235–244. `looks` are
    increasing amounts of information, session counts for instance; t is their share of `final`, by default of the
    last look.

    Assumes statistics with independent normal increments, and looks chosen without sight of the effect. Over few
    sessions use `nominal_alpha` with a t quantile (`lower_bound`): simulated error 4.5 to 5.5 % at nominal 5 %. An
    added or skipped look needs only its place in `looks`: earlier boundaries do not change.
    """
    fractions = _information(looks, final)
    spent = [_obf_spent(fraction(alpha, "alpha"), t) for t in fractions]
    result: list[Look] = []
    grid, density = np.zeros(1), np.ones(1)  # at t = 0 the whole mass sits at 0; weights are part of the density
    previous_t = 0.0
    for t, total in zip(fractions, spent, strict=True):
        step = math.sqrt(t - previous_t)
        increment = total - (result[-1].spent if result else 0.0)
        boundary = _boundary(grid, density, step, increment, reach=_REACH * math.sqrt(t))
        z = boundary / math.sqrt(t)
        result.append(Look(information=t, spent=total, nominal_alpha=_upper_tail(z), z=z))
        grid, density = _survive(grid, density, step, boundary, low=-_REACH * math.sqrt(t))
        previous_t = t
    return tuple(result)


def _information(looks: Sequence[float], final: float | None) -> list[float]:
    amounts = finite_values(looks, "looks")
    if amounts[0] <= 0.0 or np.any(np.diff(amounts) <= 0.0):
        raise ValueError(f"looks is {list(looks)}, must be increasing and above 0")
    whole = float(amounts[-1]) if final is None else positive(final, "final")
    if amounts[-1] > whole:
        raise ValueError(f"looks ends at {amounts[-1]:g}, beyond final ({whole:g})")
    return [float(amount) / whole for amount in amounts]


def _obf_spent(alpha: float, t: float) -> float:
    from scipy.special import ndtri

    return 2.0 * _upper_tail(-float(ndtri(alpha / 2.0)) / math.sqrt(t))


def _upper_tail(z: float) -> float:
    from scipy.special import ndtr

    return float(ndtr(-z))


def _boundary(grid: Floats, density: Floats, step: float, increment: float, *, reach: float) -> float:
    """The height that a path, still running with `density`, passes after one step with probability `increment`."""
    from scipy.special import ndtr

    low, high = -reach, reach
    for _ in range(80):
        middle = 0.5 * (low + high)
        crossing = float(density @ ndtr((grid - middle) / step))
        low, high = (middle, high) if crossing > increment else (low, middle)
    return 0.5 * (low + high)


def _survive(grid: Floats, density: Floats, step: float, boundary: float, *, low: float) -> tuple[Floats, Floats]:
    """Grid and Simpson-weighted density of the paths that have not passed `boundary`."""
    points = 2 * math.ceil(max(200.0, 8.0 * (boundary - low) / step)) + 1
    heights = np.linspace(low, boundary, points)
    weights = np.ones(points)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    weights *= (heights[1] - heights[0]) / 3.0
    kernel = np.exp(-0.5 * ((heights[:, None] - grid[None, :]) / step) ** 2) / (step * math.sqrt(2.0 * math.pi))
    return heights, weights * (kernel @ density)
