"""How much of the prompts a prefix cache saves: without an end, and by the size of an LRU cache, exactly.

A page is reused when an earlier request, in file order, had it in its prompt or its (forced) output; reuse stops before
the prompt's last token, which an engine must compute to answer. One request after another: no batching, and no request
that still runs when the next one comes. A request's last pages are the first of its own to go, as engines do it, so
that what remains of it is a prefix.

With that order LRU is a stack algorithm (Mattson et al. 1970): a page is a hit in every cache that holds as many pages
as were touched, each counted once, since its own last touch. A page is never touched without those before it, so the
pages of a request that were last touched by the same earlier request lie side by side in the stack. One such *run*
needs one count, and there are a few of them a request, however long the prompts are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kbench.traces.columns import Int64s
from kbench.traces.content import PAGE_BITS, Owners, check_page_size, owners
from kbench.traces.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """Full pages whose last token belongs to another owner than the request itself: `low` to below `high`."""

    request: Int64s
    owner: Int64s
    low: Int64s
    high: Int64s

    def pages(self) -> tuple[Int64s, Int64s, Int64s]:
        """Request, page number and key of every page, requests in order, pages in order."""
        count = self.high - self.low
        page = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count - self.low, count)
        return np.repeat(self.request, count), page, np.repeat(self.owner << PAGE_BITS, count) | page

    def where(self, chosen: np.typing.NDArray[np.bool_]) -> _Ranges:
        return _Ranges(self.request[chosen], self.owner[chosen], self.low[chosen], self.high[chosen])


def _foreign(trace: Trace, page_size: int, who: Owners) -> _Ranges:
    request = np.repeat(np.arange(len(trace)), np.diff(who.offsets))
    ends = np.append(who.starts[1:], 0)
    ends[who.offsets[1:] - 1] = trace.input_tokens + trace.output_tokens
    found = _Ranges(request, who.owners, who.starts // page_size, ends // page_size)
    return found.where((found.owner != request) & (found.high > found.low))


def _reusable_pages(trace: Trace, page_size: int) -> Int64s:
    """Full pages of each prompt that end before its last token."""
    return (trace.input_tokens - 1) // page_size


def infinite_cache_hit_ratio(trace: Trace, page_size: int, *, who: Owners | None = None) -> float:
    """Token hit ratio when nothing is ever evicted: the ceiling for this page size."""
    check_page_size(trace, page_size)
    foreign = _foreign(trace, page_size, owners(trace) if who is None else who)
    usable = _reusable_pages(trace, page_size)
    # What another request owns was there before, in that request; of streams and blocks the first touch is a miss.
    requests = foreign.where(foreign.owner < len(trace))
    hits = int(np.maximum(np.minimum(requests.high, usable[requests.request]) - requests.low, 0).sum())
    request, page, key = foreign.where(foreign.owner >= len(trace)).pages()
    seen = np.ones(key.size, np.bool_)
    seen[np.unique(key, return_index=True)[1]] = False
    hits += int(np.count_nonzero(seen & (page < usable[request])))
    return hits * page_size / int(trace.input_tokens.sum())


@dataclass(frozen=True, slots=True, eq=False)
class StackDistances:
    """Of every page that a prompt could reuse, how large an LRU cache must be to still hold it.

    Page `j` of run `i` needs `nearest[i] + j` pages, for `j` below `pages[i]`.
    """

    nearest: Int64s
    pages: Int64s
    page_size: int
    footprint_pages: int  # different pages in the whole trace
    prompt_tokens: int

    def miss_ratio(self, cache_pages: int) -> float:
        """Token miss ratio of a cache of so many pages."""
        hits = int(np.clip(cache_pages - self.nearest + 1, 0, self.pages).sum())
        return 1.0 - hits * self.page_size / self.prompt_tokens

    def pages_for(self, share: float) -> int:
        """The smallest cache, in pages, that has `share` of all hits that any cache could have."""
        wanted = share * int(self.pages.sum())
        low, high = 0, self.footprint_pages
        while low < high:
            middle = (low + high) // 2
            if int(np.clip(middle - self.nearest + 1, 0, self.pages).sum()) >= wanted:
                high = middle
            else:
                low = middle + 1
        return low


def stack_distances(trace: Trace, page_size: int, *, who: Owners | None = None) -> StackDistances:
    """Stack distances of all reuse in the trace; n log n in the number of runs."""
    check_page_size(trace, page_size)
    foreign = _foreign(trace, page_size, owners(trace) if who is None else who)
    all_pages = (trace.input_tokens + trace.output_tokens) // page_size
    request, page, previous, distinct = _touched_again(foreign, len(trace))
    unowned = int((foreign.high - foreign.low).sum())
    opens = np.ones(page.size, np.bool_)
    opens[1:] = (request[1:] != request[:-1]) | (previous[1:] != previous[:-1])
    first = np.flatnonzero(opens)
    length = np.diff(np.append(first, page.size))
    run_request, run_previous, run_page = request[first], previous[first], page[first]
    before = np.concatenate(([0], np.cumsum(all_pages)))
    twice = _counted_twice(run_request, run_previous, length, len(trace))
    nearest = 1 + run_page + before[run_request] - before[run_previous + 1] - twice
    usable = np.clip(_reusable_pages(trace, page_size)[run_request] - run_page, 0, length)
    return StackDistances(
        nearest=nearest,
        pages=usable,
        page_size=page_size,
        footprint_pages=int(all_pages.sum()) - unowned + distinct,
        prompt_tokens=int(trace.input_tokens.sum()),
    )


def _touched_again(foreign: _Ranges, requests: int) -> tuple[Int64s, Int64s, Int64s, int]:
    """Pages that an earlier request touched: the request, the page, the last request before; in order of both.

    And how many different pages of streams and blocks there are.
    """
    request, page, key = foreign.pages()
    owned = np.unique(key[key < requests << PAGE_BITS])  # each was touched first by the request that owns it
    distinct = np.unique(key).size - owned.size
    request = np.concatenate([owned >> PAGE_BITS, request])
    page = np.concatenate([owned & ((1 << PAGE_BITS) - 1), page])
    key = np.concatenate([owned, key])
    order = np.argsort(key, kind="stable")  # requests stay in order: the owner comes before those that inherit from it
    again = np.flatnonzero(key[order][1:] == key[order][:-1])
    touch, last = order[again + 1], request[order[again]]
    back = np.argsort(touch)  # touches lie in the order of request and page
    return request[touch[back]], page[touch[back]], last[back], distinct


def _counted_twice(request: Int64s, previous: Int64s, length: Int64s, requests: int) -> Int64s:
    """For each run, the pages that later requests, before this one, touched again after this run's last touch.

    They are the runs of earlier requests whose own last touch was no earlier: a weighted count over a Fenwick tree,
    runs entered in the order of their requests.
    """
    tree = [0] * (requests + 1)
    found = [0] * request.size
    waiting: list[tuple[int, int]] = []
    now = -1
    for run, (at, last, pages) in enumerate(zip(request.tolist(), previous.tolist(), length.tolist(), strict=True)):
        if at != now:
            for place, weight in waiting:
                while place <= requests:
                    tree[place] += weight
                    place += place & -place
            waiting, now = [], at
        place = requests - last  # from the back: the sum is over last touches at or after `last`
        waiting.append((place, pages))
        total = 0
        while place > 0:
            total += tree[place]
            place -= place & -place
        found[run] = total
    return np.array(found, np.int64)
