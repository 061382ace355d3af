"""The KV pool of replays in virtual time: the same pages, hits and evictions as `blocks`, kept by number in arrays.

A virtual step reads no page, so it does not matter *which* page holds a prefix, only that one does. This pool has no
page ids: it knows of each key (a whole number, `NumberedContent`) whether a page with it is cached, how many requests
hold that page, and when it goes. Whatever concerns the pages of one request is one operation on an array; a long
prompt has thousands of them.

Evictions are owed until somebody looks: which keys went matters to the next `match` or `publish` only. `blocks` is what
it must agree with (`tests/engine/test_number_pool.py` compares the two).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kbench.engine.blocks import Match
from kbench.engine.core import NumberedContent, Request
from kbench.errors import MeasurementError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HELD = -1
"""State of a key whose page one request holds; every further holder is one less. From 0 on: its place in the queue.

A place before the head of the queue is that of an evicted page: its key is unknown, and nothing has to be written for
that. Read as a number without sign, states from the head on are those of cached pages, held or not.
"""
_PROBE = 64
_LAST_PLACE = 2**30


class NumberPool:
    """`pages` pages, and keys from 0 to `numbers` - 1. A request's `pages` are as many null pages as it holds."""

    def __init__(self, pages: int, numbers: int, *, caching: bool = True) -> None:
        self.pages = pages
        self.evictions = 0
        self.evictable = 0
        self._blank = pages
        self._caching = caching
        self._state: NDArray[np.int32] = np.zeros(numbers, np.int32)
        # Keys in the order in which their last holder went. The entry of a key that was held since then is stale: the
        # key's state is not its place.
        self._queue: NDArray[np.int64] = np.empty(4 * pages + 1_024, np.int64)
        self._first = 1  # the place of entry 0; a new key's state is before all of them
        self._places = self._places_from(1)
        self._head = 0
        self._tail = 0
        self._owed = 0
        self._nameless: dict[Request, list[int]] = {}  # pages whose key another page had when they were published

    @property
    def blank(self) -> int:
        return self._blank

    @property
    def free(self) -> int:
        """Pages that can be given out now: blank and evictable ones."""
        return self._blank + self.evictable

    @property
    def in_use(self) -> int:
        return self.pages - self._blank - self.evictable

    def take(self, count: int) -> None:
        """`count` pages that nobody holds are in use from now on. Evicts where blank pages run out."""
        blank = self._blank - count
        if blank < 0:
            if self.evictable + blank < 0:
                raise MeasurementError(f"{count} pages asked for, {self.free} of {self.pages} are free")
            self.evictable += blank
            self.evictions -= blank
            self._owed -= blank
            blank = 0
        self._blank = blank

    def allocate(self, count: int) -> bytearray:
        """`take`, with the null page in place of each page's id."""
        self.take(count)
        return bytearray(count)

    def match(self, request: Request, limit: int) -> Match:
        """The longest run of cached pages at the start of the request, at most `limit`; takes none of them."""
        numbers = _numbers(request)[: max(limit, 0)]
        hits = self._hits(numbers)
        evictable = np.count_nonzero(hits >= 0)
        if evictable and self._owed:
            self._evict()
            hits = self._hits(numbers)
            evictable = np.count_nonzero(hits >= 0)
        return Match(bytearray(len(hits)), int(evictable))

    def _hits(self, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        """States of the leading keys that are cached."""
        states = self._state.take(numbers[:_PROBE])
        known = _leading(self._known(states))
        if known == _PROBE:
            states = self._state.take(numbers)
            known = _leading(self._known(states))
        return states[:known]

    def _known(self, states: NDArray[np.int32]) -> NDArray[np.bool_]:
        known: NDArray[np.bool_] = states.view(np.uint32) >= self._first + self._head
        return known

    def evicts_from_the_end(self, request: Request, hits: int) -> bool:
        """Whether, of the first `hits` pages of the request, evictions take the last evictable one first."""
        states = self._state.take(_numbers(request)[:hits])
        places = states[states >= 0]
        return not _any(places[1:] > places[:-1])

    def admit(self, request: Request, hits: Sequence[int], missing: int) -> None:
        """Give a request that holds nothing the pages of its `match`, and `missing` more."""
        if hits:
            numbers = _numbers(request)[: len(hits)]
            states = self._state.take(numbers)
            idle = states >= 0
            evictable = np.count_nonzero(idle)
            held = states - 1
            if evictable:
                held[idle] = _HELD
                self.evictable -= int(evictable)
            self._state[numbers] = held
        self.take(missing)
        request.pages = bytearray(len(hits) + missing)

    def knows_any(self, request: Request, start: int) -> bool:
        """Whether a page of the request from `start` on is cached."""
        if self._owed:
            self._evict()
        return _any(self._known(self._state.take(_numbers(request)[start:])))

    def publish(self, request: Request, start: int, stop: int) -> None:
        """Make pages `start` to `stop` - 1 of the request known. Where the same prefix is known, the older page stays.

        Pages that nobody else can ask for or bring while the request runs (`own_output`) need not be published: raising
        `cached_pages` is enough, and `drop` makes them known.
        """
        numbers = _numbers(request)[start:stop]
        known = self._known(self._state.take(numbers))
        if self._owed and _any(known):
            self._evict()
            known = self._known(self._state.take(numbers))
        if _any(known):
            self._state[numbers[~known]] = _HELD
            self._nameless.setdefault(request, []).extend((start + known.nonzero()[0]).tolist())
        else:
            self._state[numbers] = _HELD

    def drop(self, request: Request) -> None:
        """The request holds nothing any more. The last pages of its prefix become the first to be evicted."""
        held = len(request.pages)
        named = request.cached_pages if self._caching else 0
        if named:
            numbers = _numbers(request)[named - 1 :: -1].copy()
            nameless = self._nameless.pop(request, None)
            if nameless:
                numbers = np.delete(numbers, named - 1 - np.array(nameless))
                named = len(numbers)
            states = self._state.take(numbers)
            shared = states < _HELD
            if _any(shared):
                self._state[numbers[shared]] = states[shared] + 1
                numbers = numbers[~shared]
            self._queue_up(numbers)
        self._blank += held - named
        request.pages = bytearray()

    def _queue_up(self, numbers: NDArray[np.int64]) -> None:
        count = len(numbers)
        if self._tail + count > len(self._queue):
            self._evict()
            self._compact()
        tail = self._tail
        self._queue[tail : tail + count] = numbers
        self._state[numbers] = self._places[tail : tail + count]
        self._tail = tail + count
        self.evictable += count

    def _compact(self) -> None:
        """Leave stale entries out and begin at the front of the array, with later places than ever before."""
        entries = self._queue[self._head : self._tail]
        left = entries[self._state.take(entries) == self._places[self._head : self._tail]]
        self._first += len(self._queue)
        if self._first > _LAST_PLACE:
            self._state[self._state >= 0] = 0
            self._first = 1
        self._places = self._places_from(self._first)
        self._queue[: len(left)] = left
        self._state[left] = self._places[: len(left)]
        self._head, self._tail = 0, len(left)

    def _places_from(self, first: int) -> NDArray[np.int32]:
        return np.arange(first, first + len(self._queue), dtype=np.int32)

    def _evict(self) -> None:
        """Pay what is owed."""
        while self._owed:
            stop = min(self._head + self._owed, self._tail)
            entries = self._queue[self._head : stop]
            self._owed -= int(np.count_nonzero(self._state.take(entries) == self._places[self._head : stop]))
            self._head = stop


def _numbers(request: Request) -> NDArray[np.int64]:
    content: NumberedContent = request.content  # type: ignore[assignment]  # asked for millions of times
    return content.numbers


# Bytes are searched several times as fast as flags are reduced.


def _any(flags: NDArray[np.bool_]) -> bool:
    return b"\x01" in flags.tobytes()


def _leading(flags: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    first = flags.tobytes().find(b"\x00")
    return len(flags) if first < 0 else first
