"""Bounds for the mean of few skewed values, and the error that a family of such bounds really spends.

The share of good requests falls in bursts: most segments of a replay differ by nothing, a few by a lot. Twenty segments
that happen to hold no burst look quiet and better than they are, to any statistic that sees only them. So the
distribution is declared, not estimated: an exponential tail (skewness 2), on the side that does harm. And the scatter
that counts is that on the harmful side: bursts of gains must not widen a bound against losses. Owns that declaration,
the bounds, their critical values and the family error; what is simulated is deterministic and cached.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from kbench.stats.location import MAX_AUTOCORRELATION, MIN_FOR_AUTOCORRELATION, effective_sample_factor
from kbench.stats.sample import Floats, Values, count, finite_values, fraction
from kbench.stats.student import t_quantile

NEIGHBOURS = 0.25
"""Declared lag-1 correlation of segments: simulated queues at 80 % load show 0.07 to 0.18; this leaves some room."""
CHECKED_NEIGHBOURS = 0.4
"""Lag-1 correlation at which the family error is checked: well above what is declared."""
MOST_SEGMENTS = 200
"""More values than these are judged as these: skew matters less and less, so that is on the safe side."""
ROWS = 40_000
LEAST_BEYOND = 5
"""Simulated values that must lie beyond a critical value for it to mean anything."""


def skewed_bounds(values: Values, error: float) -> tuple[float, float]:
    """Both one-sided bounds of a mean at `error`, for values of which a tail may be missing.

    mean -/+ critical * one-sided deviation / sqrt(n), widened for lag-1 autocorrelation like `studentised_bootstrap`.
    The one-sided deviation is the root of twice the mean square beyond the mean on that side. Values that are all
    equal give their own value, one value infinite bounds.
    """
    sample = finite_values(values, "values")
    n, centre = sample.size, float(sample.mean())
    if n < 2:
        return -math.inf, math.inf
    if np.all(sample == sample[0]):
        return centre, centre
    reach = skewed_critical(error, n) * math.sqrt(2.0 / ((n - 1) * n * effective_sample_factor(sample)))
    below, above = (float(np.sum(np.maximum(side * (sample - centre), 0.0) ** 2)) for side in (-1.0, 1.0))
    return centre - reach * math.sqrt(below), centre + reach * math.sqrt(above)


@lru_cache(maxsize=1024)
def skewed_critical(error: float, n: int) -> float:
    """The number of standard errors that a bound needs, so that `n` declared values pass wrongly at rate `error`.

    The quantile of the statistic of `skewed_bounds` for values with an exponential tail and a lag-1 correlation of
    `NEIGHBOURS`, one standard error of the simulation on the safe side, and at least that of Student's t; infinite
    where so small an error is out of its reach.
    """
    beyond = ROWS * fraction(error, "error")
    rank = math.floor(beyond - math.sqrt(beyond))
    if rank < LEAST_BEYOND:
        return math.inf
    statistics = _statistics(min(count(n, "n", at_least=2), MOST_SEGMENTS), NEIGHBOURS)
    return max(float(statistics[-rank]), t_quantile(1.0 - error, n - 1))


@lru_cache(maxsize=1024)
def family_error(regimes: int, segments: int, alpha: float, *, largest: float = 0.025) -> float:
    """The chance that `regimes` at their margins, each judged from `segments`, let at least one pass.

    Each bound spends min(`largest`, `alpha` / `regimes`). Assumes independent regimes (the worst case is hardly worse)
    whose segments have the declared skew, but resemble their neighbours more than declared: what is above
    `alpha` is what the bound loses by that, more with few segments. 1 where an error that small cannot be simulated.
    """
    share = min(fraction(largest, "largest"), fraction(alpha, "alpha") / count(regimes, "regimes", at_least=1))
    critical = skewed_critical(share, count(segments, "segments", at_least=2))
    if math.isinf(critical):
        return 1.0  # nothing is known about so small an error
    statistics = _statistics(min(segments, MOST_SEGMENTS), CHECKED_NEIGHBOURS)
    wrong = float(ROWS - np.searchsorted(statistics, critical, side="right")) / ROWS
    return 1.0 - (1.0 - wrong) ** regimes


@lru_cache(maxsize=16)
def _statistics(n: int, correlation: float) -> Floats:
    """Sorted: by how many critical values of 1 `skewed_bounds` misses the mean, for values with a left tail."""
    generator = np.random.default_rng([n, round(1000 * correlation)])
    tails = generator.standard_exponential((ROWS, n), dtype=np.float32)
    values = 1.0 - tails
    for place in range(1, n):
        values[:, place] += correlation * values[:, place - 1]
    means = values.mean(axis=1)
    values -= means[:, None]
    squares = np.einsum("ij,ij->i", values, values)
    products = np.einsum("ij,ij->i", values[:, 1:], values[:, :-1])
    factor = _effective_factors(products / squares, n)
    np.minimum(values, 0.0, out=values)
    below = np.einsum("ij,ij->i", values, values)
    found: Floats = np.sort(means / np.sqrt(2.0 * below / ((n - 1) * n * factor))).astype(np.float64)
    return found


def _effective_factors(lag_one: Floats, n: int) -> Floats:
    """`effective_sample_factor` of many samples at once."""
    if n < MIN_FOR_AUTOCORRELATION:
        return np.ones_like(lag_one)
    r = np.clip((lag_one + 1.0 / n) / (1.0 - 4.0 / n), 0.0, MAX_AUTOCORRELATION)
    factors: Floats = (1.0 - r) / (1.0 + r)
    return factors
