"""Replay in real time: real tokens, everything accounted for, children after their parents' actual end."""

from __future__ import annotations

import pytest
import torch

from kbench.engine.runner import Engine
from kbench.errors import UsageError
from kbench.suite.schema import Arm, EngineSettings, ModelSettings
from kbench.targets.base import STEP_COLUMNS, ReplayResult
from kbench.targets.embedded import replay_exec
from kbench.traces.content import TokenSource
from kbench.traces.schema import RequestRow, Trace, TraceMeta, trace_from_rows

torch.set_num_threads(1)


def make_arm(**engine: object) -> Arm:
    settings: dict[str, object] = {"kv_tokens": 1_024, "max_batched_tokens": 128, "max_seqs": 8}
    return Arm(
        name="page16",
        model=ModelSettings(preset="tiny"),
        engine=EngineSettings.model_validate(settings | engine),
        prefill="sdpa",
        decode="sdpa-gather",
        page_size=16,
        layout="NHD",
        seed=1,
        root=".",
    )


def trace_of(*rows: RequestRow) -> Trace:
    return trace_from_rows(rows, TraceMeta(source="test", importer="test"))


def root(session: int, arrival_us: int, prompt: int, output: int) -> RequestRow:
    return RequestRow(session_id=session, input_tokens=prompt, output_tokens=output, arrival_us=arrival_us)


def alone(prompt: list[int], output: int) -> tuple[int, ...]:
    return Engine(make_arm(prefix_caching=False), "cpu").generate([prompt], output)[0]


def statuses(result: ReplayResult) -> list[str]:
    return [request.status for request in result.requests]


def test_every_request_gets_the_tokens_that_it_would_get_alone() -> None:
    trace = trace_of(root(0, 0, 35, 9), root(1, 0, 70, 4), root(2, 20_000, 150, 6), root(3, 60_000, 21, 1))
    result = replay_exec(trace, make_arm(), "cpu", seed=7)
    assert statuses(result) == ["finished"] * 4
    source = TokenSource(trace, 512, 7)
    for request in result.requests:
        prompt = source.prompt(request.request_id).tolist()
        assert request.output == alone(prompt, request.output_tokens)
        assert len(request.output) == request.output_tokens == trace.output_tokens[request.request_id]
        assert request.scheduled_us <= request.started_us < request.first_token_us <= request.finished_us
    assert [request.scheduled_us for request in result.requests] == [0, 0, 20_000, 60_000]
    assert result.requests[3].first_token_us == result.requests[3].finished_us


def test_steps_and_counters_add_up() -> None:
    trace = trace_of(root(0, 0, 35, 9), root(1, 0, 70, 4), root(2, 10_000, 150, 6))
    result = replay_exec(trace, make_arm(), "cpu")
    assert result.mode == "exec"
    assert tuple(result.steps) == STEP_COLUMNS
    steps = len(result.steps["start_us"])
    assert all(len(column) == steps for column in result.steps.values())
    computed = sum(result.steps["prefill_tokens"]) + sum(result.steps["decode_seqs"])
    assert computed == result.counters["computed_tokens"] == 35 + 70 + 150 + 8 + 3 + 5
    assert result.counters["steps"] == steps
    assert result.counters["steps.eager"] == result.counters["steps.eager: the arm wants eager launches"] == steps
    ends = [a + b for a, b in zip(result.steps["start_us"], result.steps["duration_us"], strict=True)]
    assert all(end <= begin for end, begin in zip(ends, result.steps["start_us"][1:], strict=False))
    assert sum(result.steps["duration_us"]) == pytest.approx(result.counters["busy_us"])
    assert len(result.dispatch_lag_us) == 3
    assert min(result.dispatch_lag_us) >= 0
    assert (result.page_size, result.pages) == (16, 64)


def conversation() -> Trace:
    first = root(0, 0, 40, 30)
    second = RequestRow(
        session_id=0,
        turn=1,
        parent_ids=(0,),
        think_us=15_000,
        input_tokens=85,
        output_tokens=5,
        prefix_tokens=70,
    )
    return trace_of(first, second)


def test_a_child_follows_its_parents_actual_end_and_carries_its_real_output() -> None:
    trace = conversation()
    result = replay_exec(trace, make_arm(), "cpu", seed=3)
    parent, child = result.requests
    assert child.scheduled_us == pytest.approx(parent.finished_us + 15_000, abs=1)
    prompt = TokenSource(trace, 512, 3).prompt(1, {0: parent.output}).tolist()
    assert tuple(prompt[40:70]) == parent.output
    assert child.output == alone(prompt, 5)
    assert child.hit_tokens == child.planned_hit_tokens == 64  # 69 tokens have KV: four full pages


def test_children_of_what_never_ended_are_not_sent() -> None:
    result = replay_exec(conversation(), make_arm(kv_tokens=48), "cpu")
    assert statuses(result) == ["rejected", "not_sent"]
    assert result.requests[1].scheduled_us == 0


def test_what_lies_beyond_the_time_or_the_first_rows_is_not_sent() -> None:
    trace = trace_of(root(0, 0, 20, 3), root(1, 1_000, 20, 3), root(2, 900_000, 20, 3), root(3, 900_001, 20, 3))
    result = replay_exec(trace, make_arm(), "cpu", max_seconds=0.2, max_requests=3)
    assert statuses(result) == ["finished", "finished", "not_sent"]
    faster = replay_exec(trace, make_arm(), "cpu", max_seconds=0.2, rate_scale=100.0)
    assert statuses(faster) == ["finished"] * 4
    assert faster.requests[2].scheduled_us == 9_000


def test_the_drain_has_a_deadline() -> None:
    trace = trace_of(root(0, 0, 20, 900))
    result = replay_exec(trace, make_arm(), "cpu", max_seconds=0.05, drain_seconds=0.0)
    (request,) = result.requests
    assert request.status == "unfinished"
    assert 0 < request.output_tokens == len(request.output) < 900
    assert request.finished_us == 0


def test_pressure_preempts_and_changes_no_token() -> None:
    rows = [root(session, 0, 90 + session, 40) for session in range(5)]
    trace = trace_of(*rows)
    roomy = replay_exec(trace, make_arm(), "cpu")
    tight = replay_exec(trace, make_arm(kv_tokens=320), "cpu")
    assert tight.counters["preemptions"] > 0 == roomy.counters["preemptions"]
    assert sum(request.preemptions for request in tight.requests) == tight.counters["preemptions"]
    assert [request.output for request in tight.requests] == [request.output for request in roomy.requests]


def test_a_given_engine_starts_from_nothing() -> None:
    engine = Engine(make_arm(), "cpu")
    trace = trace_of(root(0, 0, 64, 3))
    first = replay_exec(trace, make_arm(), "cpu", engine=engine)
    second = replay_exec(trace, make_arm(), "cpu", engine=engine, warmup=False)
    assert [request.hit_tokens for request in (*first.requests, *second.requests)] == [0, 0]
    assert first.requests[0].output == second.requests[0].output


def test_senseless_limits_are_usage_errors() -> None:
    trace = trace_of(root(0, 0, 20, 3))
    for limits in ({"max_seconds": 0.0}, {"max_requests": 0}, {"drain_seconds": -1.0}, {"rate_scale": 0.0}):
        with pytest.raises(UsageError):
            replay_exec(trace, make_arm(), "cpu", **limits)  # type: ignore[arg-type]
