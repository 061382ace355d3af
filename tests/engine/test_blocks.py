"""The block pool: states of a page, eviction order, sharing, and hits that must be refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.engine.blocks import BlockPool
from kbench.engine.core import ExactContent, Request
from kbench.errors import MeasurementError

from .scheduling import Tokens, request


def exact(number: int, keys: list[Hashable]) -> Request:
    return Request(number, len(keys), 1, ExactContent(lambda: keys))


def states(pool: BlockPool) -> tuple[int, int, int]:
    return pool.in_use, pool.evictable, pool.blank


def test_pages_go_from_blank_to_used_to_evictable() -> None:
    pool = BlockPool(4)
    one = exact(1, ["a", "b", "c"])
    one.pages = pool.allocate(3)
    assert sorted(one.pages) == [1, 2, 3]
    pool.publish(one, 0, 2)
    assert states(pool) == (3, 0, 1)
    pool.release(one.pages)
    assert states(pool) == (0, 2, 2)  # the third was never published
    assert pool.match(exact(2, ["a", "b", "c"]), 3).pages == one.pages[:2]


def test_blank_pages_go_first_then_the_end_of_the_oldest_prefix() -> None:
    pool = BlockPool(5)
    old, young = exact(1, ["a", "b"]), exact(2, ["x", "y"])
    for each in (old, young):
        each.pages = pool.allocate(2)
        pool.publish(each, 0, 2)
        pool.release(each.pages)
    assert pool.allocate(1) == [5]
    assert pool.allocate(1) == [old.pages[1]]
    assert pool.match(old, 2).pages == old.pages[:1]
    assert pool.evictions == 1


def test_a_hit_makes_a_prefix_young_and_safe() -> None:
    pool = BlockPool(4)
    old, young = exact(1, ["a", "b"]), exact(2, ["x", "y"])
    for each in (old, young):
        each.pages = pool.allocate(2)
        pool.publish(each, 0, 2)
        pool.release(each.pages)
    match = pool.match(old, 2)
    assert match.evictable == 2
    pool.touch(match.pages)
    assert states(pool) == (2, 2, 0)
    assert sorted(pool.allocate(2)) == sorted(young.pages)
    with pytest.raises(MeasurementError, match="0 of 4 are free"):
        pool.allocate(1)


def test_a_match_ends_at_the_first_unknown_page() -> None:
    pool = BlockPool(100)
    long = exact(1, list(range(80)))
    long.pages = pool.allocate(80)
    pool.publish(long, 0, 40)
    pool.publish(long, 41, 80)
    assert pool.match(exact(2, list(range(80))), 80).pages == long.pages[:40]
    assert pool.match(exact(2, list(range(80))), 7).pages == long.pages[:7]
    assert pool.match(exact(3, ["other", *range(1, 80)]), 80).pages == []


def test_the_same_prefix_brought_twice_keeps_the_older_page() -> None:
    pool = BlockPool(4)
    one, two = exact(1, ["a"]), exact(2, ["a"])
    for each in (one, two):
        each.pages = pool.allocate(1)
    for each in (one, two):
        pool.publish(each, 0, 1)
    pool.release(two.pages)
    assert states(pool) == (1, 0, 3)
    assert pool.match(two, 1).pages == one.pages


def test_an_equal_key_with_other_tokens_is_no_hit() -> None:
    class Colliding(Tokens):
        def page_key(self, index: int) -> Hashable:
            return index

        def page_proof(self, index: int) -> object:
            return super().page_key(index)

    pool = BlockPool(4)
    one = Request(1, 4, 1, Colliding([1, 2, 3, 4], [9], 2))
    one.pages = pool.allocate(2)
    pool.publish(one, 0, 2)
    assert len(pool.match(Request(2, 4, 1, Colliding([1, 2, 3, 4], [9], 2)), 2).pages) == 2
    assert len(pool.match(Request(3, 4, 1, Colliding([1, 2, 3, 5], [9], 2)), 2).pages) == 1
    assert pool.refused_hits == 1


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(MeasurementError, match="more often"):
        pool.release(pages)


def test_none_is_a_key_like_any_other() -> None:
    pool = BlockPool(1)
    one = exact(1, [None])
    one.pages = pool.allocate(1)
    pool.publish(one, 0, 1)
    pool.release(one.pages)
    assert pool.match(one, 1).pages == [1]
    assert pool.allocate(1) == [1]
    assert pool.match(one, 1).pages == []


class Model:
    """What the pool should do, told with the plainest means: pages by content, in one ordered list."""

    def __init__(self, pages: int) -> None:
        self.blank = pages
        self.cached: OrderedDict[Hashable, None] = OrderedDict()

    def run(self, keys: list[Hashable]) -> int:
        """One request that takes its pages, publishes and ends; how many it hit."""
        hits = 0
        while hits < len(keys) and keys[hits] in self.cached:
            hits += 1
        for key in keys[:hits]:
            del self.cached[key]
        missing = len(keys) - hits
        taken = min(self.blank, missing)
        self.blank -= taken
        for _ in range(missing - taken):
            self.cached.popitem(last=False)
        new = [key for key in keys[hits:] if key not in self.cached]
        self.blank += missing - len(new)
        for key in reversed(keys):
            if key in new or key in keys[:hits]:
                self.cached[key] = None
        return hits


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30), st.integers(6, 12))
def test_the_pool_is_an_lru_cache_of_prefixes(prompts: list[list[int]], pages: int) -> None:
    pool, model = BlockPool(pages), Model(pages)
    for number, prompt in enumerate(prompts):
        each = request(number, prompt, 1, 1)
        match = pool.match(each, len(prompt))
        pool.touch(match.pages)
        each.pages = match.pages + pool.allocate(len(prompt) - len(match.pages))
        pool.publish(each, len(match.pages), len(prompt))
        pool.release(each.pages)
        assert len(match.pages) == model.run([tuple(prompt[: end + 1]) for end in range(len(prompt))])
        assert states(pool) == (0, len(model.cached), model.blank)
