"""When enough was read, and when readings drifted.

Pure functions of the readings so far; no clock is read here. The interval of the median is the exact one of order
statistics: it assumes nothing but that readings are independent, so within one window, whose neighbours resemble each
other, it says how well this window is known, not how well the next session will agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import median

CONFIDENCE = 0.95
HALVES_MIN = 8
DRIFT_FLOOR = 0.005
"""Halves that differ by less than this share are no drift, however little they scatter."""


class Stop(StrEnum):
    GO_ON = "go on"
    PRECISION = "precision"
    BUDGET = "budget"


def stop(readings: Sequence[float], *, precision: float, spent_ms: float, budget_ms: float, at_least: int = 6) -> Stop:
    """Whether to stop, and why. `precision`: half-width of the median's 95 % interval over the median, e.g. 0.005.

    A budget that is spent ends it whatever is known; `at_least` readings are taken for a precision, not for a budget.
    """
    if len(readings) >= at_least and relative_half_width(readings) <= precision:
        return Stop.PRECISION
    return Stop.BUDGET if spent_ms >= budget_ms else Stop.GO_ON


def relative_half_width(readings: Sequence[float]) -> float:
    """Half-width of `median_interval` over the median; infinite where too few readings give no interval."""
    low, high = median_interval(readings)
    centre = median(readings) if readings else 0.0
    return (high - low) / 2 / centre if centre > 0 else math.inf


def median_interval(readings: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Order statistics x(k), x(n+1-k) with P(B < k) ≤ (1 - confidence)/2 for B binomial(n, 1/2).

    Source: Conover, Practical Nonparametric Statistics, 3rd ed. (1999) §3.2. Five or fewer readings: infinite.
    """
    ordered, n = sorted(readings), len(readings)
    below, k = 0.0, 0
    while k < n // 2:
        below += _binomial_half(n, k)
        if below > (1 - confidence) / 2:
            break
        k += 1
    if k == 0:
        return -math.inf, math.inf
    return ordered[k - 1], ordered[n - k]


def _binomial_half(n: int, k: int) -> float:
    """P(B = k) for B binomial(n, 1/2), for any n."""
    return math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2))


def unstable(readings: Sequence[float]) -> bool:
    """Whether the window's halves differ by more than its readings scatter: it was read while something changed.

    Scatter: the larger of the halves' median absolute deviations, scaled to a normal standard deviation.
    """
    if len(readings) < HALVES_MIN:
        return False
    first, second = readings[: len(readings) // 2], readings[len(readings) // 2 :]
    centres = median(first), median(second)
    scatter = max(_deviation(first, centres[0]), _deviation(second, centres[1]))
    return abs(centres[0] - centres[1]) > max(scatter, DRIFT_FLOOR * min(centres))


def _deviation(readings: Sequence[float], centre: float) -> float:
    return 1.4826 * median(abs(reading - centre) for reading in readings)
