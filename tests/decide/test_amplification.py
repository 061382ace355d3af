"""From a step saving to goodput: both numbers with their intervals, and never a gate."""

from __future__ import annotations

import math

import pytest
from decide_lab import GOODPUT, LONG, SHORT, STEP, Lab, make_suite

from kbench.decide import Evidence, Verdict, decide, explain
from kbench.decide.amplification import Amplification, amplifications

SHAPES = [{"point": "32*1@4096", "calls": 1, "time_us": 75.0}, {"point": "1*1@128", "calls": 1, "time_us": 25.0}]


def of(made: Lab) -> tuple[Amplification, ...]:
    suite = make_suite({"long": [STEP, {**GOODPUT, "mode": "exec"}]}, looks=[6])
    return amplifications(suite, Evidence.of([made.run()]), suite.regime[0])


def timed() -> Lab:
    return Lab().timing("step", SHORT, 0.02).timing("step", LONG, 0.04)


def test_a_step_saving_and_what_it_became() -> None:
    [found] = of(timed().workload("long", "goodput", 0.8, 0.011))
    saving, low, high = found.step_saving
    assert saving == pytest.approx(0.03, abs=0.004) and low < saving < high
    change, below, above = found.goodput_change
    assert change == pytest.approx(0.011, abs=0.01) and below < change < above
    assert (found.trace_class, found.mode, found.step_source) == ("long", "exec", "mean of 2 cells")
    assert found.sentence.startswith("long: a step saving of 3.") and "goodput" in found.sentence


def test_recorded_shapes_weigh_the_step_saving() -> None:
    made = timed().workload("long", "goodput", 0.8, 0.011, facts={"shapes": SHAPES})
    [found] = of(made)
    assert "weighted by recorded shapes" in found.step_source
    assert found.step_saving[0] == pytest.approx(0.035, abs=0.004)


def test_a_modelled_change_is_widened_by_the_model_s_error_and_unknown_without_one() -> None:
    base = timed().workload("long", "goodput", 0.8, 0.011, mode="virtual")
    [unknown] = of(base)
    assert unknown.mode == "virtual" and math.isnan(unknown.goodput_change[1]) and "no interval" in unknown.sentence
    [known] = of(base.calibration("long", bias=0.05))
    assert known.goodput_change[2] - known.goodput_change[1] > 2 * 0.05 / 0.8
    assert "modelled" in known.sentence


def test_nothing_is_said_without_both_numbers() -> None:
    assert of(timed()) == ()
    assert of(Lab().workload("long", "goodput", 0.8, 0.01)) == ()


def test_it_gates_nothing_and_stands_in_the_document() -> None:
    suite = make_suite({"long": [STEP]}, points={"long": [LONG]}, looks=[6])
    evidence = Evidence.of([Lab().timing("step", LONG, 0.08).workload("long", "goodput", 0.8, -0.5).run()])
    decision = explain(decide(suite, evidence), suite, evidence)
    assert decision.verdict("long") is Verdict.ENABLE
    [found] = decision.to_json()["regimes"][0]["amplification"]
    assert found["goodput_change"]["point"] < -0.4 and found["step_saving"]["point"] > 0.07
