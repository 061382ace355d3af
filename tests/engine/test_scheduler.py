"""The scheduler: what must always hold, and the cases in which schedulers go wrong."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.engine.core import EngineConfig, Request, RequestStatus, StepPlan
from kbench.engine.scheduler import Scheduler

from .scheduling import drive, request


def config(page_size: int = 4, pages: int = 16, budget: int = 16, seqs: int = 4, **more: object) -> EngineConfig:
    return EngineConfig(page_size, pages, budget, seqs, **more)  # type: ignore[arg-type]


def shapes(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(item.request.request_id, item.query_tokens, item.kv_tokens) for item in plan.scheduled]


def workload(seed: int, count: int, page_size: int) -> list[Request]:
    """Prompts that share prefixes of all lengths."""
    draw = random.Random(seed)
    stems = [[draw.randrange(9) for _ in range(40)] for _ in range(3)]
    found = []
    for number in range(count):
        stem = draw.choice(stems)[: draw.randrange(0, 40)]
        prompt = stem + [1_000 + number * 100 + step for step in range(draw.randrange(1, 12))]
        found.append(request(number, prompt, draw.randrange(1, 12), page_size))
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 3, 4, 16]),
    pages=st.integers(4, 40),
    budget=st.integers(1, 80),
    seqs=st.integers(1, 6),
    per_step=st.integers(1, 5),
    caching=st.booleans(),
    chunked=st.booleans(),
    watermark=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_every_request_ends_and_no_page_is_lost(
    seed: int,
    page_size: int,
    pages: int,
    budget: int,
    seqs: int,
    per_step: int,
    caching: bool,
    chunked: bool,
    watermark: float,
) -> None:
    engine = EngineConfig(page_size, pages, budget, seqs, caching, chunked, watermark)
    requests = workload(seed, 14, page_size)
    plans = drive(engine, requests, per_step)
    for each in requests:
        fits = each.prompt_tokens + each.max_output_tokens - 1 <= pages * page_size
        if fits and (chunked or each.prompt_tokens <= budget):
            assert each.status is RequestStatus.FINISHED
            assert each.output_tokens == each.max_output_tokens
        else:
            assert each.status is RequestStatus.REJECTED
        assert each.hit_tokens <= max(0, each.prompt_tokens - 1)
        assert caching or each.hit_tokens == 0
        assert each.preemptions or each.recomputed_tokens == 0
    computed = sum(plan.query_tokens for plan in plans)
    finished = [each for each in requests if each.status is RequestStatus.FINISHED]
    once = sum(each.prompt_tokens + each.max_output_tokens - 1 - each.hit_tokens for each in finished)
    # Nothing is computed but what was never computed and what a preemption lost.
    assert computed == once + sum(each.recomputed_tokens for each in finished)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_input_gives_the_same_plans(seed: int) -> None:
    def once() -> list[object]:
        plans = drive(config(pages=20), workload(seed, 20, 4), 2)
        return [(shapes(plan), [each.pages for each in plan.preempted], len(plan.rejected)) for plan in plans]

    assert once() == once()


def test_decodes_come_before_prompts_and_a_prompt_is_cut_to_the_budget() -> None:
    scheduler = Scheduler(config(budget=8, pages=32))
    one, two = request(1, range(6), 5, 4), request(2, range(100, 115), 1, 4)
    scheduler.add(one)
    scheduler.commit(scheduler.schedule())
    scheduler.add(two)
    plan = scheduler.schedule()
    assert shapes(plan) == [(1, 1, 7), (2, 7, 7)]
    assert [item.samples for item in plan.scheduled] == [True, False]
    scheduler.commit(plan)
    assert shapes(scheduler.schedule()) == [(1, 1, 8), (2, 7, 14)]


def test_without_chunks_a_prompt_waits_for_a_step_of_its_own() -> None:
    scheduler = Scheduler(config(budget=8, pages=32, chunked_prefill=False))
    for number, length in ((1, 5), (2, 5), (3, 9)):
        scheduler.add(request(number, range(number * 100, number * 100 + length), 2, 4))
    plan = scheduler.schedule()
    assert shapes(plan) == [(1, 5, 5)]
    assert [each.request_id for each in plan.rejected] == [3]
    scheduler.commit(plan)
    assert shapes(scheduler.schedule()) == [(1, 1, 6), (2, 5, 5)]


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    one, two = request(1, range(8), 1, 4), request(2, range(8), 1, 4)
    plans = drive(config(), [one, two])
    assert shapes(plans[1]) == [(2, 4, 8)]  # a whole page of 4 again: the hit is capped at 7 tokens, that is one page
    assert (one.hit_tokens, two.hit_tokens) == (0, 4)
    three, four = request(3, range(8), 1, 1), request(4, range(8), 1, 1)
    assert shapes(drive(config(page_size=1), [three, four])[1]) == [(4, 1, 8)]


def test_a_partial_page_is_no_hit_and_hits_depend_on_the_page_size() -> None:
    hits = {}
    for page_size in (1, 4, 8, 16):
        requests = [request(number, [*range(14), 50 + number], 1, page_size) for number in range(2)]
        drive(config(page_size=page_size, pages=40), requests)
        hits[page_size] = requests[1].hit_tokens
    assert hits == {1: 14, 4: 12, 8: 8, 16: 0}


def test_generated_tokens_can_be_hit_by_the_next_turn() -> None:
    first = request(1, range(6), 6, 4)
    said = first.content.tokens  # type: ignore[attr-defined]
    second = request(2, [*said, 77, 78], 1, 4)
    scheduler = Scheduler(config())
    scheduler.add(first)
    while scheduler.has_work:
        scheduler.commit(scheduler.schedule())
    scheduler.add(second)
    scheduler.schedule()
    assert second.hit_tokens == 8  # 11 tokens of the first were computed, two full pages


def test_two_requests_with_the_same_new_prefix_in_one_step_share_nothing() -> None:
    one, two = request(1, range(9), 2, 4), request(2, range(9), 2, 4)
    scheduler = Scheduler(config(budget=32))
    scheduler.add(one)
    scheduler.add(two)
    plan = scheduler.schedule()
    assert shapes(plan) == [(1, 9, 9), (2, 9, 9)]
    assert (one.hit_tokens, two.hit_tokens) == (0, 0)
    assert not set(one.pages) & set(two.pages)
    scheduler.commit(plan)
    scheduler.commit(scheduler.schedule())
    assert not scheduler.has_work
    assert scheduler.pool.evictable == 2  # known once


def preempting() -> tuple[Scheduler, Request, Request, list[StepPlan]]:
    """Two requests of 8 + 8 tokens in 6 pages of 4: the second must give way."""
    one, two = request(1, range(8), 8, 4), request(2, range(100, 108), 8, 4)
    scheduler = Scheduler(config(pages=6, budget=32))
    scheduler.add(one)
    scheduler.add(two)
    plans = []
    while scheduler.has_work:
        plans.append(scheduler.schedule())
        scheduler.commit(plans[-1])
    return scheduler, one, two, plans


def test_the_last_admitted_is_preempted_and_recomputing_is_no_hit() -> None:
    scheduler, one, two, plans = preempting()
    assert (one.preemptions, two.preemptions) == (0, 1)
    (step,) = [index for index, plan in enumerate(plans) if plan.preempted]
    assert shapes(plans[step]) == [(1, 1, 13)]  # nobody is admitted in a step that preempted
    assert two.hit_tokens == 0
    resumed = next(plan for plan in plans[step + 1 :] if any(each.request is two for each in plan.scheduled))
    (again,) = [item for item in resumed.scheduled if item.request is two]
    lost = 12
    found_again = again.kv_tokens - again.query_tokens
    assert two.recomputed_tokens == lost - found_again
    assert two.rehit_tokens == found_again
    counters = scheduler.counters
    assert (counters.preemptions, counters.recomputed_tokens, counters.hit_tokens) == (1, two.recomputed_tokens, 0)
    assert two.output_tokens == 8


def test_preempted_requests_keep_their_order() -> None:
    requests = [request(number, range(number * 100, number * 100 + 4), 20, 4) for number in range(4)]
    scheduler = Scheduler(config(pages=8, budget=64))
    for each in requests:
        scheduler.add(each)
    while scheduler.has_work:
        plan = scheduler.schedule()
        queue = [each.request_id for each in scheduler.running] + [each.request_id for each in scheduler.waiting]
        assert queue == sorted(queue)
        scheduler.commit(plan)


def test_what_can_never_fit_is_rejected_at_once_and_blocks_nobody() -> None:
    giant, small = request(1, range(60), 6, 4), request(2, range(5), 1, 4)
    plans = drive(config(pages=16), [giant, small], 2)
    assert giant.status is RequestStatus.REJECTED
    assert plans[0].rejected == (giant,)
    assert len(plans) == 1
    exactly = request(3, range(60), 5, 4)  # 64 tokens: the last one generated is never computed
    drive(config(pages=16), [exactly])
    assert exactly.status is RequestStatus.FINISHED


def test_a_plan_of_rejections_only_is_work() -> None:
    scheduler = Scheduler(config(pages=1))
    scheduler.add(request(1, range(60), 6, 4))
    assert scheduler.has_work
    plan = scheduler.schedule()
    assert (plan.scheduled, len(plan.rejected)) == ((), 1)
    scheduler.commit(plan)
    assert not scheduler.has_work


def test_the_watermark_holds_back_admission_but_not_an_idle_engine() -> None:
    big, small = request(1, range(36), 4, 4), request(2, range(100, 120), 4, 4)
    scheduler = Scheduler(config(pages=16, budget=64, watermark=0.25))
    scheduler.add(big)
    scheduler.add(small)
    assert shapes(scheduler.schedule()) == [(1, 36, 36)]  # 9 of 16 pages; 5 more would leave 2, not 4
    alone = Scheduler(config(pages=16, budget=64, watermark=0.5))
    alone.add(request(3, range(50), 2, 4))
    assert shapes(alone.schedule()) == [(3, 50, 50)]


def test_evictable_hits_are_not_counted_as_free_as_well() -> None:
    """A request whose hits are the free pages must not be admitted on them twice."""
    holder, cached = request(1, range(500, 508), 8, 4), request(2, range(8), 1, 4)
    scheduler = Scheduler(config(pages=5, budget=64))
    scheduler.add(cached)
    scheduler.commit(scheduler.schedule())
    scheduler.add(holder)
    scheduler.commit(scheduler.schedule())
    scheduler.commit(scheduler.schedule())
    assert scheduler.pool.free == 2
    scheduler.add(request(3, [*range(8), *range(700, 704)], 1, 4))
    plan = scheduler.schedule()
    assert [item.request.request_id for item in plan.scheduled] == [1]


def test_an_aborted_request_gives_everything_back() -> None:
    one, two = request(1, range(9), 9, 4), request(2, range(100, 109), 9, 4)
    scheduler = Scheduler(config(seqs=1))
    scheduler.add(one)
    scheduler.add(two)
    plan = scheduler.schedule()
    scheduler.abort(two)
    scheduler.abort(one)
    scheduler.abort(one)
    assert scheduler.commit(plan) == ()
    assert not scheduler.has_work
    assert scheduler.pool.in_use == 0
    assert scheduler.counters.aborted == 2
    assert {one.status, two.status} == {RequestStatus.ABORTED}
