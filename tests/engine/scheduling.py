"""Content and a driver for scheduler tests: real keys over token lists, and a loop that checks what must hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from kbench.engine.core import EngineConfig, Request, RequestStatus, StepPlan
from kbench.engine.scheduler import Scheduler


class Tokens:
    """Content of known tokens; the key of a page is the whole prefix itself, so it cannot be wrong."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int], page_size: int) -> None:
        self.tokens = [*prompt, *output]
        self.page_size = page_size

    def page_key(self, index: int) -> Hashable:
        return tuple(self.tokens[: (index + 1) * self.page_size])

    def page_proof(self, index: int) -> object:
        return self.page_key(index)

    def page_keys(self, start: int, stop: int) -> list[Hashable]:
        return [self.page_key(index) for index in range(start, stop)]


def request(number: int, prompt: Sequence[int], output: int, page_size: int) -> Request:
    """Its output is its own: no two requests share generated tokens."""
    content = Tokens(prompt, [-1_000_000 * (number + 1) - step for step in range(output)], page_size)
    return Request(number, len(prompt), output, content)


def check(scheduler: Scheduler, plan: StepPlan, everyone: Iterable[Request]) -> None:
    """Invariants that hold between `schedule` and `commit`."""
    config, pool = scheduler.config, scheduler.pool
    assert pool.in_use + pool.evictable + pool.blank == config.pages
    held: dict[int, int] = {}
    for each in everyone:
        if each.status is not RequestStatus.RUNNING:
            assert each.pages == []
        for page in each.pages:
            held[page] = held.get(page, 0) + 1
            assert 1 <= page <= config.pages
    assert len(held) == pool.in_use
    assert all(pool.holders(page) == count for page, count in held.items())
    assert len(scheduler.running) <= config.max_seqs
    assert plan.query_tokens <= config.max_batched_tokens
    for item in plan.scheduled:
        each = item.request
        assert item.query_tokens >= 1
        assert item.kv_tokens == each.computed_tokens + item.query_tokens <= each.total_tokens
        assert item.samples == (item.kv_tokens == each.total_tokens)
        assert len(each.pages) * config.page_size >= item.kv_tokens
        assert len(set(each.pages)) == len(each.pages)


def drive(config: EngineConfig, requests: Sequence[Request], per_step: int = 1, limit: int = 20_000) -> list[StepPlan]:
    """Add `per_step` requests before each step until all have ended; every step is checked."""
    scheduler, plans, waiting = Scheduler(config), [], list(requests)
    while waiting or scheduler.has_work:
        assert len(plans) < limit, "livelock"
        for each in waiting[:per_step]:
            scheduler.add(each)
        waiting = waiting[per_step:]
        plan = scheduler.schedule()
        check(scheduler, plan, requests)
        assert plan.scheduled or plan.rejected or not scheduler.has_work
        before = {each.request_id: each.output_tokens for each in requests}
        finished = scheduler.commit(plan)
        assert all(each.output_tokens >= before[each.request_id] for each in requests)
        assert all(each.pages == [] and each.output_tokens == each.max_output_tokens for each in finished)
        plans.append(plan)
    assert scheduler.pool.in_use == 0
    return plans
