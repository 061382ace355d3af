"""Where a small sample lies, robustly, how much its neighbours resemble each other, and its ranks.

Owns the Hodges–Lehmann estimate, its exact signed-rank interval and the lag autocorrelation with the sample size that
it is worth. It knows nothing of sessions: pooling blocks of several sessions here would treat them as independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kbench.stats.sample import Floats, Interval, Values, count, finite_values, tail

MIN_FOR_AUTOCORRELATION = 8
MAX_AUTOCORRELATION = 0.95
"""Above it a series is a trend rather than a stationary one, and (1-r)/(1+r) would divide by next to nothing."""


def hodges_lehmann(values: Values) -> float:
    """The median of all n(n+1)/2 Walsh averages (x_i + x_j)/2, i ≤ j.

    Source: Hodges & Lehmann, Ann. Math. Statist. 34 (1963) 598–611. Estimates the centre of symmetry; breakdown point
    29 %, 95 % efficient under normal noise. Assumes independent values, symmetric about one centre: right for log
    ratios of blocks, wrong for skewed differences such as goodput. Memory grows with n²: for up to some thousand
    values.
    """
    return float(np.median(_walsh(finite_values(values, "values"))))


def hodges_lehmann_rows(rows: Floats) -> Floats:
    """`hodges_lehmann` of every row of a matrix, shape (cases, blocks) → (cases,), without a Python loop."""
    matrix = np.asarray(rows, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"rows must be a non-empty matrix, not of shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        row, column = np.argwhere(~np.isfinite(matrix))[0]
        raise ValueError(f"rows[{row}, {column}] is {matrix[row, column]}, must be finite")
    first, second = _pairs(matrix.shape[1])
    medians: Floats = np.median((matrix[:, first] + matrix[:, second]) * 0.5, axis=1)
    return medians


def signed_rank_interval(values: Values, confidence: float = 0.95) -> Interval:
    """Hodges–Lehmann estimate with the exact two-sided confidence interval of Wilcoxon's signed-rank test.

    Source: Hollander, Wolfe & Chicken, Nonparametric Statistical Methods, 3rd ed. (2014) §3.3: the k-th smallest and
    k-th largest Walsh average, k the largest number with P(W+ ≤ k-1) ≤ (1-confidence)/2. Assumes independent values,
    symmetric about one centre. Coverage is at least `confidence`; ties only widen it. Too few values for that (5 or
    fewer at 95 %) give infinite limits, never a smaller confidence.
    """
    sample = finite_values(values, "values")
    error = tail(confidence, "two-sided")
    averages = np.sort(_walsh(sample))
    below = np.cumsum(_signed_rank_probabilities(sample.size))
    # The tolerance keeps probabilities such as 2/2^6 = 0.03125 on the right side of a limit given as a decimal.
    k = int(np.searchsorted(below, error * (1.0 + 1e-12), side="right"))
    point = float(np.median(averages))
    if k == 0:
        return Interval(point, -math.inf, math.inf, sample.size)
    return Interval(point, float(averages[k - 1]), float(averages[-k]), sample.size)


def autocorrelation(values: Values, lag: int = 1) -> float:
    """The sample autocorrelation r_lag = Σ (x_i - m)(x_{i+lag} - m) / Σ (x_i - m)².

    Source: Box, Jenkins & Reinsel, Time Series Analysis (1994) §2.1.5. Assumes equally spaced values of one level;
    biased towards zero by about (1+4r)/n. Values that are all equal vary with nothing: 0.
    """
    lag = count(lag, "lag", at_least=1)
    sample = finite_values(values, "values", at_least=lag + 1)
    centred = sample - sample.mean()
    total = float(centred @ centred)
    if total <= (np.finfo(np.float64).eps * float(np.abs(sample).max())) ** 2 * sample.size:
        return 0.0
    return float(centred[:-lag] @ centred[lag:]) / total


def effective_sample_factor(values: Values) -> float:
    """The share of `values` that independent values of the same precision would need: (1-r)/(1+r), at most 1.

    Source: Bayley & Hammersley, J. Roy. Statist. Soc. Suppl. 8 (1946) 184–197, for a first-order autoregressive series
    and large n; r is the lag-1 autocorrelation with its bias -(1+4r)/n removed (Kendall, Biometrika 41 (1954) 403–404)
    and clipped to [0, 0.95], so that a negative one never narrows an interval. The standard error of a mean grows by
    1/sqrt(factor). Fewer than 8 values: 1, nothing can be said.
    """
    sample = finite_values(values, "values")
    n = sample.size
    if n < MIN_FOR_AUTOCORRELATION or np.all(sample == sample[0]):
        return 1.0
    unbiased = (autocorrelation(sample) + 1.0 / n) / (1.0 - 4.0 / n)
    r = min(max(unbiased, 0.0), MAX_AUTOCORRELATION)
    return (1.0 - r) / (1.0 + r)


def _walsh(sample: Floats) -> Floats:
    first, second = _pairs(sample.size)
    averages: Floats = (sample[first] + sample[second]) * 0.5
    return averages


@lru_cache(maxsize=64)
def _pairs(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    first, second = np.triu_indices(n)
    return first, second


def _signed_rank_probabilities(n: int) -> Floats:
    """P(W+ = w) for w = 0 … n(n+1)/2 under the null: each rank is in the sum with probability one half."""
    probabilities = np.zeros(n * (n + 1) // 2 + 1)
    probabilities[0] = 1.0
    for rank in range(1, n + 1):
        shifted = np.zeros_like(probabilities)
        shifted[rank:] = probabilities[:-rank]
        probabilities = 0.5 * (probabilities + shifted)
    return probabilities


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of all values do not exceed. NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
