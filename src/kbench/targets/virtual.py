"""Replay in virtual time: the engine's scheduler and block pool, with step times from a measured cost table.

Owns the loop and its clock (whole nanoseconds). It computes no tokens and needs no torch; the same trace, engine and
costs give the same result everywhere. What it says is modelled: `calibrate` tells how far that is from the real thing.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import asdict
from functools import partial

from kbench.engine.core import EngineConfig, ExactContent, Request, StepPlan
from kbench.engine.core import RequestStatus as EngineStatus
from kbench.engine.costs import CostTable, StepShape
from kbench.engine.scheduler import Scheduler
from kbench.engine.stretch import decode_steps
from kbench.targets.base import STEP_COLUMNS, Arrivals, ReplayResult, RequestResult, RequestStatus, planned_hits
from kbench.traces.content import PageKeys, owners
from kbench.traces.trace import Trace


def replay_virtual(
    trace: Trace,
    config: EngineConfig,
    costs: CostTable,
    *,
    rate_scale: float = 1.0,
    all_at_once: bool = False,
    until_us: float | None = None,
    stepping: bool = False,
) -> ReplayResult:
    """Replay the whole trace open loop and drain it, or stop where a step would begin at `until_us` or later.

    `all_at_once` makes a backlog: every root is due at time 0, and think times are left out. A request still queued
    or running at the end is `unfinished`; one that was never due, because a parent did not finish or time was up, is
    `not_sent`. `stepping` plans every step by itself instead of taking runs of decodes at once: the same, but slower.
    """
    arrivals = Arrivals(trace, rate_scale, all_at_once=all_at_once)
    until_ns = math.inf if until_us is None else round(1_000 * until_us)
    return _Replay(trace, config, costs, arrivals, until_ns).run(stepping)


_FORGOTTEN = ExactContent(tuple)
"""The content of a finished request: its keys are not needed any more, and a long trace has millions."""


class _Replay:
    def __init__(
        self, trace: Trace, config: EngineConfig, costs: CostTable, arrivals: Arrivals, until_ns: float
    ) -> None:
        self._trace = trace
        self._config = config
        self._costs = costs
        self._arrivals = arrivals
        self._until_ns = until_ns
        self._scheduler = Scheduler(config)
        self._who = owners(trace)
        self._keys = PageKeys(trace, config.page_size, who=self._who)
        self._requests: dict[int, Request] = {}
        self._scheduled_ns: dict[int, int] = {}
        self._started_ns: dict[int, int] = {}
        self._first_token_ns: dict[int, int] = {}
        self._ended_ns: dict[int, int] = {}
        self._steps: list[tuple[float, ...]] = []
        self._modelled_ns = 0
        self._extrapolated_ns = 0

    def run(self, stepping: bool) -> ReplayResult:
        arrivals, scheduler = self._arrivals, self._scheduler
        now = 0
        while now < self._until_ns:
            for when, request in arrivals.due(now):
                self._add(request, when)
            if not stepping:
                later = self._decode(now)
                if later > now:
                    now = later
                    continue
            if scheduler.has_work:
                now = self._step(now)
            elif arrivals.next_ns is not None:
                now = arrivals.next_ns
            else:
                break
        return self._result(now)

    def _decode(self, now: int) -> int:
        """As many steps of decodes only as there are before somebody comes or goes; the time after them."""
        until = self._until_ns if self._arrivals.next_ns is None else min(self._until_ns, self._arrivals.next_ns)
        with closing(decode_steps(self._scheduler)) as steps:
            for seqs, context, slack in steps:
                shape = StepShape(seqs, context)
                now += self._pay(shape, slack, 0, now)
                if now >= until:
                    break
        return now

    def _add(self, request: int, when: int) -> None:
        prompt, output = int(self._trace.input_tokens[request]), int(self._trace.output_tokens[request])
        made = Request(request, prompt, output, ExactContent(partial(self._keys, request)))
        self._requests[request] = made
        self._scheduled_ns[request] = when
        self._scheduler.add(made)

    def _step(self, now: int) -> int:
        """One step; the time after it."""
        plan = self._scheduler.schedule()
        for rejected in plan.rejected:
            self._ended_ns[rejected.request_id] = now
        if not plan.scheduled:
            return now
        shape, first_tokens, slack = self._look_at(plan, now)
        now += self._pay(shape, slack, len(plan.preempted), now)
        for request in first_tokens:
            self._first_token_ns[request.request_id] = now
        for request in self._scheduler.commit(plan):
            self._ended_ns[request.request_id] = now
            request.content = _FORGOTTEN
            self._arrivals.finished(request.request_id, now)
        return now

    def _look_at(self, plan: StepPlan, now: int) -> tuple[StepShape, list[Request], int]:
        """The step's shape, the requests that get their first token, and the empty slots of last pages.

        One pass over the batch: this is the inner loop of a replay, and `StepShape.of` says what it must agree with.
        """
        seqs = context = tokens = chunks = work = chunk_context = slack = 0
        page_size = self._config.page_size
        first_tokens = []
        for request, query, kv, samples in plan.scheduled:
            slack += -kv % page_size
            if query == 1:
                seqs += 1
                context += kv
            else:
                tokens += query
                chunks += 1
                work += query * kv
                chunk_context += kv
            if request.output_tokens == 0:
                self._started_ns.setdefault(request.request_id, now)
                if samples:
                    first_tokens.append(request)
        return StepShape(seqs, context, tokens, chunks, work, chunk_context), first_tokens, slack

    def _pay(self, shape: StepShape, slack: int, preempted: int, now: int) -> int:
        """What the step costs, which is noted with the state of the pool."""
        duration = self._costs.step_ns(shape)
        self._modelled_ns += duration
        if self._costs.extrapolated(shape):
            self._extrapolated_ns += duration
        pool = self._scheduler.pool
        in_use = pool.in_use
        row = (
            now / 1_000,
            duration / 1_000,
            shape.decode_seqs,
            shape.decode_context_tokens,
            shape.prefill_tokens,
            shape.prefill_seqs,
            shape.prefill_work,
            shape.prefill_context_tokens,
            preempted,
            len(self._scheduler.waiting),
            in_use,
            pool.evictable,
            pool.blank,
            in_use * self._config.page_size - slack,
        )
        self._steps.append(row)
        return duration

    def _result(self, now: int) -> ReplayResult:
        planned = planned_hits(self._trace, self._config.page_size, who=self._who)
        columns = zip(*self._steps, strict=True) if self._steps else [()] * len(STEP_COLUMNS)
        pool = self._scheduler.pool
        counters = {name: float(value) for name, value in asdict(self._scheduler.counters).items()}
        counters |= {
            "evictions": float(pool.evictions),
            "busy_us": self._modelled_ns / 1_000,
            "end_us": now / 1_000,
        }
        return ReplayResult(
            mode="virtual",
            requests=tuple(self._outcome(request, planned[request]) for request in range(len(self._trace))),
            steps={name: list(column) for name, column in zip(STEP_COLUMNS, columns, strict=True)},
            page_size=self._config.page_size,
            pages=self._config.pages,
            extrapolated_fraction=self._extrapolated_ns / self._modelled_ns if self._modelled_ns else 0.0,
            counters=counters,
        )

    def _outcome(self, request: int, planned: int) -> RequestResult:
        engine = self._requests.get(request)
        return RequestResult(
            request_id=request,
            session_id=int(self._trace.session_id[request]),
            turn=int(self._trace.turn[request]),
            status=_ending(engine) if engine else "not_sent",
            scheduled_us=self._scheduled_ns.get(request, 0) / 1_000,
            started_us=self._started_ns.get(request, 0) / 1_000,
            first_token_us=self._first_token_ns.get(request, 0) / 1_000,
            finished_us=self._ended_ns.get(request, 0) / 1_000,
            input_tokens=int(self._trace.input_tokens[request]),
            output_tokens=engine.output_tokens if engine else 0,
            hit_tokens=engine.hit_tokens if engine else 0,
            planned_hit_tokens=planned,
            recomputed_tokens=engine.recomputed_tokens if engine else 0,
            preemptions=engine.preemptions if engine else 0,
        )


def _ending(request: Request) -> RequestStatus:
    if request.status is EngineStatus.FINISHED:
        return "finished"
    return "rejected" if request.status is EngineStatus.REJECTED else "unfinished"
