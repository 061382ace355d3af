"""Which requests run in a step, and on which pages: continuous batching with the semantics of vLLM's V1 scheduler.

Owns the waiting and running queues and every request's engine state. It knows no clock and no tensors: replays call
`schedule`, let the step happen (or cost its time), and `commit` it. The same calls give the same plans, always.

One token budget serves a step, running requests first and in order of admission, then waiting ones. A prompt may be
computed in chunks. Where pages run out, the request that was admitted last is preempted: it loses its pages, goes
back to the front of the queue and computes everything again, except what it finds in the prefix cache; such
recomputing is counted apart and is no hit. Two departures from vLLM: pages become known when their step is committed,
not when it is planned, so two requests that bring the same new prefix in one step share nothing; and a request that
could never hold its last token is rejected when it arrives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kbench.engine.blocks import BlockPool, Pool
from kbench.engine.core import EngineConfig, Request, RequestStatus, Scheduled, StepPlan


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made. `hit_tokens` are first admissions' only, out of `looked_up_tokens`."""

    steps: int = 0
    admitted: int = 0
    rejected: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    rehit_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0


class Scheduler:
    """First come, first served, preemption by recompute. Not safe to `schedule` twice without `commit`."""

    def __init__(self, config: EngineConfig, pool: Pool | None = None) -> None:
        self.config = config
        self.pool = BlockPool(config.pages) if pool is None else pool
        self.counters = Counters()
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._rejected: list[Request] = []
        self._reserve = math.ceil(config.watermark * config.pages)

    # ------------------------------------------------------------------------------------------ queues

    def add(self, request: Request) -> None:
        """Queue a request, or mark it rejected where it can never fit; the next plan lists it then."""
        config = self.config
        last_kv = request.prompt_tokens + request.max_output_tokens - 1
        too_long = -(-last_kv // config.page_size) > config.pages
        indivisible = not config.chunked_prefill and request.prompt_tokens > config.max_batched_tokens
        if too_long or indivisible:
            request.status = RequestStatus.REJECTED
            self.counters.rejected += 1
            self._rejected.append(request)
        else:
            request.status = RequestStatus.WAITING
            self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Take a request out, between `commit` and `schedule`; its pages are free at once. Ended ones stay as is."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            return
        self._release(request)
        request.status = RequestStatus.ABORTED
        self.counters.aborted += 1

    @property
    def has_work(self) -> bool:
        """Whether another step can do something, be it only to say that a request was rejected."""
        return bool(self.running or self.waiting or self._rejected)

    @property
    def rejecting(self) -> bool:
        """Whether the next plan lists rejected requests."""
        return bool(self._rejected)

    # ------------------------------------------------------------------------------------------- a step

    def schedule(self) -> StepPlan:
        """Decide the next step and take the pages that it needs."""
        scheduled: list[Scheduled] = []
        preempted: list[Request] = []
        budget = self._continue_running(scheduled, preempted)
        if budget and self.waiting and not preempted:
            self.admit(scheduled, budget)
        return StepPlan(tuple(scheduled), tuple(preempted), self.take_rejected())

    def _continue_running(self, scheduled: list[Scheduled], preempted: list[Request]) -> int:
        """Give every running request its tokens while the budget lasts; what is left of the budget."""
        budget = self.config.max_batched_tokens
        page_size, pool, running = self.config.page_size, self.pool, self.running
        position = 0
        while position < len(running) and budget:
            request = running[position]
            total = request.prompt_tokens + request.output_tokens
            query = total - request.computed_tokens
            if query > budget:
                query = budget
            kv = request.computed_tokens + query
            pages = request.pages
            missing = -(-kv // page_size) - len(pages)
            if missing > 0:
                if not self._make_room(request, missing, preempted):
                    break
                pages += pool.allocate(missing)
            scheduled.append(Scheduled(request, query, kv, kv == total))
            budget -= query
            position += 1
        return budget

    def _make_room(self, request: Request, missing: int, preempted: list[Request]) -> bool:
        """Preempt from the end of the running ones until `missing` pages are free; False: the request went itself."""
        while self.pool.free < missing:
            victim = self.running.pop()
            self.preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def preempt(self, victim: Request) -> None:
        """Put a request that was just taken out of the running ones back in front of the waiting ones."""
        self._release(victim)
        victim.recompute_until = max(victim.recompute_until, victim.computed_tokens)
        victim.computed_tokens = 0
        victim.preemptions += 1
        victim.status = RequestStatus.WAITING
        self.waiting.appendleft(victim)
        self.counters.preemptions += 1

    def admit(self, scheduled: list[Scheduled], budget: int) -> int:
        """Start waiting requests in order until one does not fit: nobody overtakes. Cached pages of that one, or 0."""
        waiting, running, pool = self.waiting, self.running, self.pool
        page_size = self.config.page_size
        while waiting and budget and len(running) < self.config.max_seqs:
            request = waiting[0]
            total = request.total_tokens
            hits: Sequence[int] = ()
            evictable = 0
            if self.config.prefix_caching:
                # The last token is always computed: its logits are the answer.
                hits, evictable = pool.match(request, (total - 1) // page_size)
            cached = len(hits) * page_size
            query = total - cached
            if query > budget:
                if not self.config.chunked_prefill and total <= self.config.max_batched_tokens:
                    return len(hits)
                # Without chunking only a resumed request that outgrew the budget comes here: it could never run else.
                query = budget
            kv = cached + query
            missing = -(-kv // page_size) - len(hits)
            # An idle engine ignores the reserve: a request larger than the rest would wait for ever.
            reserve = self._reserve if running else 0
            if missing + evictable + reserve > pool.free:
                return len(hits)
            waiting.popleft()
            pool.admit(request, hits, missing)
            self._start(request, cached, len(hits), total)
            scheduled.append(Scheduled(request, query, kv, kv == total))
            budget -= query
        return 0

    def _start(self, request: Request, cached: int, cached_pages: int, total: int) -> None:
        request.status = RequestStatus.RUNNING
        request.computed_tokens = cached
        request.cached_pages = cached_pages
        if request.preemptions:
            request.rehit_tokens += cached
            self.counters.rehit_tokens += cached
        else:
            request.hit_tokens = cached
            self.counters.admitted += 1
            self.counters.hit_tokens += cached
            self.counters.looked_up_tokens += total
        self.running.append(request)

    def commit(self, plan: StepPlan) -> tuple[Request, ...]:
        """Account for a step that happened; the requests that it finished. Their pages are free at once.

        Where tokens are real, the content must know the sampled ones before this call: pages that they complete are
        published in later steps, once their KV is computed.
        """
        finished: list[Request] = []
        computed = 0
        for request, query, kv, samples in plan.scheduled:
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            computed += query
            request.computed_tokens = kv
            self.account(request, kv - query)
            if samples:
                request.output_tokens += 1
                if request.output_tokens >= request.max_output_tokens:
                    request.status = RequestStatus.FINISHED
                    finished.append(request)
        if finished:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
            for request in finished:
                self._release(request)
        counters = self.counters
        counters.steps += 1
        counters.computed_tokens += computed
        counters.finished += len(finished)
        return tuple(finished)

    def account(self, request: Request, before: int) -> None:
        """What it means that a request has more computed tokens than `before`: recomputed ones, and full pages."""
        computed = request.computed_tokens
        if before < request.recompute_until:
            again = min(computed, request.recompute_until) - before
            request.recomputed_tokens += again
            self.counters.recomputed_tokens += again
        full = computed // self.config.page_size
        if full > request.cached_pages:
            if self.config.prefix_caching:
                self.pool.publish(request, request.cached_pages, full)
            request.cached_pages = full

    def end(self, request: Request) -> None:
        """Let go of a running request that has all its tokens; `commit` does it by itself."""
        request.status = RequestStatus.FINISHED
        self.running.remove(request)
        self._release(request)
        self.counters.finished += 1

    def take_rejected(self) -> tuple[Request, ...]:
        """Requests that can never fit, each listed once: here, or in a plan."""
        rejected, self._rejected = tuple(self._rejected), []
        return rejected

    def _release(self, request: Request) -> None:
        self.pool.drop(request)
        request.cached_pages = 0
