"""From samples to one estimate a session (timings) or a segment (workloads).

Owns the pairing: windows into blocks, blocks into sessions, segments of both arms. It knows neither thresholds nor
regimes. A value that cannot be right (NaN, infinite, not positive where time is measured) spoils its cell: the result
is an `Unusable` that says where, never an estimate without that value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kbench.decide.evidence import Series
from kbench.stats import (
    clopper_pearson,
    hodges_lehmann_rows,
    lower_bound,
    session_interval,
    skewed_bounds,
    studentised_bootstrap,
    upper_bound,
)

Floats = NDArray[np.float64]
LEAST_DRAWS, MOST_DRAWS, MOST_VALUES = 1_999, 9_999, 2_000_000
FEW_DIFFER = 10
"""Requests that differ in one direction, below which their number says more than their differences."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why there is no estimate."""

    why: str


@dataclass(frozen=True, slots=True)
class Sessions:
    """One estimate a session, in the order of the sessions."""

    session: NDArray[np.int64]
    estimate: Floats

    def __len__(self) -> int:
        return len(self.estimate)

    def without(self, sessions: frozenset[int]) -> Sessions:
        keep = ~np.isin(self.session, np.array(sorted(sessions), dtype=np.int64))
        return Sessions(self.session[keep], self.estimate[keep])

    def first(self, count: int) -> Sessions:
        return Sessions(self.session[:count], self.estimate[:count])


@dataclass(frozen=True, slots=True)
class Blocks:
    """One log ratio a block, sorted by session."""

    session: NDArray[np.int64]
    ratio: Floats


