"""What users got: classes, percentiles, segments, and the metrics that the rule uses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.errors import MeasurementError, UsageError
from kbench.measure.service import (
    CLASSES,
    UNITS,
    Limits,
    Segments,
    classify,
    evaluate,
    metrics_of,
    not_due,
    percentile,
    segments_of,
    tpot_us,
    ttft_us,
    without,
)
from kbench.targets.base import STEP_COLUMNS, ReplayResult, RequestResult
from kbench.traces.schema import RequestRow, Trace, TraceMeta, trace_from_rows

DONE = RequestResult(
    request_id=0,
    session_id=0,
    turn=0,
    status="finished",
    scheduled_us=1_000.0,
    started_us=1_500.0,
    first_token_us=3_000.0,
    finished_us=7_000.0,
    input_tokens=100,
    output_tokens=5,
    hit_tokens=40,
    planned_hit_tokens=60,
    recomputed_tokens=7,
    preemptions=1,
)
NEVER = replace(DONE, status="rejected", started_us=0.0, first_token_us=0.0, output_tokens=0, hit_tokens=0)
LIMITS = Limits(2_000.0, 1_000.0)


def replay(requests: Sequence[RequestResult], **more: Any) -> ReplayResult:
    steps: dict[str, list[float]] = {name: [0.0, 0.0] for name in STEP_COLUMNS}
    steps |= {"start_us": [0.0, 5_000.0], "duration_us": [1_000.0, 3_000.0]}
    steps |= {"in_use_pages": [2, 6], "evictable_pages": [4, 2], "blank_pages": [4, 2], "used_tokens": [20, 72]}
    numbered = tuple(replace(request, request_id=number) for number, request in enumerate(requests))
    return ReplayResult("virtual", numbered, steps, page_size=16, pages=10, **more)


def sessions(sizes: Sequence[int], gaps_us: int = 1_000) -> Trace:
    rows, number = [], 0
    for session, size in enumerate(sizes):
        for turn in range(size):
            parents = (number - 1,) if turn else ()
            arrival = None if turn else session * gaps_us
            think = 5 if turn else None
            rows.append(RequestRow(session, 4, 2, turn=turn, parent_ids=parents, arrival_us=arrival, think_us=think))
            number += 1
    return trace_from_rows(rows, TraceMeta(source="test", importer="test"))


def test_latency_counts_from_the_scheduled_arrival() -> None:
    assert ttft_us(DONE) == 2_000.0
    assert tpot_us(DONE) == 1_000.0


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), "good"),
        (LIMITS, "good"),
        (Limits(1_999.0, 1_000.0), "late"),
        (Limits(2_000.0, 999.0), "late"),
        (Limits(tpot_us=999.0), "late"),
    ],
)
def test_every_named_limit_must_hold(limits: Limits, expected: str) -> None:
    assert classify(DONE, limits) == expected


def test_an_output_of_one_token_meets_any_pace() -> None:
    one = replace(DONE, output_tokens=1, finished_us=3_000.0)
    assert math.isnan(tpot_us(one))
    assert classify(one, Limits(2_000.0, 0.001)) == "good"


@pytest.mark.parametrize("status", ["rejected", "unfinished", "failed", "cancelled", "not_sent"])
def test_what_did_not_finish_is_never_good(status: Any) -> None:
    assert classify(replace(DONE, status=status), Limits()) == status
    assert tpot_us(replace(DONE, status=status)) == math.inf


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentiles_are_those_of_numpy(values: list[float], share: float) -> None:
    assert percentile(values, share) == np.percentile(values, share * 100, method="inverted_cdf")


def test_too_few_values_give_the_maximum_and_none_give_nothing() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert math.isnan(percentile([], 0.5))


def test_failing_does_not_improve_a_tail() -> None:
    good = [DONE] * 60
    assert metrics_of(good, LIMITS)["ttft_p99"] == 2_000.0
    failing = metrics_of([*good, *[NEVER] * 2], LIMITS)
    assert failing["ttft_p99"] == failing["tpot_p99"] == math.inf
    assert failing["ttft_p50"] == 2_000.0
    assert failing["goodput"] == 60 / 62


def test_metrics_by_hand() -> None:
    late = replace(DONE, first_token_us=9_000.0, finished_us=10_000.0, preemptions=2, recomputed_tokens=3, hit_tokens=0)
    found = metrics_of([DONE, late, NEVER, replace(NEVER, status="not_sent", preemptions=0)], LIMITS)
    assert set(found) == set(UNITS)
    assert found["goodput"] == 0.25
    assert found["preemptions_per_1k"] == 1_000 * (1 + 2 + 1) / 4
    assert found["recomputed_tokens"] == 7 + 3 + 7 + 7
    assert found["hit_ratio"] == 40 / 200  # of requests that ran
    assert (found["ttft_p50"], found["tpot_p50"]) == (8_000.0, 1_000.0)


def test_what_nothing_defines_is_left_out() -> None:
    assert "tpot_p50" not in metrics_of([replace(DONE, output_tokens=1)], LIMITS)
    assert "hit_ratio" not in metrics_of([NEVER], LIMITS)


# ------------------------------------------------------------------------------------------- segments


def test_segments_are_slices_by_session_arrival_after_the_warm_up() -> None:
    cut = segments_of(sessions([1] * 20), 3, 0.1)
    assert cut.warmup == (0, 1)
    assert cut.members == (tuple(range(2, 8)), tuple(range(8, 14)), tuple(range(14, 20)))
    assert cut.measured == tuple(range(2, 20))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=30, max_size=60), st.integers(1, 8), st.sampled_from([0.0, 0.1, 0.3]))
def test_segments_keep_sessions_whole_and_are_nearly_equal(sizes: list[int], count: int, warmup: float) -> None:
    made = sessions(sizes)
    cut = segments_of(made, count, warmup)
    assert sorted([*cut.warmup, *cut.measured]) == list(range(len(made)))
    assert len(cut.warmup) <= warmup * len(made)
    session_of = made.session_id.tolist()
    parts = [{session_of[request] for request in part} for part in (cut.warmup, *cut.members)]
    assert sum(len(part) for part in parts) == len(set(session_of))
    ideal = len(cut.measured) / count
    assert len(cut.members) == count
    assert all(members for members in cut.members)
    assert all(abs(len(members) - ideal) <= max(sizes) + 1 for members in cut.members)


def test_too_few_sessions_for_the_segments() -> None:
    with pytest.raises(UsageError, match="20 segments of 9 sessions"):
        segments_of(sessions([2] * 10), 20, 0.1)
    assert len(segments_of(sessions([2] * 10), 20, 0.1, at_most=True).members) == 9


def test_what_time_did_not_reach_is_not_scheduled_but_what_a_failure_cut_off_is() -> None:
    never = replace(NEVER, status="not_sent")
    requests = [
        replace(each, request_id=number, session_id=session)
        for number, (session, each) in enumerate([(0, DONE), (0, never), (1, NEVER), (1, never), (2, never)])
    ]
    assert not_due(requests) == {1, 4}
    cut = without(Segments(((0, 1), (2, 3), (4,))), not_due(requests))
    assert cut.members == ((0,), (2, 3), ())
    service = evaluate(replay(requests), LIMITS, cut)
    assert {each.segment: each.value for each in service.measurements if each.metric == "goodput"} == {
        0: 1.0,
        1: 0.0,
        -1: 1 / 3,
    }
    assert service.facts["scheduled"] == 3


# --------------------------------------------------------------------------------------------- whole


def test_measurements_of_segments_and_of_the_whole() -> None:
    result = replay([DONE, NEVER, DONE, DONE, DONE], counters={"recomputed_tokens": 5.0, "computed_tokens": 50.0})
    service = evaluate(result, LIMITS, Segments(((1, 2), (3, 4)), warmup=(0,)))
    goodput = {each.segment: each.value for each in service.measurements if each.metric == "goodput"}
    assert goodput == {0: 0.5, 1: 1.0, -1: 0.75}
    assert {each.clock for each in service.measurements} == {"virtual"}
    tails = {each.segment: each for each in service.measurements if each.metric == "ttft_p99"}
    assert (tails[0].value, tails[0].flags) == (math.inf, ("censored",))
    assert (tails[1].value, tails[1].flags) == (2_000.0, ())
    assert all(each.unit == UNITS[each.metric] for each in service.measurements)


def test_facts_can_be_written_as_strict_json_and_classes_add_up() -> None:
    requests = [DONE, NEVER, DONE, replace(DONE, status="unfinished"), replace(NEVER, status="not_sent")]
    facts = evaluate(replay(requests), LIMITS, Segments(((0, 1, 2), (3, 4)))).facts
    json.dumps(facts, allow_nan=False)
    assert set(facts["classes"]) == set(CLASSES)
    assert sum(facts["classes"].values()) == facts["scheduled"] == 5
    assert facts["classes"]["good"] == 2
    assert facts["summary"]["ttft_p99"] is None
    assert facts["summary"]["recompute_tax"] is None  # not known, so not zero
    assert (facts["mode"], facts["timing"]) == ("virtual", "modeled")


def test_occupancy_is_weighted_by_time_and_starts_with_the_first_measured_arrival() -> None:
    early = replace(DONE, scheduled_us=0.0)
    summary = evaluate(replay([early]), LIMITS, Segments(((0,),))).facts["summary"]
    assert summary["in_use"] == pytest.approx((2 * 1 + 6 * 3) / 4 / 10)
    assert summary["in_use"] + summary["evictable"] + summary["blank"] == pytest.approx(1.0)
    assert summary["in_use_max"] == 0.6
    assert summary["tail_waste"] == pytest.approx(1 - (20 * 1 + 72 * 3) / ((2 * 1 + 6 * 3) * 16))
    late = evaluate(replay([DONE]), LIMITS, Segments(((0,),))).facts["summary"]
    assert late["in_use"] == 0.6
    assert late["queue_p50_us"] == 500.0
    assert late["e2e_p50_us"] == 6_000.0
    assert late["planned_hit_ratio"] == 0.6
    assert late["goodput_per_s"] == pytest.approx(1 / 6_000e-6)


def test_the_autocorrelation_of_the_series_is_a_fact() -> None:
    pattern = [DONE, NEVER] * 6
    cut = Segments(tuple((number,) for number in range(12)))
    assert evaluate(replay(pattern), LIMITS, cut).facts["summary"]["autocorrelation"] < -0.8
    assert evaluate(replay([DONE] * 12), LIMITS, cut).facts["summary"]["autocorrelation"] is None


def test_a_request_that_the_replay_lost_is_an_error() -> None:
    with pytest.raises(MeasurementError, match="nothing of 1 requests"):
        evaluate(replay([DONE]), LIMITS, Segments(((0, 1),)))
