"""Pairing windows into blocks, blocks into sessions, segments of two arms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from kbench.decide.estimate import (
    Paired,
    Sessions,
    Unusable,
    bootstrap_bounds,
    paired_segments,
    session_changes,
    session_log_ratios,
)
from kbench.decide.evidence import Series


def series(*rows: tuple[int, int, float]) -> Series:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    return Series(np.array(columns[0], np.int64), np.array(columns[1], np.int64), np.array(columns[2], np.float64))


def test_a_linear_drift_cancels_within_abba() -> None:
    """Log times 0, d, 2d, 3d for A B B A: both arms average 1.5 d."""
    drift = [math.exp(0.1 * position) for position in range(4)]
    old = series((0, 0, 10 * drift[0]), (0, 0, 10 * drift[3]))
    new = series((0, 0, 8 * drift[1]), (0, 0, 8 * drift[2]))
    found = session_log_ratios(new, old)
    assert isinstance(found, Sessions)
    assert found.estimate.tolist() == pytest.approx([math.log(0.8)])


def test_the_session_is_the_median_of_walsh_averages_whatever_the_number_of_blocks() -> None:
    ratios = {0: [0.1, 0.2, 0.9], 1: [0.3, 0.1]}
    old = series(*((s, b, 1.0) for s, blocks in ratios.items() for b in range(len(blocks)) for _ in range(2)))
    new = series(*((s, b, math.exp(r)) for s, blocks in ratios.items() for b, r in enumerate(blocks) for _ in range(2)))
    found = session_log_ratios(new, old)
    assert isinstance(found, Sessions)
    walsh = sorted((x + y) / 2 for i, x in enumerate(ratios[0]) for y in ratios[0][i:])
    assert found.estimate.tolist() == pytest.approx([float(np.median(walsh)), 0.2])


def test_a_block_without_its_counterpart_is_not_used() -> None:
    old = series((0, 0, 1.0), (0, 0, 1.0), (0, 1, 1.0), (1, 0, 1.0), (1, 0, 1.0))
    new = series((0, 0, 2.0), (0, 0, 2.0), (0, 1, 9.0), (0, 1, 9.0))
    found = session_log_ratios(new, old)
    assert isinstance(found, Sessions)
    assert found.session.tolist() == [0]
    assert found.estimate.tolist() == pytest.approx([math.log(2.0)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_value_that_is_no_time_spoils_the_cell_and_says_where(bad: float) -> None:
    good = series((0, 0, 1.0), (0, 1, 1.0))
    spoiled = series((0, 0, 1.0), (0, 1, bad))
    for pair in ((good, spoiled), (spoiled, good)):
        found = session_log_ratios(*pair)
        assert isinstance(found, Unusable)
        assert "session 1, block 1" in found.why


def test_nothing_is_unusable() -> None:
    assert isinstance(session_log_ratios(series(), series((0, 0, 1.0))), Unusable)
    assert isinstance(session_log_ratios(series((0, 0, 1.0)), series((1, 0, 1.0))), Unusable)


def test_what_is_taken_once_a_session_is_compared_by_difference() -> None:
    found = session_changes(series((0, 0, 12.0), (1, 0, 9.0)), series((0, 0, 10.0), (1, 0, 10.0)), 1.0)
    assert isinstance(found, Sessions)
    assert found.estimate.tolist() == pytest.approx([0.2, -0.1])


def test_a_conversion_that_the_baseline_does_not_have_counts_in_units_of_the_floor() -> None:
    found = session_changes(series((0, 0, 300.0)), series((0, 0, 0.0)), 1.0)
    assert isinstance(found, Sessions)
    assert found.estimate.tolist() == [300.0]


def segments(values: list[float]) -> Series:
    return series(*((0, index, value) for index, value in enumerate(values)))


def paired(new: list[float], old: list[float], **how: object) -> Paired:
    found = paired_segments(segments(new), segments(old), seed=1, **{"floor": 0.0, **how})  # type: ignore[arg-type]
    assert isinstance(found, Paired)
    return found


def test_the_change_is_the_ratio_of_the_means() -> None:
    found = paired([8.0, 1.0], [10.0, 2.0])
    assert found.change == pytest.approx(9.0 / 12.0 - 1.0)
    assert float(found.values.mean()) == pytest.approx(found.change)


def test_the_statistic_is_that_of_the_declared_difference() -> None:
    """mean(z) + margin = mean(d) / mean(b), d_i = c_i - (1 - margin) b_i."""
    new, old, margin = [0.8, 0.9, 0.7, 0.95], [0.85, 0.9, 0.8, 0.9], 0.03
    d = np.array(new) - (1 - margin) * np.array(old)
    assert float(paired(new, old).values.mean()) + margin == pytest.approx(d.mean() / np.mean(old))


def test_repeated_replays_of_a_segment_are_averaged_and_add_none() -> None:
    twice = series((0, 0, 1.0), (0, 0, 3.0), (0, 1, 5.0))
    found = paired_segments(twice, segments([2.0, 5.0]), floor=0.0, seed=1)
    assert isinstance(found, Paired)
    assert len(found) == 2
    assert found.change == pytest.approx(0.0)


def test_a_segment_of_one_arm_only_is_unusable() -> None:
    assert isinstance(paired_segments(segments([1.0]), segments([1.0, 1.0]), floor=0.0, seed=1), Unusable)


def test_a_baseline_of_nothing_needs_a_floor() -> None:
    assert isinstance(paired_segments(segments([0.5]), segments([0.0]), floor=0.0, seed=1), Unusable)
    assert paired([3.0, 1.0], [0.0, 0.0], floor=1.0).change == pytest.approx(2.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_bad_segment_is_unusable(bad: float) -> None:
    assert isinstance(paired_segments(segments([1.0, bad]), segments([1.0, 1.0]), floor=0.0, seed=1), Unusable)


def test_bounds_of_many_values_agree_with_t() -> None:
    values = np.random.default_rng(1).normal(0.1, 1.0, 3_000)
    low, high = scipy_stats.t.interval(0.95, 2_999, values.mean(), scipy_stats.sem(values))
    assert bootstrap_bounds(values, 0.025, seed=1) == pytest.approx((low, high), abs=0.01)
