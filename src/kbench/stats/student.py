"""Student's t over independent sessions: intervals, one-sided bounds, and what a number of sessions can detect.

The session (a fresh pair of processes) is the unit: pooling the blocks of one session instead gives 45 % false
positives under a process offset of half a percent. Owns the t formulas; it does not know how a session's estimate was
made.
"""

from __future__ import annotations

import math
from functools import lru_cache

from kbench.stats.sample import Floats, Interval, Values, count, finite, finite_values, fraction, nonnegative, positive


def t_quantile(p: float, df: float) -> float:
    """The p-quantile of Student's t with `df` degrees of freedom (scipy.special.stdtrit)."""
    from scipy.special import stdtrit

    return float(stdtrit(positive(df, "df"), fraction(p, "p")))


def t_cdf(t: float, df: float) -> float:
    """P(T ≤ t) for Student's t with `df` degrees of freedom (scipy.special.stdtr); `t` may be infinite."""
    from scipy.special import stdtr

    if math.isnan(t):
        raise ValueError("t is nan")
    return float(stdtr(positive(df, "df"), t))


def session_interval(session_estimates: Values, confidence: float = 0.95) -> Interval:
    """Mean of the sessions' estimates with a two-sided t interval; one session gives infinite limits.

    Source: Student, Biometrika 6 (1908) 1–25. Assumes independent sessions with roughly normal estimates (each is
    itself a centre of many blocks). Simulated false-positive rate at 6 to 12 sessions and nominal 5 %: 4 to 6 %.
    """
    sample = finite_values(session_estimates, "session_estimates")
    error = (1.0 - fraction(confidence, "confidence")) / 2.0
    if sample.size < 2:
        return Interval(float(sample[0]), -math.inf, math.inf, 1)
    centre = float(sample.mean())
    half = t_quantile(1.0 - error, sample.size - 1) * _standard_error(sample)
    return Interval(centre, centre - half, centre + half, sample.size)


def lower_bound(estimates: Values, alpha: float) -> float:
    """The one-sided lower confidence bound of the mean at error `alpha`; -inf for fewer than two estimates.

    The same t as `session_interval`; with `alpha` of one look of a spending plan it is that look's boundary.
    """
    sample = finite_values(estimates, "estimates")
    quantile_p = 1.0 - fraction(alpha, "alpha")
    if sample.size < 2:
        return -math.inf
    return float(sample.mean()) - t_quantile(quantile_p, sample.size - 1) * _standard_error(sample)


def upper_bound(estimates: Values, alpha: float) -> float:
    """The one-sided upper confidence bound of the mean at error `alpha`; inf for fewer than two estimates."""
    return -lower_bound(-finite_values(estimates, "estimates"), alpha)


def plug_in_interval(
    session_estimates: Values, session_sd: float, card_sessions: int, confidence: float = 0.95
) -> Interval:
    """Mean of few sessions (one is enough) with the spread that a stored A/A calibration of `card_sessions` found.

    t with `card_sessions` - 1 degrees of freedom, standard error session_sd/sqrt(n). Assumes that today's sessions
    scatter as those of the calibration did: same host, device, engine and clocks. Simulated error at nominal 5 %: 4.4
    to 5.2 %.
    """
    sample = finite_values(session_estimates, "session_estimates")
    error = (1.0 - fraction(confidence, "confidence")) / 2.0
    df = count(card_sessions, "card_sessions", at_least=2) - 1
    centre = float(sample.mean())
    half = t_quantile(1.0 - error, df) * nonnegative(session_sd, "session_sd") / math.sqrt(sample.size)
    return Interval(centre, centre - half, centre + half, sample.size)


def detection_power(effect: float, session_sd: float, sessions: int, alpha: float) -> float:
    """The probability that `lower_bound` of `sessions` estimates exceeds 0 when their true mean is `effect`.

    The noncentral t (Johnson, Kotz & Balakrishnan, Continuous Univariate Distributions 2, ch. 31). Assumes normal
    session estimates: with heavy tails the real power is lower.
    """
    from scipy.special import nctdtr

    n = count(sessions, "sessions", at_least=2)
    noncentrality = finite(effect, "effect") * math.sqrt(n) / positive(session_sd, "session_sd")
    critical = t_quantile(1.0 - fraction(alpha, "alpha"), n - 1)
    return 1.0 - float(nctdtr(n - 1, noncentrality, critical))


def minimum_detectable_effect(session_sd: float, sessions: int, alpha: float, power: float) -> float:
    """The smallest effect beyond a threshold that a one-sided t test over `sessions` finds with probability `power`.

    Inverts `detection_power` (same source and assumptions), in the unit of `session_sd`. Fewer than two sessions find
    nothing: inf. Without scatter everything is found: 0.
    """
    sd = nonnegative(session_sd, "session_sd")
    n = count(sessions, "sessions", at_least=0)
    alpha, power = fraction(alpha, "alpha"), fraction(power, "power")
    if power <= alpha:
        raise ValueError(f"power is {power}, must exceed alpha ({alpha}), which no effect at all already reaches")
    if n < 2:
        return math.inf
    if sd == 0.0:
        return 0.0
    return _detectable(n, alpha, power) * sd


@lru_cache(maxsize=4096)
def _detectable(n: int, alpha: float, power: float) -> float:
    """The effect in standard deviations; it costs 60 evaluations of the noncentral t, and is asked for cell by cell."""
    low, high = 0.0, 1.0
    while detection_power(high, 1.0, n, alpha) < power:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if detection_power(middle, 1.0, n, alpha) >= power else (middle, high)
    return high


def sessions_needed(effect: float, session_sd: float, alpha: float, power: float, *, at_most: int = 1000) -> int | None:
    """The fewest sessions whose `minimum_detectable_effect` is at most `effect`; None where `at_most` are too few."""
    target = positive(effect, "effect")
    low, high = 2, count(at_most, "at_most", at_least=2)
    if minimum_detectable_effect(session_sd, high, alpha, power) > target:
        return None
    while low < high:
        middle = (low + high) // 2
        if minimum_detectable_effect(session_sd, middle, alpha, power) <= target:
            high = middle
        else:
            low = middle + 1
    return low


def _standard_error(sample: Floats) -> float:
    return float(sample.std(ddof=1)) / math.sqrt(sample.size)
