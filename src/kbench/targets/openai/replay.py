"""Replay of a trace against a server: open loop from the scheduled arrivals, each request in one class at the end.

Owns the dispatcher. Requests are sent when they are due whether the server keeps up or not; children wait for their
parents and the think time; a cap on requests in flight is the only thing that holds one back, and what it costs is told
apart. Real outputs are carried into the prompts that inherit them. It judges nothing.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

import aiohttp

from kbench.errors import UsageError
from kbench.targets.base import STEP_COLUMNS, Arrivals, ReplayResult, RequestResult, planned_hits
from kbench.targets.openai.exchange import Endpoint, Exchange, body_of, exchange, sent_stamps
from kbench.targets.openai.load import MOST_LAG_MS, LoadTruth, causes
from kbench.targets.openai.metrics import Scrape, grown, scrape
from kbench.traces.content import Owners, TokenSource, owners
from kbench.traces.trace import Trace, trace_from_rows

BODIES_AHEAD = 512
"""Prompts that are written out before they are due, in idle time."""
IDLE_NS = 2_000_000
"""The dispatcher uses an idle time for something else only if it is longer than this."""
TICK_NS = 1_000_000
"""What a selector rounds its timeouts up to: the last part of a wait is spent looking, not sleeping."""
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How a replay is driven. `vocab` is the model's: prompts are token ids below it."""

    vocab: int
    page_size: int = 16
    rate_scale: float = 1.0
    max_seconds: float = 60.0
    drain_seconds: float = 60.0
    max_requests: int | None = None
    max_in_flight: int | None = None
    """At most so many requests at once; None: the loop is open."""
    seed: int = 1
    poll_s: float = 1.0
    """Time between two looks at the server's metrics while it works."""
    most_lag_ms: float = MOST_LAG_MS

    def __post_init__(self) -> None:
        if self.max_seconds <= 0 or self.drain_seconds < 0 or (self.max_requests or 1) < 1:
            raise UsageError(
                f"a replay of {self.max_seconds:g} s and {self.max_requests} requests, drained for "
                f"{self.drain_seconds:g} s",
                remedy="more than 0 s and at least one request",
            )
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise UsageError(f"at most {self.max_in_flight} requests in flight", remedy="1 or more")


@dataclass(frozen=True, slots=True)
class HttpReplay:
    """A replay and what the server said meanwhile."""

    result: ReplayResult
    truth: LoadTruth
    exchanges: tuple[Exchange, ...]
    """Of every request that was due, in the order in which they were."""
    causes: Mapping[str, int]
    before: Scrape | None
    after: Scrape | None
    during: tuple[Scrape, ...] = ()

    @property
    def counters(self) -> dict[str, float | None]:
        return grown(self.before, self.after)


