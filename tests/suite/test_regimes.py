"""Regimes that overlap, ranges with unmeasured edges, clauses without evidence."""

from __future__ import annotations

import pytest

from kbench.suite.regimes import regime_problems, regime_warnings
from kbench.suite.schema import Suite

STEP = {"level": "step", "metric": "step_time", "test": "superiority", "min_saving": 0.02}
KERNEL = {"level": "kernel", "metric": "latency", "test": "superiority", "min_saving": 0.02}
GOODPUT = {"level": "workload", "metric": "goodput", "test": "noninferiority", "margin": 0.03}


def suite(*regimes: dict[str, object], pages: tuple[int, int] = (16, 16), segments: int = 20) -> Suite:
    import json

    document = {
        "schema": "kbench.suite/1",
        "claim": {"name": "claim", "baseline": "old", "candidate": "new"},
        "model": {"preset": "tiny"},
        "variants": {"old": {"page_size": pages[0]}, "new": {"extends": "old", "page_size": pages[1]}},
        "kernel": {"points": ["1*1@64"]},
        "step": {"points": ["1*1@64", "1*1@128", "4*1@64", "4*1@128"]},
        "workload": {"traces": {"a": "a.parquet", "b": "b.parquet"}, "segments": segments},
        "regime": [{"id": f"r{n}", "require": [STEP], **regime} for n, regime in enumerate(regimes)],
    }
    return Suite.model_validate_json(json.dumps(document))


def warned(found: Suite) -> list[str]:
    return [f"{'.'.join(map(str, where))}: {what}" for where, what, _ in regime_warnings(found)]


def refused(found: Suite) -> list[str]:
    return [what for index, regime in enumerate(found.regime) for _, what, _ in regime_problems(found, regime, index)]


CORNERS = ["1*1@64", "1*1@128", "4*1@64", "4*1@128"]


def test_a_range_with_all_its_corners_is_fine() -> None:
    found = suite({"when": {"context": [64, 128], "batch": [1, 4]}, "points": CORNERS})
    assert (refused(found), warned(found)) == ([], [])


@pytest.mark.parametrize(
    ("when", "edge"),
    [({"context": [64, 256]}, "context 256"), ({"context": [32, 128]}, "context 32"), ({"batch": [1, 8]}, "batch 8")],
)
def test_an_edge_without_a_point_is_named(when: dict[str, object], edge: str) -> None:
    [warning] = warned(suite({"when": when, "points": CORNERS}))
    assert f"no point at {edge}" in warning


def test_a_point_outside_of_the_range_is_named() -> None:
    [warning] = warned(suite({"when": {"context": [64, 64]}, "points": ["1*1@64", "1*1@128"]}))
    assert "1*1@128 lies outside" in warning


def test_ranges_that_meet_are_named_and_those_that_do_not_are_not() -> None:
    low, high = {"context": [64, 64]}, {"context": [128, 128]}
    apart = [{"when": low, "points": ["1*1@64"]}, {"when": high, "points": ["1*1@128"]}]
    assert warned(suite(*apart)) == []
    both = [{"when": low, "points": ["1*1@64"]}, {"when": {"batch": [1, 1]}, "points": ["1*1@64"]}]
    assert warned(suite(*both)) == ["regime.1.when: it overlaps the range of 'r0'"]


def test_a_trace_class_of_two_regimes_is_named() -> None:
    found = suite({"trace_class": ["a"], "points": ["1*1@64"]}, {"trace_class": ["a", "b"], "points": ["1*1@64"]})
    assert warned(found) == ["regime.1.trace_class: a belongs to 'r0' too"]


def test_a_point_that_the_clauses_level_does_not_measure_is_named() -> None:
    found = suite({"trace_class": ["a"], "points": ["1*1@128"], "require": [STEP, KERNEL]})
    assert warned(found) == ["regime.0.points: 1*1@128 is not measured at level kernel"]


def test_a_kernel_clause_needs_an_operation_that_applies() -> None:
    found = suite({"trace_class": ["a"], "points": ["1*64@64"], "require": [KERNEL]})
    assert any("serves no point" in warning for warning in warned(found))


def test_segments_that_are_too_few_are_named_before_they_are_replayed() -> None:
    regime = {"trace_class": ["a"], "points": ["1*1@64"], "require": [GOODPUT]}
    assert warned(suite(regime)) == []
    assert "needs 20 segments, the suite has 12" in warned(suite(regime, segments=12))[0]


@pytest.mark.parametrize(
    ("regime", "pages", "why"),
    [
        ({"when": {"context": [64, 64]}, "trace_class": ["a"]}, (16, 16), "not both"),
        ({"when": {}}, (16, 16), "names no range"),
        ({"when": {"context": [64, 64]}}, (16, 64), "page_size, which cannot be switched per step"),
    ],
)
def test_what_no_engine_could_switch_is_refused(regime: dict[str, object], pages: tuple[int, int], why: str) -> None:
    [problem] = refused(suite({"points": ["1*1@64"], **regime}, pages=pages))
    assert why in problem
