"""The pages of the KV pool: who holds them, what they contain, and which one goes next.

Owns page ids, reference counts, the prefix cache and its eviction order. It knows no tokens and no tensors: a page's
content is a key that identifies the whole prefix, and a proof that is compared on a hit.

A page is in exactly one of three states: *in use* (one or more requests hold it), *evictable* (held by nobody, but a
prefix that matches can still use it) or *blank* (holds nothing that anybody could use). Blank pages are given out
first, then evictable ones, the least recently used first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple, Protocol

from kbench.engine.core import Request
from kbench.errors import MeasurementError

_FIRST_PROBE = 16
_NO_KEY = object()
"""What an unpublished page is filed under: None is a key like any other."""


class Match(NamedTuple):
    """Leading pages of a request that are cached; `evictable` of them are held by nobody at the moment."""

    pages: Sequence[int]
    evictable: int


class Pool(Protocol):
    """What the scheduler asks of a pool. Its pages are in one of three states; together they are all `pages`."""

    pages: int
    evictions: int
    evictable: int

    @property
    def blank(self) -> int: ...

    @property
    def free(self) -> int:
        """Pages that can be given out now: blank and evictable ones."""
        ...

    @property
    def in_use(self) -> int: ...

    def allocate(self, count: int) -> Sequence[int]:
        """`count` pages that nobody holds, held once from now on. Evicts where blank pages run out."""
        ...

    def match(self, request: Request, limit: int) -> Match:
        """The longest run of cached pages at the start of the request, at most `limit`; takes none of them."""
        ...

    def admit(self, request: Request, hits: Sequence[int], missing: int) -> None:
        """Give a request that holds nothing the pages of its `match`, and `missing` more."""
        ...

    def publish(self, request: Request, start: int, stop: int) -> None:
        """Make pages `start` to `stop` - 1 of the request known."""
        ...

    def drop(self, request: Request) -> None:
        """The request holds nothing any more. The last pages of its prefix become the first to be evicted."""
        ...


class BlockPool:
    """Page ids 1..pages; 0 is the null page and never given out. Needs no clock and gives the same ids every time.

    A long trace takes and returns millions of pages, most of them in runs, so whatever can be said about a run at once
    is left to C: sets for membership (never iterated: their order is no order), a deque for the eviction order.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.evictions = 0
        self.refused_hits = 0
        self.evictable = 0
        self._blank = list(range(pages, 0, -1))
        self._held: set[int] = set()
        self._more_holders: dict[int, int] = {}  # holders beyond the first
        # Pages in the order in which their last holder went. One that is held again stays where it is, and its entry
        # is counted as stale: the oldest entries of a page are its stale ones.
        self._lru: deque[int] = deque()
        self._stale: dict[int, int] = {}
        self._key_of: list[Hashable] = [_NO_KEY] * (pages + 1)
        self._page_of: dict[Hashable, int] = {}
        self._proofs: dict[int, object] = {}

    @property
    def blank(self) -> int:
        return len(self._blank)

    @property
    def free(self) -> int:
        """Pages that can be given out now: blank and evictable ones."""
        return len(self._blank) + self.evictable

    @property
    def in_use(self) -> int:
        return len(self._held)

    def holders(self, page: int) -> int:
        """How many requests hold the page."""
        return self._more_holders.get(page, 0) + (page in self._held)

    def allocate(self, count: int) -> list[int]:
        """`count` pages that nobody holds, held once from now on. Evicts where blank pages run out."""
        blank = self._blank
        if count > len(blank) + self.evictable:
            raise MeasurementError(f"{count} pages asked for, {self.free} of {self.pages} are free")
        taken = min(count, len(blank))
        pages = blank[len(blank) - taken :]
        pages.reverse()
        del blank[len(blank) - taken :]
        if taken < count:
            pages += self._evict(count - taken)
        self._held.update(pages)
        return pages

    def _evict(self, count: int) -> list[int]:
        oldest = self._lru.popleft
        pages = [oldest() for _ in range(count)]
        if self._stale and not self._stale.keys().isdisjoint(pages):
            pages = self._skip_stale(pages, count)
        _each(self._page_of.__delitem__, [self._key_of[page] for page in pages])
        _each(self._key_of.__setitem__, pages, repeat(_NO_KEY))
        if self._proofs:
            _each(self._proofs.pop, pages, repeat(None))
        self.evictable -= count
        self.evictions += count
        return pages

    def _skip_stale(self, candidates: list[int], count: int) -> list[int]:
        """The first `count` real entries, from `candidates` and then from what follows them."""
        stale, pages = self._stale, list[int]()
        ahead = deque(candidates)
        while len(pages) < count:
            page = ahead.popleft() if ahead else self._lru.popleft()
            left = stale.get(page, 0)
            if left == 0:
                pages.append(page)
            elif left == 1:
                del stale[page]
            else:
                stale[page] = left - 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page. The last pages of a prefix become the first to be evicted."""
        if not self._held.issuperset(pages):
            wrong = next(page for page in pages if page not in self._held)
            raise MeasurementError(f"page {wrong} is released more often than it was taken")
        if self._more_holders and not self._more_holders.keys().isdisjoint(pages):
            pages = self._without_shared(pages)
        self._held.difference_update(pages)
        key_of = self._key_of
        known = [page for page in reversed(pages) if key_of[page] is not _NO_KEY]
        self._lru.extend(known)
        self.evictable += len(known)
        if len(known) < len(pages):
            self._blank += [page for page in reversed(pages) if key_of[page] is _NO_KEY]

    def _without_shared(self, pages: Sequence[int]) -> list[int]:
        """One holder less for the pages that have several; the others, whose last holder goes."""
        more, lead = self._more_holders, 0
        while lead < len(pages) and pages[lead] in more:
            lead += 1
        shared, alone = list(pages[:lead]), list(pages[lead:])
        if not more.keys().isdisjoint(alone):  # rare: what is shared is a prefix, unless somebody brought it twice
            shared += [page for page in alone if page in more]
            alone = [page for page in alone if page not in more]
        for page in shared:
            if more[page] == 1:
                del more[page]
            else:
                more[page] -= 1
        return alone

    def admit(self, request: Request, hits: Sequence[int], missing: int) -> None:
        """Give a request that holds nothing the pages of its `match`, and `missing` more."""
        self.touch(hits)
        request.pages = [*hits, *self.allocate(missing)]

    def drop(self, request: Request) -> None:
        """The request holds nothing any more."""
        self.release(request.pages)
        request.pages = []

    def touch(self, pages: Sequence[int]) -> None:
        """One holder more for each cached page."""
        held, more, stale = self._held, self._more_holders, self._stale
        for page in pages:
            if page in held:
                more[page] = more.get(page, 0) + 1
            else:
                held.add(page)
                stale[page] = stale.get(page, 0) + 1
                self.evictable -= 1

    def match(self, request: Request, limit: int) -> Match:
        """The longest run of cached pages at the start of the request, at most `limit`; takes none of them.

        A key that is found with an unequal proof ends the run and is counted: two contents share a key.
        """
        content, pages, width = request.content, list[int](), _FIRST_PROBE
        while len(pages) < limit:
            start = len(pages)
            stop = min(start + width, limit)
            width *= 4
            found = list(map(self._page_of.get, content.page_keys(start, stop), repeat(0)))
            if 0 in found:
                del found[found.index(0) :]
            pages += found if request.exact_keys else self._proven(request, start, found)
            if len(pages) < stop:
                break
        return Match(pages, len(pages) - len(self._held.intersection(pages)))

    def _proven(self, request: Request, start: int, found: list[int]) -> list[int]:
        for index, page in enumerate(found):
            if self._proofs.get(page) != request.content.page_proof(start + index):
                self.refused_hits += 1
                return found[:index]
        return found

    def publish(self, request: Request, start: int, stop: int) -> None:
        """Make pages `start` to `stop` - 1 of the request known. Where the same prefix is known, the older page stays.

        The caller's page keeps no key then, so that it turns blank when its last holder goes.
        """
        pages, content = request.pages[start:stop], request.content
        keys = content.page_keys(start, stop)
        page_of, key_of = self._page_of, self._key_of
        if request.exact_keys and page_of.keys().isdisjoint(keys):
            page_of.update(zip(keys, pages, strict=True))
            _each(key_of.__setitem__, pages, keys)
            return
        for index, page, key in zip(range(start, stop), pages, keys, strict=True):
            if key not in page_of:
                page_of[key] = page
                key_of[page] = key
                if not request.exact_keys:
                    self._proofs[page] = content.page_proof(index)


def _each(call: Callable[..., object], *arguments: Iterable[object]) -> None:
    """Call for the effect, once an item, without a loop in Python."""
    deque(map(call, *arguments), maxlen=0)
