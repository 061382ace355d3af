"""Where a step's saving went, beside Amdahl's bound, in both readings of "22 % faster"."""

from __future__ import annotations

import json

import pytest
from decide_lab import LONG, Lab, make_suite

from kbench.decide import Evidence, Waterfall, predict, waterfalls
from kbench.stats import faster_readings

READINGS = faster_readings(0.22)


@pytest.mark.parametrize(
    ("saving", "bound_ms", "saved_ms", "share"),
    [(READINGS.as_time, 0.44, 0.14, 0.028), (READINGS.as_rate, 0.36, 0.06, 0.012)],
    ids=["22 % less time", "22 % more rate"],
)
def test_the_chapters_arithmetic(saving: float, bound_ms: float, saved_ms: float, share: float) -> None:
    """2.0 ms of a 5.0 ms step; the conversion takes 0.30 ms."""
    found = predict(5_000.0, 2_000.0, saving, conversion_us=300.0)
    assert found.bound_us / 1e3 == pytest.approx(bound_ms, abs=0.005)
    assert found.saved_us / 1e3 == pytest.approx(saved_ms, abs=0.005)
    assert found.saved_us / found.baseline_us == pytest.approx(share, abs=0.0005)
    assert found.residual_us == pytest.approx(0.0, abs=1e-9)


def measured_lab() -> Lab:
    quiet = {"session_sd": 0.0, "window_sd": 0.0}
    lab = Lab().timing("step", LONG, 0.028, base_us=5_000.0, **quiet).timing("kernel", LONG, 0.22, **quiet)
    lab.once(LONG, "phase.attention", 2_000.0, 1_560.0).once(LONG, "phase.metadata", 100.0, 110.0)
    return lab.once(LONG, "phase.convert", 0.0, 300.0).once(LONG, "phased_wall", 5_000.0, 4_870.0)


def test_the_terms_and_the_residual_add_up_to_the_candidate() -> None:
    [found] = waterfalls(make_suite(), Evidence.of([measured_lab().run()]))
    assert (found["case"], found["point"]) == (f"step/step/tiny/{LONG}", LONG)
    terms = {term["name"]: term["delta_us"] for term in found["terms"]}
    assert terms == {"attention": -440.0, "conversion": 300.0, "metadata": 10.0, "launches": None, "padding": 0.0}
    known = sum(value for value in terms.values() if value is not None)
    assert found["baseline_us"] + known + found["residual_us"] == pytest.approx(found["candidate_us"])
    assert found["attention_share"] == pytest.approx(0.4)
    assert found["attention_saving"] == pytest.approx(0.22)
    assert found["bound_saving"] == pytest.approx(0.088)
    json.dumps(found, allow_nan=False)


def test_the_share_is_level_zeros_where_there_is_one() -> None:
    lab = measured_lab()
    lab.trial(f"timeline/step/tiny/{LONG}", "old", facts={"classes": {"attention": {"us": 1.0, "share": 0.5}}})
    [found] = waterfalls(make_suite(), Evidence.of([lab.run()]))
    assert found["attention_share"] == 0.5


def test_a_timeline_of_all_points_gives_each_its_own_share() -> None:
    classes = {"attention": {"us": 1.0, "share": 0.3}}
    analysis = {"classes": {"attention": {"share": 0.9}}, "points": [{"point": LONG, "classes": classes}]}
    lab = measured_lab().trial("timeline/step/tiny/all", "old", facts={"analysis": analysis})
    [found] = waterfalls(make_suite(), Evidence.of([lab.run()]))
    assert found["attention_share"] == 0.3


def test_without_phases_the_attention_is_level_zero_times_level_one() -> None:
    lab = Lab().timing("step", LONG, 0.05).timing("kernel", LONG, 0.22, session_sd=0.0, window_sd=0.0)
    lab.trial(f"timeline/step/tiny/{LONG}", "old", facts={"classes": {"attention": {"us": 1.0, "share": 0.5}}})
    [found] = waterfalls(make_suite(graph="graph"), Evidence.of([lab.run()]))
    terms = {term["name"]: term for term in found["terms"]}
    assert terms["attention"]["source"] == "f × s"
    assert terms["attention"]["delta_us"] == pytest.approx(-0.11 * found["baseline_us"])
    assert terms["padding"]["delta_us"] is None


def test_a_step_that_is_wrong_or_unmeasured_has_no_waterfall() -> None:
    lab = measured_lab().trial(f"step/step/tiny/{LONG}", "new", status="incorrect")
    assert waterfalls(make_suite(), Evidence.of([lab.run()])) == []
    assert waterfalls(make_suite(), Evidence.of([])) == []


def test_what_is_unknown_is_in_the_residual() -> None:
    found = Waterfall.of(100.0, 90.0, ())
    assert found.residual_us == -10.0
    assert found.to_json()["bound_us"] is None