@dataclass(slots=True)
class Driver:
    """One replay. `stop` may be called from a signal handler: what is open then is `cancelled`."""

    trace: Trace
    endpoint: Endpoint
    plan: ReplayPlan
    _stopped: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _open: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _made: dict[int, Exchange] = field(default_factory=dict)
    _outputs: dict[int, Sequence[int]] = field(default_factory=dict)
    _bodies: dict[int, bytes] = field(default_factory=dict)
    _series: list[Scrape] = field(default_factory=list)
    _zero_ns: int = 0
    _count: int = field(init=False)
    _who: Owners = field(init=False)
    _tokens: TokenSource = field(init=False)
    _arrivals: Arrivals = field(init=False)
    _ahead: list[int] = field(init=False)

    def __post_init__(self) -> None:
        trace, plan = self.trace, self.plan
        self._count = len(trace) if plan.max_requests is None else min(plan.max_requests, len(trace))
        rows = [trace.row(i) for i in range(self._count)]
        head = trace if self._count == len(trace) else trace_from_rows(rows, trace.meta)
        self._who = owners(trace)
        self._tokens = TokenSource(trace, plan.vocab, plan.seed, who=self._who)
        self._arrivals = Arrivals(head, plan.rate_scale)
        self._ahead = self._roots()

    @property
    def in_flight(self) -> int:
        """Requests that are due and have not ended."""
        return len(self._open)

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    async def run(self) -> HttpReplay:
        plan = self.plan
        places = asyncio.Semaphore(plan.max_in_flight) if plan.max_in_flight else None
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=60.0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        stamps = [sent_stamps(self._now)]
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=stamps) as session,
            aiohttp.ClientSession(timeout=timeout) as beside,
        ):
            metrics = self.endpoint.url.rstrip("/") + "/metrics"
            before = await scrape(beside, metrics)
            self._prepare(BODIES_AHEAD)
            gc.collect()
            gc.freeze()  # a collection that walks over a whole trace takes longer than a dispatch may be late
            self._zero_ns = perf_counter_ns()
            polling = asyncio.create_task(self._poll(beside, metrics))
            try:
                await self._dispatch(session, places)
            finally:
                polling.cancel()
                await asyncio.gather(*self._cancel(), polling, return_exceptions=True)
                gc.unfreeze()
            after = await scrape(beside, metrics, self._now())
        made = tuple(self._made.values())
        return HttpReplay(
            result=self._result(planned_hits(self.trace, plan.page_size, who=self._who)),
            truth=LoadTruth.of(made, plan.most_lag_ms),
            exchanges=made,
            causes=causes(made),
            before=before,
            after=after,
            during=tuple(self._series),
        )

    def _now(self) -> int:
        return perf_counter_ns() - self._zero_ns

    # ----------------------------------------------------------------------------------------- dispatch

    async def _dispatch(self, session: aiohttp.ClientSession, places: asyncio.Semaphore | None) -> None:
        arrivals, stop_ns = self._arrivals, round(self.plan.max_seconds * 1e9)
        deadline = stop_ns + round(self.plan.drain_seconds * 1e9)
        while not self._stopped and self._now() < deadline:
            self._wake.clear()
            for scheduled, request in arrivals.due(min(self._now(), stop_ns - 1)):
                self._made[request] = Exchange(request, scheduled)
                task = asyncio.create_task(self._one(session, places, request))
                self._open[request] = task
            due = arrivals.next_ns
            if due is not None and due < stop_ns:
                await self._wait(due)
            elif self._open:
                await self._wait(deadline)
            else:
                return

    async def _wait(self, until_ns: int) -> None:
        """Until then, or until a request has ended. Long idle times write prompts ahead."""
        while self._ahead and len(self._bodies) < BODIES_AHEAD and until_ns - self._now() > IDLE_NS:
            self._prepare(1)
            await asyncio.sleep(0)
            if self._wake.is_set():
                return
        left = until_ns - self._now()
        if left <= TICK_NS:
            await asyncio.sleep(0)
            return
        timer = asyncio.get_running_loop().call_later((left - TICK_NS) / 1e9, self._wake.set)
        await self._wake.wait()
        timer.cancel()

    async def _one(self, session: aiohttp.ClientSession, places: asyncio.Semaphore | None, request: int) -> None:
        own = self._made[request]
        try:
            if places is None:
                own.slot_ns = own.scheduled_ns
                await self._send(session, request, own)
            else:
                async with places:
                    own.slot_ns = max(own.scheduled_ns, self._now())
                    await self._send(session, request, own)
        except asyncio.CancelledError:
            own.end("cancelled" if self._stopped else "unfinished", "the replay ended", self._now())
        finally:
            self._open.pop(request, None)
            if own.status == "finished":
                self._outputs[request] = own.token_ids
                self._arrivals.finished(request, own.last_ns)
            self._wake.set()

    async def _send(self, session: aiohttp.ClientSession, request: int, own: Exchange) -> None:
        body = self._bodies.pop(request, None) or self._body(request)
        await exchange(session, self.endpoint, body, int(self.trace.output_tokens[request]), own, self._now)

    def _cancel(self) -> list[asyncio.Task[None]]:
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        return tasks

    async def _poll(self, session: aiohttp.ClientSession, metrics: str) -> None:
        while True:
            await asyncio.sleep(self.plan.poll_s)
            seen = await scrape(session, metrics, self._now())
            if seen is not None:
                self._series.append(seen)

    # ------------------------------------------------------------------------------------------ prompts

    def _roots(self) -> list[int]:
        """Requests without parents, the one that is due last first."""
        roots = [request for request in range(self._count) if not self.trace.parents(request)]
        return sorted(roots, key=lambda request: int(self.trace.arrival_us.values[request]), reverse=True)

    def _prepare(self, count: int) -> None:
        for _ in range(min(count, len(self._ahead))):
            request = self._ahead.pop()
            if request not in self._made:
                self._bodies[request] = self._body(request)

    def _body(self, request: int) -> bytes:
        prompt = self._tokens.prompt(request, self._outputs).tolist()
        return body_of(self.endpoint, prompt, int(self.trace.output_tokens[request]))

    # ------------------------------------------------------------------------------------------ results

    def _result(self, planned: Sequence[int]) -> ReplayResult:
        return ReplayResult(
            mode="http",
            requests=tuple(self._outcome(request, planned[request]) for request in range(self._count)),
            steps={name: [] for name in STEP_COLUMNS},
            page_size=self.plan.page_size,
            pages=0,
            counters={"end_us": self._now() / 1_000},
            dispatch_lag_us=[(own.sent_ns - own.slot_ns) / 1_000 for own in self._made.values() if own.sent_ns],
        )

    def _outcome(self, request: int, planned: int) -> RequestResult:
        own = self._made.get(request)
        return RequestResult(
            request_id=request,
            session_id=int(self.trace.session_id[request]),
            turn=int(self.trace.turn[request]),
            status=own.status if own else "not_sent",
            scheduled_us=own.scheduled_ns / 1_000 if own else 0.0,
            started_us=own.sent_ns / 1_000 if own else 0.0,
            first_token_us=own.first_ns / 1_000 if own else 0.0,
            finished_us=own.last_ns / 1_000 if own else 0.0,
            input_tokens=int(self.trace.input_tokens[request]),
            output_tokens=own.output_tokens if own else 0,
            hit_tokens=own.cached_tokens if own else None,
            planned_hit_tokens=planned,
            recomputed_tokens=None,
            preemptions=None,
            output=tuple(own.token_ids) if own else (),
        )


def replay_http(trace: Trace, endpoint: Endpoint, plan: ReplayPlan) -> HttpReplay:
    """Replay what the plan asks for; blocks until it is over. Raises MeasurementError where the server is not there."""
    return asyncio.run(Driver(trace, endpoint, plan).run())
