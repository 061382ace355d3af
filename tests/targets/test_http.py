"""A replay over HTTP: what is counted, how each request ends, and what the server's metrics mean."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from kbench.engine.core import EngineConfig
from kbench.errors import MeasurementError, UsageError
from kbench.measure.service import CLASSES, Limits, classify
from kbench.targets.mock.app import serve
from kbench.targets.openai.exchange import Exchange
from kbench.targets.openai.load import LoadTruth
from kbench.targets.openai.metrics import COUNTERS, derived, grown, normalised
from kbench.targets.openai.replay import Driver
from kbench.traces.trace import RequestRow
from targets.serving import mock, replay, singles, trace_of


def statuses(found: Any) -> Counter[str]:
    return Counter(request.status for request in found.result.requests)


# ---------------------------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3])
@pytest.mark.parametrize(
    ("says", "counted_by"),
    [
        ({}, "usage"),
        ({"usage": False}, "token ids"),
        ({"usage": False, "token_ids": False}, "finish for length"),
    ],
)
def test_tokens_are_counted_however_many_a_chunk_carries(says: Any, counted_by: str, chunk_tokens: int) -> None:
    found = replay(mock(chunk_tokens=chunk_tokens, **says), singles(6, output=7))
    assert statuses(found) == {"finished": 6}
    assert [request.output_tokens for request in found.result.requests] == [7] * 6
    assert {own.counted_by for own in found.exchanges} == {counted_by}


def test_times_are_in_order_and_from_the_schedule() -> None:
    found = replay(mock(), singles(8, gap_us=2_000))
    for request, own in zip(found.result.requests, found.exchanges, strict=True):
        assert request.scheduled_us == 2_000.0 * request.request_id
        assert request.scheduled_us <= own.sent_ns / 1_000 <= request.first_token_us <= request.finished_us
    assert found.truth.sent == found.truth.offered == 8
    assert min(found.truth.lag_us) >= 0.0


def test_a_cached_prefix_is_seen_in_usage_and_in_the_servers_counters() -> None:
    rows = [RequestRow(s, 100, 2, arrival_us=s * 50_000, shared_id=0, shared_tokens=80) for s in range(3)]
    found = replay(mock(), trace_of(rows))
    assert [request.hit_tokens for request in found.result.requests] == [0, 80, 80]
    assert [request.planned_hit_tokens for request in found.result.requests] == [0, 80, 80]
    assert found.counters["hit_tokens"] == 160
    assert derived(found.counters)["hit_ratio"] == pytest.approx(160 / 300)


def test_preemption_on_the_server_is_counted() -> None:
    settings = mock(config=EngineConfig(16, 12, 512, 8), step_us=200.0)
    found = replay(settings, singles(8, prompt=30, output=40, gap_us=0))
    assert statuses(found) == {"finished": 8}
    assert found.counters["preemptions"] is not None and found.counters["preemptions"] > 0


def test_a_child_waits_for_its_parent_and_carries_what_it_said() -> None:
    rows = [
        RequestRow(0, 20, 6, arrival_us=0),
        RequestRow(0, 40, 3, turn=1, parent_ids=(0,), think_us=30_000, prefix_tokens=26),
    ]
    found = replay(mock(config=EngineConfig(4, 256, 512, 8)), trace_of(rows))
    parent, child = found.result.requests
    assert child.scheduled_us == pytest.approx(parent.finished_us + 30_000, abs=1.0)
    assert len(parent.output) == 6
    assert child.hit_tokens == 24  # all full pages that were computed, the last of them of what the parent said


def test_outputs_are_the_same_in_every_replay() -> None:
    first, second = (replay(mock(), singles(4)).result.requests for _ in range(2))
    assert [request.output for request in first] == [request.output for request in second]


def test_chat_is_a_fallback() -> None:
    found = replay(mock(), singles(3), endpoint={"api": "chat"})
    assert statuses(found) == {"finished": 3}


# ----------------------------------------------------------------------------------- how requests end


@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        ("429", "failed", "HTTP 429"),
        ("500", "failed", "HTTP 500"),
        ("503", "failed", "HTTP 503"),
        ("refuse", "failed", "closed before the first token"),
        ("cut", "failed", "closed in the middle of the stream"),
        ("garbage", "failed", "garbage in the stream"),
        ("stall", "failed", "no end within 0.3 s"),
        ("silent", "failed", "no end within 0.3 s"),
    ],
)
def test_every_fault_is_one_class_and_one_cause(fault: str, status: str, cause: str) -> None:
    found = replay(mock(faults={fault: 1.0}), singles(3), endpoint={"timeout_s": 0.3})
    assert statuses(found) == {status: 3}
    assert found.causes == {cause: 3}


def test_with_faults_nothing_is_lost_and_the_rest_is_served() -> None:
    faults = dict.fromkeys(("429", "503", "refuse", "cut", "garbage", "stall", "silent"), 0.08)
    found = replay(mock(faults=faults), singles(120), endpoint={"timeout_s": 0.5})
    classes = Counter(classify(request, Limits()) for request in found.result.requests)
    assert sum(classes[name] for name in CLASSES) == 120
    assert classes["failed"] == sum(found.causes.values())
    assert 30 < classes["good"] < 90


def test_what_can_never_be_served_is_rejected() -> None:
    settings = mock(max_context=64)
    rows = [RequestRow(0, 40, 5, arrival_us=0), RequestRow(1, 70, 5, arrival_us=1_000)]
    found = replay(settings, trace_of(rows))
    assert [request.status for request in found.result.requests] == ["finished", "rejected"]
    assert found.causes == {"HTTP 400": 1}


def test_children_of_a_failed_turn_are_not_sent() -> None:
    rows = [
        RequestRow(0, 20, 4, arrival_us=0),
        RequestRow(0, 40, 4, turn=1, parent_ids=(0,), think_us=0, prefix_tokens=24),
    ]
    found = replay(mock(faults={"500": 1.0}), trace_of(rows))
    assert [request.status for request in found.result.requests] == ["failed", "not_sent"]


def test_nobody_listens() -> None:
    async def main() -> Any:
        from kbench.targets.openai.exchange import Endpoint
        from kbench.targets.openai.replay import ReplayPlan

        return await Driver(singles(3), Endpoint("http://127.0.0.1:9", "mock"), ReplayPlan(vocab=100)).run()

    found = asyncio.run(main())
    assert statuses(found) == {"failed": 3}
    assert found.causes == {"cannot connect": 3}
    assert found.before is None and set(found.counters.values()) == {None}


def test_a_server_that_restarts_fails_what_was_open_and_serves_the_rest() -> None:
    settings = mock(restart_after=5, restart_s=0.1, step_us=3_000.0)
    found = replay(settings, singles(40, output=8, gap_us=10_000))
    counts = statuses(found)
    assert counts["failed"] >= 5 and counts["finished"] >= 10
    assert counts["failed"] + counts["finished"] == 40
    assert found.result.requests[-1].status == "finished"


def test_what_is_open_at_the_deadline_is_unfinished() -> None:
    found = replay(mock(faults={"silent": 1.0}), singles(3), max_seconds=0.1, drain_seconds=0.1)
    assert statuses(found) == {"unfinished": 3}


def test_what_is_due_after_the_end_is_not_sent() -> None:
    found = replay(mock(), singles(4, gap_us=100_000), max_seconds=0.15)
    assert [request.status for request in found.result.requests] == ["finished", "finished", "not_sent", "not_sent"]


def test_a_stop_cancels_what_is_open() -> None:
    async def stop(driver: Driver) -> None:
        while driver.in_flight < 3:
            await asyncio.sleep(0.001)
        driver.stop()

    found = replay(mock(faults={"silent": 1.0}), singles(3), stop_when=stop)
    assert statuses(found) == {"cancelled": 3}


def test_a_cap_holds_requests_back_and_says_what_that_cost() -> None:
    found = replay(mock(step_us=2_000.0), singles(6, gap_us=0), max_in_flight=1)
    assert statuses(found) == {"finished": 6}
    ended = sorted((own.slot_ns, own.last_ns) for own in found.exchanges)
    assert all(start >= last for (start, _), (_, last) in zip(ended[1:], ended, strict=False))
    assert found.truth.facts()["client_queue_p99_us"] > 0


# ------------------------------------------------------------------------------------ load and metrics


def test_a_late_client_is_degraded() -> None:
    def sent(lag_ms: float) -> Exchange:
        return Exchange(0, 0, slot_ns=0, sent_ns=1 + round(lag_ms * 1e6))

    assert not LoadTruth.of([sent(1.0)] * 100).degraded
    assert not LoadTruth.of([sent(1.0)] * 99 + [sent(500.0)]).degraded
    assert LoadTruth.of([sent(1.0)] * 98 + [sent(500.0)] * 2).degraded
    assert LoadTruth.of([Exchange(0, 0)] * 3).degraded  # nothing was sent
    assert not LoadTruth.of([]).degraded


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_metrics_have_one_set_of_names(dialect: Any) -> None:
    found = replay(mock(dialect=dialect), singles(4, prompt=48, output=5))
    assert found.after is not None and found.after.engine == dialect
    assert found.counters["prompt_tokens"] == 4 * 48
    assert found.counters["generated_tokens"] == 4 * 5
    unknown = {name for name, value in found.counters.items() if value is None}
    # What SGLang does not export is unknown, never zero.
    assert ("preemptions" in unknown) == (dialect == "sglang")


def test_a_server_without_metrics_leaves_all_unknown() -> None:
    found = replay(mock(metrics=False), singles(2))
    assert statuses(found) == {"finished": 2}
    assert found.counters == dict.fromkeys(COUNTERS)
    assert derived(found.counters)["recomputed_tokens"] is None


def test_ranks_are_added_up_and_counters_that_began_anew_are_unknown() -> None:
    text = 'vllm:num_preemptions_total{engine="0"} 3\nvllm:num_preemptions_total{engine="1"} 4\n'
    before, after = normalised(text), normalised(text.replace(" 3", " 1").replace(" 4", " 1"))
    assert before.values["preemptions"] == 7
    assert grown(before, before)["preemptions"] == 0
    assert grown(before, after)["preemptions"] is None


def test_recompute_is_derived_where_nobody_counts_it_and_says_so() -> None:
    said = {"prompt_tokens": 1_000.0, "hit_tokens": 300.0, "computed_prompt_tokens": 760.0, "looked_up_tokens": 1_000.0}
    found = derived(said)
    assert found["recomputed_tokens"] == 60.0
    assert found["recomputed_tokens_by"].startswith("derived")


# ------------------------------------------------------------------------------------------ the mock


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1"])
def test_the_mock_listens_on_loopback_only(host: str) -> None:
    with pytest.raises(UsageError, match="loopback"):
        asyncio.run(serve(mock(), host, 0))


def test_a_port_in_use_is_one_line() -> None:
    async def main() -> None:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        first = asyncio.create_task(serve(mock(), "127.0.0.1", 0, ready))
        try:
            await serve(mock(), "127.0.0.1", await ready)
        finally:
            first.cancel()

    with pytest.raises(MeasurementError, match="cannot listen"):
        asyncio.run(main())


@pytest.mark.parametrize("faults", [{"nonsense": 0.1}, {"429": 1.5}, {"429": 0.6, "500": 0.6}])
def test_impossible_faults_are_refused(faults: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        mock(faults=faults)
