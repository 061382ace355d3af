"""Replay in virtual time: worked by hand on an invented machine, then invariants, then a public trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.catalog import parse_point
from kbench.engine.core import EngineConfig
from kbench.engine.costs import AXES, CostTable, StepShape, default_grid
from kbench.errors import UsageError
from kbench.suite.schema import EngineSettings
from kbench.targets.base import STEP_COLUMNS, Arrivals, ReplayResult, planned_hits
from kbench.targets.virtual import replay_virtual
from kbench.traces.content import PageKeys
from kbench.traces.importers import ImportOptions, import_trace
from kbench.traces.schema import RequestRow, Trace
from kbench.traces.synth import PRESETS, synthesise

from .invented import engine, invented_costs, invented_rows, root, trace, turn

COSTS = invented_costs()
MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation_trace.jsonl"


def times(result: ReplayResult, request: int) -> tuple[float, float, float, float]:
    found = result.requests[request]
    return found.scheduled_us, found.started_us, found.first_token_us, found.finished_us


def near(*values: float) -> object:
    return pytest.approx(values, abs=0.01)


def test_one_request_by_hand() -> None:
    result = replay_virtual(trace(root(0, 500, 100, 3)), engine(), COSTS)
    # 64 + 36 prompt tokens, then two decodes: 1 ms a step and 10 µs a token.
    assert times(result, 0) == near(500, 500, 500 + 1_640 + 1_360, 500 + 3_000 + 2 * 1_010)
    assert list(result.steps["prefill_tokens"]) == [64, 36, 0, 0]
    assert list(result.steps["decode_context_tokens"]) == [0, 0, 101, 102]
    assert list(result.steps["in_use_pages"]) == [16, 25, 26, 26]
    assert list(result.steps["used_tokens"]) == [64, 100, 101, 102]
    assert tuple(result.steps) == STEP_COLUMNS
    assert (result.mode, result.extrapolated_fraction) == ("virtual", 0.0)


def test_decodes_of_an_engine_with_graphs_cost_what_the_captured_size_does() -> None:
    rows = [root(0, 0, 10, 4) for _ in range(3)]
    plain = replay_virtual(trace(*rows), engine(), COSTS)
    padded = replay_virtual(trace(*rows), replace(engine(), captured=(1, 4)), COSTS)
    assert padded == replay_virtual(trace(*rows), engine(), COSTS, captured=(1, 4))
    assert padded.requests[2].first_token_us == plain.requests[2].first_token_us  # prompts are not padded
    assert padded.requests[2].finished_us > plain.requests[2].finished_us
    arm = SimpleNamespace(name="arm", page_size=16, engine=EngineSettings(max_seqs=35, graph="graph"))
    assert EngineConfig.from_arm(arm).captured == (1, 2, 4, 8, 16, 24, 32, 35)  # type: ignore[arg-type]
    arm.engine = EngineSettings(max_seqs=35)
    assert EngineConfig.from_arm(arm).captured == ()  # type: ignore[arg-type]


def test_a_request_that_arrives_during_a_step_waits_for_the_next() -> None:
    result = replay_virtual(trace(root(0, 0, 50, 2), root(1, 100, 10, 1)), engine(), COSTS)
    assert times(result, 1) == near(100, 1_500, 1_500 + 1_110, 1_500 + 1_110)
    assert result.requests[0].finished_us == pytest.approx(2_610, abs=0.01)


def test_children_start_after_their_last_parent_and_their_think_time() -> None:
    rows = (root(0, 0, 10, 1), root(0, 0, 40, 5), turn(0, 1, (0, 1), 7_000, 60, 1))
    once = replay_virtual(trace(*rows), engine(), COSTS)
    last = once.requests[1].finished_us
    assert once.requests[2].scheduled_us == pytest.approx(last + 7_000, abs=0.01)
    fast = replay_virtual(trace(*rows), engine(), COSTS, rate_scale=1_000.0)
    assert fast.requests[2].scheduled_us == pytest.approx(last + 7_000, abs=0.01)  # think time is not scaled


def test_a_child_does_not_precede_its_recorded_arrival() -> None:
    child = RequestRow(
        session_id=0, turn=1, parent_ids=(0,), think_us=0, arrival_us=90_000, input_tokens=20, output_tokens=1
    )
    parent = root(0, 0, 10, 1)
    assert replay_virtual(trace(parent, child), engine(), COSTS).requests[1].scheduled_us == 90_000
    scaled = replay_virtual(trace(parent, child), engine(), COSTS, rate_scale=3.0)
    assert scaled.requests[1].scheduled_us == 30_000


def test_the_rate_scale_moves_arrivals() -> None:
    rows = [root(number, number * 90_000, 10, 1) for number in range(3)]
    assert [each.scheduled_us for each in replay_virtual(trace(*rows), engine(), COSTS, rate_scale=0.5).requests] == [
        0.0,
        180_000.0,
        360_000.0,
    ]
    backlog = replay_virtual(trace(*rows), engine(), COSTS, all_at_once=True)
    assert {each.scheduled_us for each in backlog.requests} == {0.0}
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="rate scale"):
            replay_virtual(trace(*rows), engine(), COSTS, rate_scale=wrong)


def test_descendants_of_a_rejected_request_are_not_sent() -> None:
    rows = (root(0, 0, 1_000, 1), turn(0, 1, (0,), 0, 10, 1), turn(0, 2, (1,), 0, 20, 1), root(1, 0, 10, 1))
    result = replay_virtual(trace(*rows), engine(), COSTS)
    assert [each.status for each in result.requests] == ["rejected", "not_sent", "not_sent", "finished"]


def test_time_up_leaves_requests_unfinished_and_not_sent() -> None:
    rows = (root(0, 0, 10, 50), root(1, 0, 10, 2), root(2, 60_000, 10, 2))
    result = replay_virtual(trace(*rows), engine(), COSTS, until_us=10_000)
    assert [each.status for each in result.requests] == ["unfinished", "finished", "not_sent"]
    assert 0 < result.requests[0].output_tokens < 50


def test_the_next_turn_hits_what_the_last_one_said() -> None:
    rows = (root(0, 0, 20, 9), turn(0, 1, (0,), 0, 40, 1, prefix_tokens=29))
    hits = {}
    for page_size in (1, 4, 16, 32):
        result = replay_virtual(trace(*rows), engine(page_size, 512 // page_size), COSTS)
        hits[page_size] = result.requests[1].hit_tokens
        assert result.requests[1].planned_hit_tokens == hits[page_size]
    # 28 of the first turn's 29 tokens were computed: the last one that it said was not.
    assert hits == {1: 28, 4: 28, 16: 16, 32: 0}


def test_twice_is_the_same_to_the_last_bit() -> None:
    chat = synthesise("chat", 60, 3, scale=0.05, max_context=200)
    assert replay_virtual(chat, engine(), COSTS) == replay_virtual(chat, engine(), COSTS)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    preset=st.sampled_from(sorted(PRESETS)),
    page_size=st.sampled_from([1, 2, 5, 16, 64]),
    tokens=st.integers(64, 600),
    budget=st.sampled_from([3, 16, 64]),
    seqs=st.sampled_from([1, 4, 8]),
    rate=st.sampled_from([1.0, 100.0, 1_000.0]),
    caching=st.booleans(),
)
def test_runs_of_decodes_taken_at_once_are_the_same_as_stepping(
    seed: int, preset: str, page_size: int, tokens: int, budget: int, seqs: int, rate: float, caching: bool
) -> None:
    """The whole result, to the last bit: every time, page count, eviction and hit."""
    made = synthesise(preset, 25, seed, scale=0.05, max_context=300)
    config = engine(page_size, max(1, tokens // page_size), budget, seqs, prefix_caching=caching)
    fast = replay_virtual(made, config, COSTS, rate_scale=rate)
    assert fast == replay_virtual(made, config, COSTS, rate_scale=rate, stepping=True)
    until = fast.requests[len(made) // 2].finished_us
    cut = replay_virtual(made, config, COSTS, rate_scale=rate, until_us=until)
    assert cut == replay_virtual(made, config, COSTS, rate_scale=rate, until_us=until, stepping=True)


def test_steps_outside_the_grid_are_counted_by_their_time() -> None:
    small = CostTable.fit(invented_rows("invented", default_grid(16, 8, 512)))
    result = replay_virtual(trace(root(0, 0, 60, 2)), engine(), small)
    assert result.extrapolated_fraction == pytest.approx(1_600 / (1_600 + 1_010), rel=0.01)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    preset=st.sampled_from(sorted(PRESETS)),
    page_size=st.sampled_from([1, 8, 32]),
    tokens=st.integers(64, 1_024),
    rate=st.sampled_from([0.1, 5.0, 1_000.0]),
)
def test_invariants_of_a_replay(seed: int, preset: str, page_size: int, tokens: int, rate: float) -> None:
    made = synthesise(preset, 25, seed, scale=0.02, max_context=160)
    result = replay_virtual(made, engine(page_size, max(1, tokens // page_size)), COSTS, rate_scale=rate)
    assert [each.request_id for each in result.requests] == list(range(len(made)))
    starts, durations = result.steps["start_us"], result.steps["duration_us"]
    assert all(
        later >= start + duration - 0.001 for start, duration, later in zip(starts, durations, starts[1:], strict=False)
    )
    for each in result.requests:
        assert each.status in ("finished", "rejected", "not_sent")
        if each.status == "finished":
            assert each.scheduled_us <= each.started_us < each.first_token_us <= each.finished_us
            assert each.output_tokens == int(made.output_tokens[each.request_id])
            assert each.hit_tokens < each.input_tokens
    total = result.pages
    columns = zip(*(result.steps[name] for name in ("in_use_pages", "evictable_pages", "blank_pages")), strict=True)
    assert all(sum(states) == total for states in columns)
    held = zip(result.steps["used_tokens"], result.steps["in_use_pages"], strict=True)
    assert all(used <= pages * page_size for used, pages in held)
    work = sum(map(sum, zip(result.steps["prefill_tokens"], result.steps["decode_seqs"], strict=True)))
    assert work == result.counters["computed_tokens"]


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_planned_hits_are_those_of_a_cache_without_limit(preset: str, page_size: int) -> None:
    made = synthesise(preset, 80, 5, scale=0.2)
    assert planned_hits(made, page_size) == by_keys(made, page_size)


def by_keys(made: Trace, page_size: int) -> list[int]:
    """The same from page keys alone: a set of all keys that earlier requests brought in."""
    keys_of, known, found = PageKeys(made, page_size), set[int](), []
    for request in range(len(made)):
        keys = keys_of(request)
        limit = (int(made.input_tokens[request]) - 1) // page_size
        hits = next((index for index, key in enumerate(keys[:limit]) if key not in known), min(limit, len(keys)))
        found.append(hits * page_size)
        computed = int(made.input_tokens[request]) + int(made.output_tokens[request]) - 1
        known.update(keys[: computed // page_size])
    return found


def test_each_request_is_due_once_and_in_order() -> None:
    arrivals = Arrivals(trace(root(0, 5, 1, 1), root(1, 9, 1, 1), turn(1, 1, (1,), 2, 1, 1)))
    assert arrivals.next_ns == 5_000
    assert arrivals.due(20_000) == [(5_000, 0), (9_000, 1)]
    assert arrivals.due(20_000) == []
    assert arrivals.next_ns is None
    arrivals.finished(1, 30_000)
    assert arrivals.due(32_000) == [(32_000, 2)]


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake trace is not here")
def test_mooncake_loses_its_hits_to_a_larger_page() -> None:
    """Every request begins with one shared block of 512 tokens; a page of 1,024 cannot hold it alone."""
    full = import_trace("mooncake", MOONCAKE, ImportOptions())
    assert sum(planned_hits(full, 512)) / full.input_tokens.sum() == pytest.approx(0.373, abs=0.001)
    assert sum(planned_hits(full, 1_024)) / full.input_tokens.sum() == pytest.approx(0.340, abs=0.001)
    costs = CostTable.fit(
        {"variant": "invented", "point": point, "wall_ns": 4e6 + 18e3 * batch.query_tokens + 3.5 * batch.kv_tokens}
        for point in default_grid(8_192, 256, 131_072)
        for batch in (parse_point(point),)
    )
    hits = {}
    for page_size in (512, 1_024):
        result = replay_virtual(full, EngineConfig(page_size, 600_000 // page_size, 8_192, 256), costs, until_us=200e6)
        sent = [each for each in result.requests if each.output_tokens]
        assert len(sent) > 400
        hits[page_size] = sum(each.hit_tokens for each in sent) / sum(each.input_tokens for each in sent)
    assert hits[512] > 3 * hits[1_024]


def test_the_shape_of_a_step_is_that_of_its_plan() -> None:
    """The replay sums shapes in its own loop; the recorded steps must cost what `StepShape` says."""
    result = replay_virtual(synthesise("chat", 30, 2, scale=0.05, max_context=200), engine(), COSTS)
    for step, duration in enumerate(result.steps["duration_us"]):
        shape = StepShape(*(int(result.steps[name][step]) for name in AXES))
        assert COSTS.step_ns(shape) == round(duration * 1_000)
