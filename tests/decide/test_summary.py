"""A kernel run in one line: weights are calls × time, and nothing is averaged where nobody counted calls."""

from __future__ import annotations

import json

import pytest
from decide_lab import LONG, SHORT, Lab, make_suite

from kbench.decide import Evidence, kernel_summary
from kbench.suite.shapes import Recorded, Row

QUIET = {"session_sd": 0.0005, "window_sd": 0.0005}


def both() -> Lab:
    """Half the time at a short and cheap point, a tenth more at a long and dear one."""
    lab = Lab().timing("kernel", SHORT, 0.5, base_us=100.0, **QUIET)
    return lab.timing("kernel", LONG, -0.1, base_us=1_000.0, **QUIET)


def own(short: float, long: float) -> Recorded:
    rows = (Row(SHORT, short, 0.0), Row(LONG, long, 0.0))
    return Recorded(rows, "own.csv", steps=False, timed=False)


def test_without_weights_there_are_counts_and_no_speed_up() -> None:
    found = kernel_summary(make_suite(), Evidence.of([both().run()]))
    assert (found["wins"], found["losses"], found["ties"], found["inconclusive"], found["failed"]) == (1, 1, 0, 0, 0)
    assert found["speedup"] is None and found["shape_coverage"] is None and found["weights"] is None
    assert found["worst_regression"]["case"].endswith(LONG)
    assert found["worst_regression"]["ratio"] == pytest.approx(1.1, abs=0.01)


@pytest.mark.parametrize(("short", "long"), [(1.0, 0.0), (10.0, 1.0), (1.0, 10.0), (0.0, 3.0)])
def test_the_speed_up_is_that_of_all_calls_together(short: float, long: float) -> None:
    found = kernel_summary(make_suite(), Evidence.of([both().run()]), own(short, long))
    before, after = short * 100 + long * 1_000, short * 50 + long * 1_100
    assert found["speedup"] == pytest.approx(before / after, rel=0.01)
    assert found["saving"] == pytest.approx(1.0 - after / before, abs=0.01)
    assert found["low"] <= found["speedup"] <= found["high"]
    assert found["shape_coverage"] == 1.0
    assert found["ops"]["attention.decode"]["speedup"] == found["speedup"]
    json.dumps(found, allow_nan=False)


def test_a_shape_that_was_not_measured_is_not_covered() -> None:
    rows = Recorded((Row(SHORT, 1.0, 0.0), Row("1*1@999", 3.0, 0.0)), "own.csv", steps=False, timed=False)
    found = kernel_summary(make_suite(), Evidence.of([both().run()]), rows)
    assert found["shape_coverage"] == 0.25
    assert found["speedup"] == pytest.approx(2.0, rel=0.01)


def test_of_recorded_steps_the_near_ones_are_covered_by_their_time() -> None:
    rows = (
        Row("1*1@128", 10.0, 3_000.0),  # the short point
        Row("32*1@4096+1*256@512", 2.0, 5_000.0),  # its decodes are the long point
        Row("1*512", 1.0, 7_000.0),  # a prefill: not this operation's
        Row("1024*1@65536", 1.0, 2_000.0),  # nothing like it was measured
    )
    found = kernel_summary(make_suite(), Evidence.of([both().run()]), Recorded(rows, "steps", steps=True, timed=True))
    assert found["shape_coverage"] == pytest.approx(0.8)
    assert found["speedup"] == pytest.approx((10 * 100 + 2 * 1_000) / (10 * 50 + 2 * 1_100), rel=0.01)


def test_the_suites_own_replays_weigh_where_no_file_does() -> None:
    shapes = [{"point": "1*1@128", "calls": 10, "time_us": 3_000.0}]
    lab = both().trial("workload/replay/tiny/long;mode=virtual", "old", facts={"shapes": shapes})
    found = kernel_summary(make_suite(), Evidence.of([lab.run()]))
    assert found["weights"] == "virtual replay of long"
    assert found["speedup"] == pytest.approx(2.0, rel=0.01)


def test_a_candidate_that_failed_wins_nothing() -> None:
    lab = both().trial(f"kernel/attention.decode/tiny/{SHORT}", "new", status="incorrect")
    found = kernel_summary(make_suite(), Evidence.of([lab.run()]), own(1.0, 1.0))
    assert (found["wins"], found["failed"]) == (0, 1)
    assert found["shape_coverage"] == 0.5


def test_one_session_has_a_speed_up_without_limits() -> None:
    lab = Lab(sessions=1).timing("kernel", SHORT, 0.5)
    found = kernel_summary(make_suite(), Evidence.of([lab.run()]), own(1.0, 0.0))
    assert found["speedup"] is not None and found["low"] is None and found["inconclusive"] == 1
