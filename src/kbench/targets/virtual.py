"""Replay in virtual time: the engine's scheduler and block pool, with step times from a measured cost table.

Owns the loop and its clock (whole nanoseconds). It computes no tokens and needs no torch; the same trace, engine and
costs give the same result everywhere. What it says is modelled: `calibrate` tells how far that is from the real thing.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial

from kbench.engine.core import EngineConfig, ExactContent, NumberedContent, Request, Scheduled
from kbench.engine.core import RequestStatus as EngineStatus
from kbench.engine.costs import CostTable, StepShape
from kbench.engine.number_pool import NumberPool
from kbench.engine.scheduler import Scheduler
from kbench.engine.step_clock import StepClock, StepNoise
from kbench.engine.stretch import FastForward
from kbench.targets.base import Arrivals, ReplayResult, RequestResult, RequestStatus, planned_hits
from kbench.targets.step_log import StepLog
from kbench.traces.content import owners
from kbench.traces.numbers import PageNumbers
from kbench.traces.trace import Trace


def replay_virtual(
    trace: Trace,
    config: EngineConfig,
    costs: CostTable,
    *,
    rate_scale: float = 1.0,
    all_at_once: bool = False,
    until_us: float | None = None,
    noise_seed: int | None = None,
    captured: Sequence[int] | None = None,
    stepping: bool = False,
) -> ReplayResult:
    """Replay the whole trace open loop and drain it, or stop where a step would begin at `until_us` or later.

    `all_at_once` makes a backlog: every root is due at time 0, and think times are left out. A request still queued
    or running at the end is `unfinished`; one that was never due, because a parent did not finish or time was up, is
    `not_sent`. With `noise_seed` every step is as much longer or shorter as some repeated row of the grid was; a batch
    of decodes costs what the next of the `captured` sizes costs (default: the configuration's). `stepping` plans every
    step by itself, with real page ids: the same to the last bit, but slower.
    """
    arrivals = Arrivals(trace, rate_scale, all_at_once=all_at_once)
    until_ns = math.inf if until_us is None else round(1_000 * until_us)
    noise = None if noise_seed is None else StepNoise(costs.residuals(), noise_seed)
    clock = StepClock(costs, noise=noise, captured=config.captured if captured is None else captured)
    replay = (_Stepping if stepping else _Fast)(trace, config, clock, arrivals, until_ns)
    return replay.run()


_FORGOTTEN = ExactContent(tuple)
"""The content of a finished request: its keys are not needed any more, and a long trace has millions."""


class _Replay:
    """What is noted of requests and steps, however they are taken."""

    def __init__(
        self, trace: Trace, config: EngineConfig, clock: StepClock, arrivals: Arrivals, until_ns: float
    ) -> None:
        self._trace = trace
        self._config = config
        self._clock = clock
        self._arrivals = arrivals
        self._until_ns = until_ns
        self._who = owners(trace)
        self._numbers = PageNumbers(trace, config.page_size, who=self._who)
        self._own_output: list[bool] = self._numbers.own_output.tolist()
        self._tokens = list(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
        self._scheduler = self._make_scheduler()
        self._requests: dict[int, Request] = {}
        self._scheduled_ns: dict[int, int] = {}
        self._started_ns: dict[int, int] = {}
        self._first_token_ns: dict[int, int] = {}
        self._ended_ns: dict[int, int] = {}
        self._log = StepLog(config.pages, config.page_size)

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(self._config)

    def run(self) -> ReplayResult:
        arrivals, scheduler = self._arrivals, self._scheduler
        now = 0
        while now < self._until_ns:
            if arrivals.next_ns is not None and arrivals.next_ns <= now:
                self._add(now)
            if scheduler.has_work:
                now = self._advance(now)
            elif arrivals.next_ns is not None:
                now = arrivals.next_ns
            else:
                break
        return self._result(now)

    def _add(self, now: int) -> None:
        """Queue what is due."""
        for when, request in self._arrivals.due(now):
            content = NumberedContent(partial(self._numbers.of, request), own_output=self._own_output[request])
            made = Request(request, *self._tokens[request], content)
            self._requests[request] = made
            self._scheduled_ns[request] = when
            self._scheduler.add(made)
        if self._scheduler.rejecting:
            for rejected in self._scheduler.take_rejected():
                self._ended_ns[rejected.request_id] = now

    def _advance(self, now: int) -> int:
        """One step, or many; the time after it."""
        return self._step(now)

    def _step(self, now: int) -> int:
        """One step as the scheduler plans it by itself."""
        scheduler = self._scheduler
        plan = scheduler.schedule()
        if not plan.scheduled:
            return now
        slack = sum(-item.kv_tokens % self._config.page_size for item in plan.scheduled)
        after = self._pay(StepShape.of(plan), slack, len(plan.preempted), now)
        self._note_tokens(plan.scheduled, now, after)
        self._note_ends(scheduler.commit(plan), after)
        return after

    def _pay(self, shape: StepShape, slack: int, preempted: int, now: int) -> int:
        """What the step costs, which is noted with the state of the pool; the time after it."""
        scheduler = self._scheduler
        duration = self._clock.step(shape, scheduler.counters.steps)
        pool = scheduler.pool
        self._log.step(now, duration, shape, preempted, len(scheduler.waiting), pool.evictable, pool.blank, slack)
        return now + duration

    def _note_tokens(self, scheduled: Iterable[Scheduled], now: int, after: int) -> None:
        """Starts and first tokens, before the step is committed."""
        for request, _, _, samples in scheduled:
            if request.output_tokens == 0:
                self._started_ns.setdefault(request.request_id, now)
                if samples:
                    self._first_token_ns[request.request_id] = after

    def _note_ends(self, finished: Iterable[Request], now: int) -> None:
        for request in finished:
            self._ended_ns[request.request_id] = now
            request.content = _FORGOTTEN
            self._arrivals.finished(request.request_id, now)

    def _result(self, now: int) -> ReplayResult:
        planned = planned_hits(self._trace, self._config.page_size, who=self._who)
        pool, clock = self._scheduler.pool, self._clock
        counters = {name: float(value) for name, value in asdict(self._scheduler.counters).items()}
        counters |= {
            "evictions": float(pool.evictions),
            "busy_us": clock.modelled_ns / 1_000,
            "end_us": now / 1_000,
        }
        places = zip(self._trace.session_id.tolist(), self._trace.turn.tolist(), planned, strict=True)
        return ReplayResult(
            mode="virtual",
            requests=tuple(self._outcome(request, *place) for request, place in enumerate(places)),
            steps=self._log,
            page_size=self._config.page_size,
            pages=self._config.pages,
            extrapolated_fraction=clock.extrapolated_ns / clock.modelled_ns if clock.modelled_ns else 0.0,
            counters=counters,
        )

    def _outcome(self, request: int, session: int, turn: int, planned: int) -> RequestResult:
        engine = self._requests.get(request)
        return RequestResult(
            request_id=request,
            session_id=session,
            turn=turn,
            status=_ending(engine) if engine else "not_sent",
            scheduled_us=self._scheduled_ns.get(request, 0) / 1_000,
            started_us=self._started_ns.get(request, 0) / 1_000,
            first_token_us=self._first_token_ns.get(request, 0) / 1_000,
            finished_us=self._ended_ns.get(request, 0) / 1_000,
            input_tokens=self._tokens[request][0],
            output_tokens=engine.output_tokens if engine else 0,
            hit_tokens=engine.hit_tokens if engine else 0,
            planned_hit_tokens=planned,
            recomputed_tokens=engine.recomputed_tokens if engine else 0,
            preemptions=engine.preemptions if engine else 0,
        )


_Stepping = _Replay


class _Fast(_Replay):
    """Runs of steps at once, and without page ids."""

    def _make_scheduler(self) -> Scheduler:
        config = self._config
        self._pool = NumberPool(config.pages, self._numbers.count, caching=config.prefix_caching)
        scheduler = Scheduler(config, self._pool)
        self._forward = FastForward(scheduler, self._pool)
        return scheduler

    def _advance(self, now: int) -> int:
        forward = self._forward
        steps = forward.longest_run()
        if steps:
            return self._decode(now, steps)
        steps = forward.longest_chunks()
        if steps:
            return self._compute(now, steps)
        step = forward.plan()
        if step is None:
            forward.leave()
            now = self._step(now)
            forward.enter()
            return now
        if not step.decodes and not step.others:
            return now
        after = self._pay(_shape_of(step.decodes, step.context, step.others), step.slack, step.preempted, now)
        self._note_tokens(step.others, now, after)
        self._note_ends(forward.commit(step), after)
        return after

    def _decode(self, now: int, steps: int) -> int:
        """Up to so many steps of decodes only, until somebody arrives or time is up."""
        forward = self._forward
        seqs, context, number = forward.decoding.count, forward.decoding.context, self._scheduler.counters.steps
        durations = self._clock.decodes(seqs, context, steps, self._next_event() - now, number)
        taken = forward.decoding.takes(len(durations))
        self._note_run(now, durations, taken)
        now += sum(durations)
        self._note_ends(forward.advance(taken), now)
        return now

    def _compute(self, now: int, steps: int) -> int:
        """Up to so many full chunks of one prompt, beside decodes."""
        forward = self._forward
        seqs, context, number = forward.decoding.count, forward.decoding.context, self._scheduler.counters.steps
        chunk, computed = forward.chunk, forward.computed
        enough = self._next_event() - now
        durations = self._clock.chunks(seqs, context, chunk, computed, steps, enough, number)
        taken = forward.takes_with_chunks(len(durations))
        self._note_run(now, durations, taken, chunk, computed)
        now += sum(durations)
        self._note_ends(forward.advance_chunks(taken), now)
        return now

    def _next_event(self) -> float:
        arrival = self._arrivals.next_ns
        return self._until_ns if arrival is None or arrival > self._until_ns else arrival

    def _note_run(self, now: int, durations: array[int], taken: array[int], chunk: int = 0, computed: int = 0) -> None:
        forward, pool, waiting = self._forward, self._pool, len(self._scheduler.waiting)
        # A prompt's last page has empty slots too, where a chunk of it is computed.
        slack = forward.decoding.slack + (-computed % self._config.page_size)
        used = pool.in_use * self._config.page_size - slack
        self._log.run(
            now,
            durations,
            taken,
            forward.decoding.count,
            forward.decoding.context,
            waiting,
            pool.evictable,
            pool.blank,
            used,
            chunk,
            computed,
        )

    def _result(self, now: int) -> ReplayResult:
        self._forward.leave()
        return super()._result(now)


def _shape_of(seqs: int, context: int, others: Sequence[Scheduled]) -> StepShape:
    """`StepShape.of`, where so many decodes with so much context are summed up already."""
    tokens = chunks = work = chunk_context = 0
    for _, query, kv, _ in others:
        if query == 1:
            seqs += 1
            context += kv
        else:
            tokens += query
            chunks += 1
            work += query * kv
            chunk_context += kv
    return StepShape(seqs, context, tokens, chunks, work, chunk_context)


def _ending(request: Request) -> RequestStatus:
    if request.status is EngineStatus.FINISHED:
        return "finished"
    return "rejected" if request.status is EngineStatus.REJECTED else "unfinished"
