"""Weights by recorded shapes: the baseline's, by trace class, only where the cells stand for most of the time."""

from __future__ import annotations

import math
from typing import Any

import pytest
from decide_lab import LONG, POINTS, SHORT, STEP, Lab, make_suite

from kbench.decide import Evidence, Verdict, decide
from kbench.decide.cells import timing_cells
from kbench.decide.shapes import Weights, cell_weights

WEIGHTED = {**STEP, "across": "weighted"}
MOSTLY_LONG = [
    {"point": "32*1@4096", "calls": 90, "time_us": 900.0},
    {"point": "1*1@128", "calls": 100, "time_us": 100.0},
]
MOSTLY_SHORT = [
    {"point": "32*1@4096", "calls": 10, "time_us": 100.0},
    {"point": "1*1@128", "calls": 900, "time_us": 900.0},
]
FAR = [{"point": "1*512@512", "calls": 9, "time_us": 900.0}, {"point": "1*1@128", "calls": 9, "time_us": 100.0}]


def recorded(made: Lab, trace: str, shapes: Any, *, variant: str = "old", mode: str = "virtual") -> Lab:
    return made.trial(f"workload/replay/tiny/{trace};mode={mode}", variant, facts={"shapes": shapes})


def lab(short: float = -0.02, long: float = 0.10) -> Lab:
    return Lab(sessions=6).timing("step", SHORT, short).timing("step", LONG, long)


def verdict(made: Lab, clause: dict[str, Any] = WEIGHTED) -> tuple[Verdict, str]:
    decision = decide(make_suite({"long": [clause]}, looks=[6]), Evidence.of([made.run()]))
    return decision.verdict("long"), decision.regimes[0].clauses[0].detail


def test_recorded_shapes_decide_where_cells_disagree() -> None:
    assert verdict(lab(), STEP)[0] is Verdict.DISABLE
    found, detail = verdict(recorded(lab(), "long", MOSTLY_LONG))
    assert found is Verdict.ENABLE
    assert "2 cells, 100 % of the recorded time (virtual replay of long)" in detail
    assert verdict(recorded(lab(), "long", MOSTLY_SHORT))[0] is Verdict.DISABLE


def test_the_weighted_saving_is_that_of_the_summed_times() -> None:
    made = recorded(Lab(sessions=6), "long", MOSTLY_LONG)
    made.timing("step", SHORT, -0.50, session_sd=0.0, window_sd=1e-6)
    made.timing("step", LONG, 0.10, session_sd=0.0, window_sd=1e-6)
    decision = decide(make_suite({"long": [WEIGHTED]}, looks=[6]), Evidence.of([made.run()]))
    assert decision.regimes[0].clauses[0].observed == pytest.approx(1 - (0.9 * 0.9 + 0.1 * 1.5), abs=1e-4)


def test_the_candidate_s_own_shapes_do_not_count() -> None:
    found, detail = verdict(recorded(lab(), "long", MOSTLY_LONG, variant="new"))
    assert found is Verdict.MISSING
    assert "no replay of trace class 'long' recorded step shapes" in detail


def test_another_trace_class_does_not_count_and_a_real_replay_goes_first() -> None:
    assert verdict(recorded(lab(), "chat", MOSTLY_LONG))[0] is Verdict.MISSING
    made = recorded(recorded(lab(), "long", MOSTLY_SHORT, mode="virtual"), "long", MOSTLY_LONG, mode="exec")
    assert verdict(made)[0] is Verdict.ENABLE


def test_cells_that_stand_for_little_of_the_time_are_no_evidence() -> None:
    found, detail = verdict(recorded(lab(), "long", FAR))
    assert found is Verdict.MISSING
    assert "stand for 10 % of the recorded time" in detail and "1*512@512" in detail


def test_a_cell_of_weight_zero_must_be_measured_all_the_same() -> None:
    made = recorded(Lab(sessions=6).timing("step", LONG, 0.1), "long", MOSTLY_LONG[:1])
    assert verdict(made)[0] is Verdict.MISSING


@pytest.mark.parametrize(
    "shapes",
    [None, "many", [], [7], [{"point": "1*1@128"}], [{"point": "1*1@128", "time_us": math.nan}],
     [{"point": "1*1@128", "time_us": -1.0}], [{"point": "?", "time_us": 5.0}]],
)  # fmt: skip
def test_shapes_that_are_none_are_missing_evidence(shapes: Any) -> None:
    assert verdict(recorded(lab(), "long", shapes))[0] is Verdict.MISSING


def test_a_kernel_is_weighed_by_the_sequences_of_its_phase() -> None:
    suite = make_suite({"long": [WEIGHTED]}, looks=[6])
    made = recorded(lab(), "long", [{"point": "32*1@4096+1*512@512", "calls": 1, "time_us": 100.0}])
    evidence = Evidence.of([made.run()])
    regime = suite.regime[0]
    kernel = cell_weights(suite, evidence, regime, timing_cells(suite, regime, "kernel"))
    assert isinstance(kernel, Weights) and kernel.shares == (0.0, 1.0)
    step = cell_weights(suite, evidence, regime, timing_cells(suite, regime, "step"))
    assert isinstance(step, str) and "0 %" in step


def test_points_near_enough_stand_for_a_bucket_and_the_nearest_takes_it() -> None:
    suite = make_suite({"long": [WEIGHTED]}, looks=[6])
    made = recorded(lab(), "long", [{"point": "16*1@2048", "calls": 1, "time_us": 60.0},
                                    {"point": "4*1@256", "calls": 1, "time_us": 40.0}])  # fmt: skip
    evidence = Evidence.of([made.run()])
    weights = cell_weights(suite, evidence, suite.regime[0], timing_cells(suite, suite.regime[0], "step"))
    assert isinstance(weights, Weights)
    by_point = dict(zip(POINTS, weights.shares, strict=True))
    assert by_point == {SHORT: pytest.approx(0.4), LONG: pytest.approx(0.6)} and weights.coverage == 1.0


def test_what_is_taken_once_a_session_is_not_weighed() -> None:
    made = recorded(Lab().once(SHORT, "conversion_time", 5.0, 1.0).once(LONG, "conversion_time", 5.0, 1.0), "long",
                    MOSTLY_LONG)  # fmt: skip
    for point in POINTS:
        for variant in ("old", "new"):
            made.trial(f"step/step/tiny/{point}", variant)
    found, detail = verdict(made, {**WEIGHTED, "metric": "conversion_time"})
    assert found is Verdict.MISSING and "cannot be weighed" in detail
