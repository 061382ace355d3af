"""The pool by numbers is the pool with page ids: the same counts and the same hits, whatever is done to the two."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.engine import number_pool
from kbench.engine.blocks import BlockPool, Pool
from kbench.engine.core import NumberedContent, Request
from kbench.engine.number_pool import NumberPool
from kbench.errors import MeasurementError


def request(number: int, keys: list[int]) -> Request:
    return Request(number, len(keys), 1, NumberedContent(lambda: np.array(keys, np.int64), own_output=False))


def tree(draw: random.Random, depth: int) -> tuple[list[list[int]], int]:
    """Prompts as paths of a tree: a key stands for everything before it too."""
    numbers: dict[tuple[int, ...], int] = {}
    paths = []
    for _ in range(12):
        path = [draw.randrange(2) for _ in range(draw.randrange(1, depth))]
        paths.append([numbers.setdefault(tuple(path[: end + 1]), len(numbers)) for end in range(len(path))])
    return paths, len(numbers)


class Driven:
    """One of the two pools, told what to do by a third."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.running: dict[int, Request] = {}

    def start(self, number: int, keys: list[int]) -> tuple[int, int]:
        each = request(number, keys)
        hits, evictable = self.pool.match(each, len(keys))
        missing = len(keys) - len(hits)
        if missing + evictable <= self.pool.free:
            self.pool.admit(each, hits, missing)
            each.cached_pages = len(hits)
            self.running[number] = each
        return len(hits), evictable

    def publish(self, number: int, share: float) -> None:
        each = self.running[number]
        stop = each.cached_pages + round(share * (len(each.pages) - each.cached_pages))
        if stop > each.cached_pages:
            self.pool.publish(each, each.cached_pages, stop)
            each.cached_pages = stop

    def end(self, number: int) -> None:
        self.pool.drop(self.running.pop(number))

    def state(self) -> tuple[int, ...]:
        pool = self.pool
        return pool.blank, pool.evictable, pool.in_use, pool.free, pool.evictions, *sorted(self.running)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 30), st.sampled_from([3, 8, 20]))
def test_it_is_the_pool_with_page_ids(seed: int, pages: int, depth: int) -> None:
    draw = random.Random(seed)
    paths, count = tree(draw, depth)
    both = Driven(BlockPool(pages)), Driven(NumberPool(pages, count))
    for number in range(150):
        running = sorted(both[0].running)
        doing = draw.choice(["start", "start", "publish", "publish", "end"])
        if doing == "start":
            keys = draw.choice(paths)
            assert both[0].start(number, keys) == both[1].start(number, keys)
        elif running:
            chosen, share = draw.choice(running), draw.choice([0.5, 1.0])
            for each in both:
                each.publish(chosen, share) if doing == "publish" else each.end(chosen)
        assert both[0].state() == both[1].state()
        assert sum(both[1].state()[:3]) == pages


@pytest.mark.parametrize("last_place", [0, number_pool._LAST_PLACE])
def test_a_full_queue_is_made_shorter_and_keeps_its_order(last_place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that is used again and again leaves stale entries; places begin anew where they would get too large."""
    monkeypatch.setattr(number_pool, "_LAST_PLACE", last_place)
    both = Driven(BlockPool(40)), Driven(NumberPool(40, 60))
    draw = random.Random(1)
    for number in range(3_000):
        first = draw.choice([0, 0, 0, 20, 40])
        keys = list(range(first, first + draw.randrange(1, 20)))
        assert both[0].start(number, keys) == both[1].start(number, keys)
        for each in both:
            each.publish(number, 1.0)
            each.end(number)
        assert both[0].state() == both[1].state()


def test_more_than_is_free_is_refused() -> None:
    pool = NumberPool(3, 1)
    pool.take(2)
    with pytest.raises(MeasurementError, match="1 of 3 are free"):
        pool.take(2)


def test_without_caching_no_page_is_kept() -> None:
    pool = NumberPool(4, 3, caching=False)
    each = request(1, [0, 1, 2])
    pool.admit(each, b"", 3)
    each.cached_pages = 3
    pool.drop(each)
    assert (pool.blank, pool.evictable) == (4, 0)
