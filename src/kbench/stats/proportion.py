"""Intervals for a share of successes in independent trials, such as agreeing tokens or enables per simulated gate.

Owns Clopper–Pearson (never too short) and Wilson (closer to its confidence on average). Requests of one queue are not
independent trials: neither fits an attainment.
"""

from __future__ import annotations

import math

from kbench.stats.sample import Interval, Side, count, one_sided, tail


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95, side: Side = "two-sided") -> Interval:
    """The exact interval from the binomial tails, as beta quantiles.

    Source: Clopper & Pearson, Biometrika 26 (1934) 404–413. Assumes independent trials of one probability; covers at
    least `confidence`. The limit that `side` leaves out is 0 or 1.
    """
    from scipy.special import betaincinv

    hits, n = _counts(successes, trials)
    error = tail(confidence, side)
    low = 0.0 if hits == 0 else float(betaincinv(hits, n - hits + 1, error))
    high = 1.0 if hits == n else float(betaincinv(hits + 1, n - hits, 1.0 - error))
    return _within_unit(one_sided(hits / n, low, high, n, side))


def wilson(successes: int, trials: int, confidence: float = 0.95, side: Side = "two-sided") -> Interval:
    """The score interval: all probabilities that a normal test of this share does not reject.

    Source: Wilson, J. Amer. Statist. Assoc. 22 (1927) 209–212. Assumes independent trials of one probability; covers
    `confidence` on average over it, less at some. The limit that `side` leaves out is 0 or 1.
    """
    from scipy.special import ndtri

    hits, n = _counts(successes, trials)
    z = float(ndtri(1.0 - tail(confidence, side)))
    share, scale = hits / n, 1.0 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1.0 - share) / n + z * z / (4.0 * n * n))
    low = 0.0 if hits == 0 else middle - half
    high = 1.0 if hits == n else middle + half
    return _within_unit(one_sided(share, low, high, n, side))


def _counts(successes: int, trials: int) -> tuple[int, int]:
    n = count(trials, "trials", at_least=1)
    hits = count(successes, "successes", at_least=0)
    if hits > n:
        raise ValueError(f"successes is {hits}, more than trials ({n})")
    return hits, n


def _within_unit(interval: Interval) -> Interval:
    return Interval(interval.point, max(interval.low, 0.0), min(interval.high, 1.0), interval.n)
