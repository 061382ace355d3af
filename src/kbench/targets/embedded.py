"""Replay in real time: the embedded engine computes every step, with the wall clock and real greedy tokens.

Owns the open loop: requests become visible at their scheduled time whether the engine keeps up or not, and between
requests the loop waits without work. The scheduler is the one that virtual replay uses. Real outputs are carried into
the prompts that inherit them. It judges nothing.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import asdict
from time import perf_counter_ns

from kbench.engine.core import Request
from kbench.engine.core import RequestStatus as EngineStatus
from kbench.engine.costs import StepShape
from kbench.engine.phases import NullClock
from kbench.engine.runner import Engine, output_of, take_step
from kbench.errors import UsageError
from kbench.suite.schema import Arm
from kbench.targets.base import STEP_COLUMNS, Arrivals, ReplayResult, RequestResult, RequestStatus, planned_hits
from kbench.traces.content import TokenSource, owners
from kbench.traces.trace import Trace, trace_from_rows

_WARMUP_OUTPUT = 4


def replay_exec(
    trace: Trace,
    arm: Arm,
    device: str,
    *,
    rate_scale: float = 1.0,
    max_seconds: float = 4.0,
    max_requests: int | None = None,
    drain_seconds: float = 60.0,
    seed: int = 1,
    engine: Engine | None = None,
    warmup: bool = True,
) -> ReplayResult:
    """Replay what the first `max_requests` rows schedule before `max_seconds`, then drain for up to `drain_seconds`.

    What is still queued or running then is `unfinished`; what was never due, because a parent did not finish or
    its time lies beyond `max_seconds`, is `not_sent`; what the engine or the model can never hold is `rejected`.
    Results list the first `max_requests` rows in file order. A given `engine` must be the arm's; it is reset first
    and its weights are used. Start-up and warm-up are over before the clock starts.
    """
    if max_seconds <= 0 or drain_seconds < 0 or (max_requests is not None and max_requests < 1):
        raise UsageError(
            f"a replay of {max_seconds} s and {max_requests} requests, drained for {drain_seconds} s",
            remedy="more than 0 s and at least one request",
        )
    count = len(trace) if max_requests is None else min(max_requests, len(trace))
    owned = engine or Engine(arm, device)
    replay = _Replay(trace, count, owned, rate_scale, seed)
    if warmup:
        warm_up(owned, seed)
    owned.reset()
    return replay.run(round(max_seconds * 1e9), round(drain_seconds * 1e9))


def warm_up(engine: Engine, seed: int) -> None:
    """Run prompts of random tokens, alone and together, so that nothing is done for the first time under the clock.

    Graphs of decodes are captured here, and none later: a size that is missing is launched eagerly, and says so.
    """
    engine.runner.capture_ahead()
    config, vocab = engine.config, engine.runner.shape.vocab
    longest = min(config.max_batched_tokens, config.pages * config.page_size // 2, 512) - _WARMUP_OUTPUT
    draw = random.Random(f"kbench warm-up {seed}")
    for batch in (1, min(4, config.max_seqs)):
        length = max(1, longest // batch)
        prompts = [[draw.randrange(vocab) for _ in range(length)] for _ in range(batch)]
        engine.generate(prompts, _WARMUP_OUTPUT)


class _Replay:
    """One replay's clock, engine and bookkeeping. Trace ids and engine ids are two things."""

    def __init__(self, trace: Trace, count: int, engine: Engine, rate_scale: float, seed: int) -> None:
        who = owners(trace)
        self._trace = trace
        self._count = count
        self._engine = engine
        self._tokens = TokenSource(trace, engine.runner.shape.vocab, seed, who=who)
        self._planned = planned_hits(trace, engine.config.page_size, who=who)
        head = trace if count == len(trace) else trace_from_rows([trace.row(i) for i in range(count)], trace.meta)
        self._arrivals = Arrivals(head, rate_scale)
        self._null = NullClock()
        self._wake = threading.Event()
        self._requests: dict[int, Request] = {}
        self._trace_id: dict[int, int] = {}
        self._outputs: dict[int, tuple[int, ...]] = {}
        self._scheduled_ns: dict[int, int] = {}
        self._started_ns: dict[int, int] = {}
        self._first_token_ns: dict[int, int] = {}
        self._ended_ns: dict[int, int] = {}
        self._too_long: set[int] = set()
        self._lag_us: list[float] = []
        self._steps: list[tuple[float, ...]] = []
        self._busy_ns = 0
        self._zero_ns = 0
        self._before: Counter[tuple[str, str]] = Counter()

    def run(self, stop_ns: int, drain_ns: int) -> ReplayResult:
        """Until nothing is left to send or do, or the drain's deadline."""
        engine, arrivals = self._engine, self._arrivals
        deadline = stop_ns + drain_ns
        self._before = engine.runner.steps.copy()
        self._zero_ns = perf_counter_ns()
        now = 0
        while now < deadline:
            for scheduled, request in arrivals.due(min(now, stop_ns - 1)):
                self._add(request, scheduled)
            if engine.has_work:
                self._step()
            elif arrivals.next_ns is not None and arrivals.next_ns < stop_ns:
                self._wait(arrivals.next_ns)
            else:
                break
            now = self._now()
        return self._result()

    def _now(self) -> int:
        return perf_counter_ns() - self._zero_ns

    def _wait(self, until_ns: int) -> None:
        """Nobody sets the event: its timeout is the wait, and the processor is free meanwhile."""
        left = until_ns - self._now()
        if left > 0:
            self._wake.wait(left / 1e9)

    def _add(self, request: int, scheduled: int) -> None:
        prompt = self._tokens.prompt(request, self._outputs).tolist()
        output = int(self._trace.output_tokens[request])
        self._scheduled_ns[request] = scheduled
        now = self._now()
        self._lag_us.append((now - scheduled) / 1_000)
        if len(prompt) + output > self._engine.runner.shape.max_context:
            self._too_long.add(request)
            self._ended_ns[request] = now
            return
        made = self._engine.add(prompt, output)
        self._requests[request] = made
        self._trace_id[made.request_id] = request

    def _step(self) -> None:
        """One engine step with its times: begin, tokens, and the row of the step."""
        engine = self._engine
        begin = self._now()
        plan = engine.scheduler.schedule()
        for rejected in plan.rejected:
            self._ended_ns[self._trace_id[rejected.request_id]] = begin
        if not plan.scheduled:
            return
        slack = sum(-item.kv_tokens % engine.config.page_size for item in plan.scheduled)
        row = self._row(StepShape.of(plan), len(plan.preempted), slack)
        _, finished = take_step(engine.runner, engine.scheduler, plan, self._null)
        end = self._now()
        for item in plan.scheduled:
            self._started_ns.setdefault(self._trace_id[item.request.request_id], begin)
        for item in plan.sampling:
            self._first_token_ns.setdefault(self._trace_id[item.request.request_id], end)
        for request in finished:
            trace_id = self._trace_id[request.request_id]
            self._ended_ns[trace_id] = end
            self._outputs[trace_id] = output_of(request)
            self._arrivals.finished(trace_id, end)
        self._busy_ns += end - begin
        self._steps.append((begin / 1_000, (end - begin) / 1_000, *row))

    def _row(self, shape: StepShape, preempted: int, slack: int) -> tuple[float, ...]:
        pool = self._engine.scheduler.pool
        return (
            shape.decode_seqs,
            shape.decode_context_tokens,
            shape.prefill_tokens,
            shape.prefill_seqs,
            shape.prefill_work,
            shape.prefill_context_tokens,
            preempted,
            len(self._engine.scheduler.waiting),
            pool.in_use,
            pool.evictable,
            pool.blank,
            pool.in_use * self._engine.config.page_size - slack,
        )

    def _result(self) -> ReplayResult:
        scheduler = self._engine.scheduler
        columns = zip(*self._steps, strict=True) if self._steps else [()] * len(STEP_COLUMNS)
        counters = {name: float(value) for name, value in asdict(scheduler.counters).items()}
        counters |= {
            "evictions": float(scheduler.pool.evictions),
            "busy_us": self._busy_ns / 1_000,
            "end_us": self._now() / 1_000,
        } | self._launches()
        return ReplayResult(
            mode="exec",
            requests=tuple(self._outcome(request) for request in range(self._count)),
            steps={name: list(column) for name, column in zip(STEP_COLUMNS, columns, strict=True)},
            page_size=self._engine.config.page_size,
            pages=self._engine.config.pages,
            counters=counters,
            dispatch_lag_us=self._lag_us,
        )

    def _launches(self) -> dict[str, float]:
        """Steps by how they were computed; for each reason to launch eagerly, how often it was the reason."""
        found: dict[str, float] = {"steps.graph": 0.0, "steps.padded": 0.0, "steps.eager": 0.0}
        for (mode, reason), count in (self._engine.runner.steps - self._before).items():
            found[f"steps.{mode}"] += count
            if reason:
                found[f"steps.{mode}: {reason}"] = float(count)
        return found

    def _outcome(self, request: int) -> RequestResult:
        made = self._requests.get(request)
        return RequestResult(
            request_id=request,
            session_id=int(self._trace.session_id[request]),
            turn=int(self._trace.turn[request]),
            status="rejected" if request in self._too_long else _ending(made) if made else "not_sent",
            scheduled_us=self._scheduled_ns.get(request, 0) / 1_000,
            started_us=self._started_ns.get(request, 0) / 1_000,
            first_token_us=self._first_token_ns.get(request, 0) / 1_000,
            finished_us=self._ended_ns.get(request, 0) / 1_000,
            input_tokens=int(self._trace.input_tokens[request]),
            output_tokens=made.output_tokens if made else 0,
            hit_tokens=made.hit_tokens if made else 0,
            planned_hit_tokens=self._planned[request],
            recomputed_tokens=made.recomputed_tokens if made else 0,
            preemptions=made.preemptions if made else 0,
            output=output_of(made) if made else (),
        )


def _ending(request: Request) -> RequestStatus:
    if request.status is EngineStatus.FINISHED:
        return "finished"
    return "rejected" if request.status is EngineStatus.REJECTED else "unfinished"
