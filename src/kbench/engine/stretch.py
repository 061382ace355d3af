"""Runs of steps in which every request only decodes, taken in one go: the same pages, counts and order as stepping.

Most steps of a replay are of this kind: nobody comes, nobody goes, each running request computes one token. Then only
pages that fill up need a look, not every request in every step. Owns this short cut and nothing else; `Scheduler` is
what it must agree with, to the last page id (`tests/targets/test_virtual.py` compares the two).
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from typing import NamedTuple

from kbench.engine.scheduler import Scheduler


class DecodeStep(NamedTuple):
    """One step of a stretch: its decodes, the sum of their KV lengths after it, and the empty slots of last pages."""

    seqs: int
    context_tokens: int
    slack: int


def decode_steps(scheduler: Scheduler) -> Generator[DecodeStep, None, None]:
    """Take steps one by one for as long as they only decode; none where the next step does anything else.

    Each yielded step has happened. The caller may stop after any of them, and must close the iterator before it uses
    the scheduler again: requests are brought up to date then. The step that finishes a request, that needs a
    preemption or that could admit somebody is left to `schedule` and `commit`.
    """
    steps = _steps_before_an_end(scheduler)
    if steps == 0:
        return
    running, pool, page_size = scheduler.running, scheduler.pool, scheduler.config.page_size
    caching, count = scheduler.config.prefix_caching, len(running)
    context = sum(request.computed_tokens for request in running)
    slack = sum(len(request.pages) for request in running) * page_size - context
    # (step, position) of the next page of each request: taken in that step, once the one before is full.
    turns = [(len(request.pages) * page_size - request.computed_tokens, place) for place, request in enumerate(running)]
    fills = [(step - 1, place) for step, place in turns if step]
    heapq.heapify(turns)
    heapq.heapify(fills)
    done = 0
    try:
        while done < steps:
            if turns[0][0] == done:
                takers = [place for step, place in _pop(turns, done)]
                if pool.free < len(takers):
                    break
                for place, page in zip(takers, pool.allocate(len(takers)), strict=True):
                    running[place].pages.append(page)
                    heapq.heappush(turns, (done + page_size, place))
                    heapq.heappush(fills, (done + page_size - 1, place))
                slack += page_size * len(takers)
            context += count
            slack -= count
            if fills and fills[0][0] == done:
                for _, place in _pop(fills, done):
                    request = running[place]
                    full = request.cached_pages + 1
                    if caching:
                        pool.publish(request, full - 1, full)
                    request.cached_pages = full
            done += 1
            yield DecodeStep(count, context, slack)
    finally:
        for request in running:
            request.computed_tokens += done
            request.output_tokens += done
        scheduler.counters.steps += done
        scheduler.counters.computed_tokens += done * count


def _steps_before_an_end(scheduler: Scheduler) -> int:
    """How many steps can only decode, as far as queues and lengths tell; 0 where the next one does something else."""
    running, config = scheduler.running, scheduler.config
    count = len(running)
    nobody_comes = not scheduler.waiting or count >= min(config.max_seqs, config.max_batched_tokens)
    if not running or scheduler.rejecting or not nobody_comes or count > config.max_batched_tokens:
        return 0
    least = running[0].max_output_tokens
    for request in running:
        output = request.output_tokens
        if output == 0 or request.prompt_tokens + output - request.computed_tokens != 1:
            return 0
        left = request.max_output_tokens - output
        if left < least:
            least = left
    return least - 1


def _pop(heap: list[tuple[int, int]], step: int) -> list[tuple[int, int]]:
    """All entries of this step, in order of position."""
    found = []
    while heap and heap[0][0] == step:
        found.append(heapq.heappop(heap))
    return found