def block_log_ratios(candidate: Series, baseline: Series) -> Blocks | Unusable:
    """log(candidate / baseline) of each block.

    The mean log of the candidate's windows minus that of the baseline's, so that a linear drift within ABBA cancels. A
    block that has fewer windows of one arm than of the other is not used: there it would not.
    """
    for series in (candidate, baseline):
        bad = np.flatnonzero(~(np.isfinite(series.value) & (series.value > 0.0)))
        if bad.size:
            place = bad[0]
            return Unusable(
                f"session {series.session[place] + 1}, block {series.slot[place]} holds {series.value[place]:g}, "
                "which is no time"
            )
    if len(candidate) == 0 or len(baseline) == 0:
        return Unusable("no samples of " + ("the candidate" if len(candidate) == 0 else "the baseline"))
    width = int(max(candidate.slot.max(), baseline.slot.max())) + 1
    keys_c, counts_c, logs_c = _block_means(candidate, width)
    keys_b, counts_b, logs_b = _block_means(baseline, width)
    keys, in_c, in_b = np.intersect1d(keys_c, keys_b, assume_unique=True, return_indices=True)
    whole = counts_c[in_c] == counts_b[in_b]
    keys, ratios = keys[whole], (logs_c[in_c] - logs_b[in_b])[whole]
    if keys.size == 0:
        return Unusable("no block holds as many windows of one arm as of the other")
    return Blocks(keys // width, ratios)


def session_log_ratios(candidate: Series, baseline: Series) -> Sessions | Unusable:
    """log(candidate / baseline) of each session: the Hodges–Lehmann centre of its blocks."""
    blocks = block_log_ratios(candidate, baseline)
    if isinstance(blocks, Unusable):
        return blocks
    sessions, starts, sizes = np.unique(blocks.session, return_index=True, return_counts=True)
    estimates = np.empty(sessions.size)
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        estimates[rows] = hodges_lehmann_rows(blocks.ratio[starts[rows][:, None] + np.arange(size)[None, :]])
    return Sessions(sessions, estimates)


def session_changes(candidate: Series, baseline: Series, floor: float) -> Sessions | Unusable:
    """(candidate - baseline) / max(mean baseline, floor) of each session, for what is measured once a session.

    Differences rather than log ratios, because a conversion that the baseline does not need takes no time at all.
    """
    for series in (candidate, baseline):
        bad = np.flatnonzero(~(np.isfinite(series.value) & (series.value >= 0.0)))
        if bad.size:
            return Unusable(f"session {series.session[bad[0]] + 1} holds {series.value[bad[0]]:g}, which is no time")
    if len(candidate) == 0 or len(baseline) == 0:
        return Unusable("no samples of " + ("the candidate" if len(candidate) == 0 else "the baseline"))
    sessions_c, means_c = means_by(candidate.session, candidate.value)
    sessions_b, means_b = means_by(baseline.session, baseline.value)
    sessions, in_c, in_b = np.intersect1d(sessions_c, sessions_b, assume_unique=True, return_indices=True)
    if sessions.size == 0:
        return Unusable("no session measured both arms")
    scale = max(float(means_b[in_b].mean()), floor)
    return Sessions(sessions, (means_c[in_c] - means_b[in_b]) / scale)


@dataclass(frozen=True, slots=True)
class Paired:
    """The relative change of a workload metric over segments that both arms replayed.

    change    mean candidate / mean baseline - 1; where the baseline's mean is below `floor`, the difference in units
              of `floor` (there a ratio would be a division by next to nothing)
    values    one value a segment, with mean `change`. For a ratio z_i = change + (c_i - (1 + change) b_i) / mean b:
              the mean of d_i = c_i - (1 - margin) b_i over its standard error, with the standard error taken at the
              estimate instead of at the margin. So the bounds do not depend on the margin, and a laxer margin can never
              turn a pass into something else.
    """

    change: float
    values: Floats
    baseline: float
    scale: float
    seed: int

    def __len__(self) -> int:
        return len(self.values)

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Both one-sided bounds at error `alpha`; at 0.025 they are the two-sided 95 % interval."""
        return bootstrap_bounds(self.values, alpha, seed=self.seed)

    def passing_bounds(self, alpha: float) -> tuple[float, float]:
        """The bounds that let a clause pass: never inside those of segments as skewed as the rule declares.

        A bootstrap knows only the segments that it has. Twenty that hold no burst bound the mean of a bursty queue
        wrongly 4 to 7 % of the time at a nominal 2.5 %, and two to four times too often at a family's share of it.
        """
        low, high = self.bounds(alpha)
        skewed_low, skewed_high = skewed_bounds(self.values, alpha)
        return min(low, skewed_low), max(high, skewed_high)

    def share_bounds(self, alpha: float) -> tuple[float, float]:
        """Passing bounds of a mean of differences that are at most 1: requests, of which most differ by nothing.

        Where fewer than `FEW_DIFFER` requests differ in a direction, their number bounds the mean (Clopper–Pearson: no
        difference in n requests leaves a share of 3/n possible at 95 %), because there is too little to resample.
        Elsewhere the resampled bound holds, and is never closer to 0 than that of n requests without any difference.
        """
        low, high = self.passing_bounds(alpha)
        n, above, below = len(self), int((self.values > 0.0).sum()), int((self.values < 0.0).sum())
        most_above, most_below = (
            clopper_pearson(k if k < FEW_DIFFER else 0, n, 1.0 - alpha, "upper").high for k in (above, below)
        )
        high = most_above if above < FEW_DIFFER else max(high, most_above)
        low = -most_below if below < FEW_DIFFER else min(low, -most_below)
        return min(low, self.change), max(high, self.change)


def paired_segments(
    candidate: Series,
    baseline: Series,
    *,
    floor: float,
    seed: int,
    absolute: bool = False,
    most_alone: float = 0.0,
    one_look: bool = False,
) -> Paired | Unusable:
    """Pair both arms by segment; repeated replays of a segment are averaged, they do not add segments.

    `one_look`: only the first run that replayed both arms counts. A real replay is noisy, and who may average until it
    looks good has as many looks as runs (eight of them pass a candidate at the margin 14 % of the time instead of 4 %).
    `absolute`: the change is the plain difference. Segments that only one arm has make the whole unusable where they
    are more than the share `most_alone`: which segments are missing need not be chance.
    """
    for name, series in (("candidate", candidate), ("baseline", baseline)):
        bad = np.flatnonzero(~(np.isfinite(series.value) & (series.value >= 0.0)))
        if bad.size:
            return Unusable(f"segment {series.slot[bad[0]]} of the {name} holds {series.value[bad[0]]:g}")
        if len(series) == 0:
            return Unusable(f"no samples of the {name}")
    if one_look:
        runs = np.intersect1d(candidate.session, baseline.session)
        if runs.size == 0:
            return Unusable("no run replayed both arms")
        candidate, baseline = _of_run(candidate, int(runs[0])), _of_run(baseline, int(runs[0]))
    segments_c, means_c = means_by(candidate.slot, candidate.value)
    segments_b, means_b = means_by(baseline.slot, baseline.value)
    alone = np.setxor1d(segments_c, segments_b)
    if alone.size > most_alone * (segments_c.size + alone.size):
        return Unusable(f"segment {alone[0]} was replayed by one arm only ({alone.size} such segments)")
    _, in_c, in_b = np.intersect1d(segments_c, segments_b, assume_unique=True, return_indices=True)
    means_c, means_b = means_c[in_c], means_b[in_b]
    if means_b.size == 0:
        return Unusable("no segment was replayed by both arms")
    centre = float(means_b.mean())
    if absolute:
        return Paired(float((means_c - means_b).mean()), means_c - means_b, centre, 1.0, seed)
    if centre >= floor and centre > 0.0:
        change = float(means_c.mean()) / centre - 1.0
        values = change + (means_c - (1.0 + change) * means_b) / centre
        return Paired(change, values, centre, centre, seed)
    if floor <= 0.0:
        return Unusable("the baseline is 0 in every segment: there is nothing to compare with")
    values = (means_c - means_b) / floor
    return Paired(float(values.mean()), values, centre, floor, seed)


def _of_run(series: Series, run: int) -> Series:
    here = series.session == run
    return Series(series.session[here], series.slot[here], series.value[here])


def means_by(key: NDArray[np.int64], value: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Distinct keys, sorted, and the mean of their values."""
    distinct, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    return distinct, np.bincount(inverse, weights=value) / counts


def bootstrap_bounds(values: Floats, alpha: float, *, seed: int) -> tuple[float, float]:
    """Both one-sided bounds of a mean at error `alpha`, by the studentised bootstrap.

    Enough is 50 resamples beyond the bound, or 5 where `alpha` is too small for that; where there are too many values
    to resample that often (requests, by the thousand), their mean is normal enough for t.
    """
    draws = min(MOST_DRAWS, max(LEAST_DRAWS, math.ceil(50.0 / alpha)), MOST_VALUES // len(values))
    if (draws + 1) * alpha < 5.0:
        return lower_bound(values, alpha), upper_bound(values, alpha)
    found = studentised_bootstrap(values, seed=seed, confidence=1.0 - 2.0 * alpha, resamples=draws)
    return found.low, found.high


def log_interval(sessions: Sessions) -> tuple[float, float, float]:
    """Point, low and high (95 %, t over sessions)."""
    found = session_interval(sessions.estimate)
    return found.point, found.low, found.high


def spread(sessions: Sessions) -> float:
    """Standard deviation of the sessions' estimates, NaN for fewer than two."""
    return float(sessions.estimate.std(ddof=1)) if len(sessions) > 1 else math.nan


def _block_means(series: Series, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    keys = series.session * width + series.slot
    distinct, starts, counts = np.unique(keys, return_index=True, return_counts=True)
    return distinct, counts, np.add.reduceat(np.log(series.value), starts) / counts
