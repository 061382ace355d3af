"""The two readings of "22 % faster", and what a part's saving is worth to the whole.

A saving is the share of *time* saved, s = 1 - t_candidate/t_baseline. A speed-up is a *rate*, r =
t_baseline/t_candidate. Owns the conversions and Amdahl's arithmetic; it knows no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kbench.stats.sample import Interval, finite, nonnegative, positive

_LARGEST_LOG_RATIO = 700.0
"""exp() beyond it overflows; a candidate 10^304 times slower saves minus infinity."""


@dataclass(frozen=True, slots=True)
class FasterReadings:
    """What "x faster" can mean, both as the share of time saved."""

    as_time: float
    """It takes x less time: s = x."""
    as_rate: float
    """It does 1 + x times as much in the same time: s = 1 - 1/(1 + x)."""


@dataclass(frozen=True, slots=True)
class AmdahlSaving:
    """What a faster part brings to a step: the bound f × s, and what is left of it after added work."""

    bound_us: float
    actual_us: float
    bound_share: float
    actual_share: float


def saving(log_ratio: float) -> float:
    """1 - exp(log_ratio), log_ratio = log(t_candidate / t_baseline). Infinite limits map to 1 and -inf."""
    if math.isnan(log_ratio):
        raise ValueError("log_ratio is nan")
    return -math.inf if log_ratio > _LARGEST_LOG_RATIO else -math.expm1(log_ratio)


def log_ratio(saving: float) -> float:
    """log(1 - saving), the inverse of `saving`; a saving of 1 or more would take no time at all."""
    if math.isnan(saving) or saving >= 1.0:
        raise ValueError(f"saving is {saving}, must be below 1")
    return math.log1p(-saving)


def saving_interval(log_ratios: Interval) -> Interval:
    """An interval of log ratios as one of savings: the limits change places, because less time is more saving."""
    return Interval(saving(log_ratios.point), saving(log_ratios.high), saving(log_ratios.low), log_ratios.n)


def saving_from_rate(rate: float) -> float:
    """s = 1 - 1/r: a kernel at 1.22 times the rate takes 18 % less time."""
    return 1.0 - 1.0 / positive(rate, "rate")


def rate_from_saving(saving: float) -> float:
    """r = 1/(1 - s): a kernel that takes 22 % less time runs at 1.28 times the rate."""
    if finite(saving, "saving") >= 1.0:
        raise ValueError(f"saving is {saving}, must be below 1")
    return 1.0 / (1.0 - saving)


def faster_readings(faster: float) -> FasterReadings:
    """Both readings of "`faster` faster" (0.22 for 22 %), as shares of time saved."""
    if finite(faster, "faster") <= -1.0 or faster >= 1.0:
        raise ValueError(f"faster is {faster}, must lie between -1 and 1, both excluded")
    return FasterReadings(as_time=faster, as_rate=saving_from_rate(1.0 + faster))


def amdahl_saving_us(step_us: float, part_us: float, part_saving: float, extra_us: float = 0.0) -> AmdahlSaving:
    """What saving the share `part_saving` of `part_us` brings to a step of `step_us` that gains `extra_us` of work.

    Source: Amdahl, AFIPS 30 (1967) 483–485. Assumes that the part is on the critical path and that nothing else in the
    step changes: shared state (pages, cache, preemption) is outside it. A negative `actual_us` is a slower step.
    """
    step = positive(step_us, "step_us")
    part = nonnegative(part_us, "part_us")
    if part > step:
        raise ValueError(f"part_us is {part}, more than step_us ({step})")
    if finite(part_saving, "part_saving") > 1.0:
        raise ValueError(f"part_saving is {part_saving}, must be at most 1")
    bound = part * part_saving
    actual = bound - finite(extra_us, "extra_us")
    return AmdahlSaving(bound_us=bound, actual_us=actual, bound_share=bound / step, actual_share=actual / step)
