"""What a plan can see: simulated gates pass as often as it says, and the words fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from decide_lab import GOODPUT, LONG, OUTPUT, SHORT, STEP, Lab, make_suite

from kbench.decide import Evidence, Verdict, decide
from kbench.decide.power import Sight, sights
from kbench.suite.rule_schema import Power
from kbench.suite.schema import Suite


def suite_of(at_saving: float | None = None, target: float = 0.9, **how: Any) -> Suite:
    suite = make_suite({"long": [STEP]}, points={"long": [LONG]}, looks=[6], **how)
    if at_saving is None:
        return suite
    rule = suite.rule.model_copy(update={"power": Power(target=target, at_saving=at_saving)})
    return suite.model_copy(update={"rule": rule})


def one(suite: Suite, *labs: Lab) -> Sight:
    [found] = sights(suite, [Evidence.of([made.run()]) for made in labs])
    return found


def pilot(sd: float = 0.01, sessions: int = 12, seed: int = 1) -> Lab:
    return Lab(sessions=sessions, seed=seed).timing("step", LONG, 0.0, session_sd=sd)


def test_without_earlier_sessions_it_is_unknown() -> None:
    found = one(suite_of(0.05))
    assert math.isnan(found.sees) and found.reaches is None and "unknown" in found.sentence
    assert math.isnan(one(suite_of(), pilot(sessions=2)).sees)


def test_a_plan_that_cannot_see_says_what_it_sees() -> None:
    blind = one(suite_of(0.025), pilot(0.02))
    assert blind.reaches is False
    assert blind.sentence.endswith(f"this plan cannot see 2.50 %: it sees {100 * blind.sees:.2f} %")
    assert one(suite_of(0.2), pilot(0.02)).reaches is True
    assert one(suite_of(), pilot(0.02)).reaches is None


def test_it_sees_as_often_as_it_says() -> None:
    """Gates at the smallest visible saving, with the very scatter: 80 % of 200 pass, give or take 3 sd."""
    sd = 0.01
    suite = suite_of(0.05, target=0.8)
    sees = one(suite, pilot(sd, sessions=400)).sees
    assert 0.02 < sees < 0.06
    passed = 0
    for seed in range(200):
        gate = Lab(sessions=6, blocks=2, seed=seed).timing("step", LONG, sees, session_sd=sd)
        passed += decide(suite, Evidence.of([gate.run()])).verdict("long") is Verdict.ENABLE
    assert 143 <= passed <= 177


def test_more_scatter_and_a_smaller_alpha_see_less() -> None:
    assert one(suite_of(), pilot(0.02)).sees > one(suite_of(), pilot(0.01)).sees
    assert one(suite_of(alpha=0.005), pilot()).sees > one(suite_of(), pilot()).sees


def test_the_first_evidence_with_enough_sessions_is_used() -> None:
    quiet, loud = pilot(0.001), pilot(0.05)
    assert one(suite_of(), quiet, loud).sees < one(suite_of(), loud, quiet).sees
    assert one(suite_of(), pilot(0.05, sessions=2), quiet).sees == one(suite_of(), quiet).sees


@pytest.mark.parametrize(("margin", "reaches"), [(0.2, True), (0.001, False)])
def test_a_margin_must_be_wider_than_what_no_change_is_known_to(margin: float, reaches: bool) -> None:
    clause = {"level": "step", "metric": "step_time", "test": "noninferiority", "margin": margin}
    suite = make_suite({"long": [clause]}, points={"long": [LONG]}, looks=[6])
    assert one(suite, pilot()).reaches is reaches


def test_segments_of_earlier_replays_say_what_goodput_can_be_seen() -> None:
    clause = {**GOODPUT, "mode": "exec"}
    suite = make_suite({"long": [clause, OUTPUT]}, looks=[6])
    made = Lab().workload("long", "goodput", 0.8, 0.0, sd=0.05)
    found = one(suite, made)
    assert found.units == 20 and found.reaches is False and found.sees > 0.03
    modelled = make_suite({"long": [GOODPUT]}, looks=[6])
    uncalibrated = Lab().workload("long", "goodput", 0.8, 0.0, mode="virtual")
    assert math.isnan(one(modelled, uncalibrated).sees)
    known = Lab().workload("long", "goodput", 0.8, 0.0, sd=0.001, mode="virtual").calibration("long", bias=0.1)
    assert one(modelled, known).sees > 0.1 / 0.8


def test_it_is_json() -> None:
    found = one(suite_of(0.05)).to_json()
    assert found["sees"] is None and found["reaches"] is None and found["wanted"] == 0.05
    assert SHORT not in found["cell"]
