"""Faster, slower, equivalent, inconclusive."""

from __future__ import annotations

import json
import math

import pytest
from decide_lab import LONG, Lab, make_suite

from kbench.decide import Cell, Evidence, comparisons


@pytest.mark.parametrize(
    ("saving", "session_sd", "verdict"),
    [(0.2, 0.003, "faster"), (-0.2, 0.003, "slower"), (0.0, 0.001, "equivalent"), (0.0, 0.05, "inconclusive")],
)
def test_the_word_follows_the_interval(saving: float, session_sd: float, verdict: str) -> None:
    lab = Lab().timing("kernel", LONG, saving, session_sd=session_sd)
    [found] = comparisons(make_suite(), Evidence.of([lab.run()]))
    assert found["case"] == f"kernel/attention.decode/tiny/{LONG}"
    assert found["verdict"] == verdict
    assert found["ratio"]["low"] < found["ratio"]["point"] < found["ratio"]["high"]


def test_a_difference_within_the_hosts_noise_is_equivalence() -> None:
    record = Lab().timing("kernel", LONG, 0.03, session_sd=0.002).run()
    [found] = comparisons(make_suite(), Evidence.of([record]))
    assert found["verdict"] == "faster"
    [found] = comparisons(
        make_suite(), Evidence.of([record], aa_floors={Cell("kernel", "attention.decode", LONG): 0.05})
    )
    assert found["verdict"] == "equivalent"


@pytest.mark.parametrize("sessions", [0, 1])
def test_too_little_to_compare_is_inconclusive_and_null(sessions: int) -> None:
    lab = Lab(sessions=sessions).timing("kernel", LONG, 0.5)
    lab.trial(f"kernel/attention.decode/tiny/{LONG}", "new").trial(f"kernel/attention.decode/tiny/{LONG}", "old")
    [found] = comparisons(make_suite(), Evidence.of([lab.run()]))
    assert found["verdict"] == "inconclusive"
    assert found["ratio"]["low"] is None
    json.dumps(found, allow_nan=False)


def test_a_wrong_candidate_and_a_value_that_is_no_time_are_not_compared() -> None:
    wrong = Lab().timing("kernel", LONG, 0.5).trial(f"kernel/attention.decode/tiny/{LONG}", "new", status="incorrect")
    spoiled = Lab().timing("kernel", LONG, 0.5)
    spoiled.add(f"kernel/attention.decode/tiny/{LONG}", "kernel", "new", "latency", math.nan)
    for lab in (wrong, spoiled):
        [found] = comparisons(make_suite(), Evidence.of([lab.run()]))
        assert (found["verdict"], found["ratio"]["point"]) == ("inconclusive", None)
        assert found["note"]
