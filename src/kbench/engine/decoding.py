"""Those that decode, as sums: how many, how much they hold, which step needs pages, and who is done when.

Every step gives each of them a token, so what one has gained since it joined is a difference of step numbers: nothing
is written to a request until it leaves. Owns these sums and knows no prompts and no queues.
"""

from __future__ import annotations

import heapq
from array import array

from kbench.engine.core import EngineConfig, NumberedContent, Request
from kbench.engine.number_pool import NumberPool

_NOBODY = (0, 0)


class Decoding:
    """Requests in the order in which they joined, which is that of the running ones."""

    def __init__(self, config: EngineConfig, pool: NumberPool) -> None:
        self._page_size = config.page_size
        self._caching = config.prefix_caching
        self._pool = pool
        self.count = 0
        self.context = 0
        """Tokens in their KV caches."""
        self.slack = 0
        """Empty slots in their last pages."""
        self.steps = 0
        """Steps taken; what a request has gained is counted from the one after which it joined."""
        self.shared: dict[Request, int] = {}
        """Those with pages that another may ask for or bring while they run, and their rank."""
        self._joined: dict[Request, tuple[int, int]] = {}  # the step that they count from, and their rank
        self._takers = array("q", [0]) * self._page_size  # by the step, modulo page size, that needs a page
        self._ends: list[tuple[int, int, Request]] = []
        self._rank = 0

    def join(self, request: Request) -> None:
        """From the next step on, the request decodes."""
        computed, step = request.computed_tokens, self.steps
        self._rank += 1
        self._joined[request] = (step, self._rank)
        self._takers[(step - computed) % self._page_size] += 1
        left = request.max_output_tokens - request.output_tokens
        heapq.heappush(self._ends, (step + left, self._rank, request))
        self.count += 1
        self.context += computed
        self.slack += -computed % self._page_size
        if self._caching:
            content = request.content
            own = isinstance(content, NumberedContent) and content.own_output
            # What it had published before a preemption may still be there.
            if not own or (request.preemptions and self._pool.knows_any(request, request.cached_pages)):
                self.shared[request] = self._rank

    def clear(self) -> None:
        """Bring all requests up to date and let go of them."""
        for request in list(self._joined):
            self.part(request)
        self._ends.clear()

    def takes(self, steps: int) -> array[int]:
        """Pages that each of the next `steps` steps takes for those that decode."""
        takers, page_size = self._takers, self._page_size
        start = self.steps % page_size
        if start + steps <= page_size:
            return takers[start : start + steps]
        rounds, rest = divmod(steps - (page_size - start), page_size)
        return takers[start:] + takers * rounds + takers[:rest]

    def take(self, pages: int) -> None:
        """Pages for those that decode, held from now on."""
        self._pool.take(pages)
        self.slack += pages * self._page_size

    @property
    def missing(self) -> int:
        """Pages that the next step takes."""
        return self._takers[self.steps % self._page_size]

    def gain(self, steps: int) -> list[Request]:
        """A token for each in every step. Those that the last step finished part, and are up to date."""
        self.steps += steps
        self.context += steps * self.count
        self.slack -= steps * self.count
        if self.shared:
            self._publish_shared()
        finished: list[Request] = []
        while self.next_end() == self.steps:
            request = heapq.heappop(self._ends)[2]
            self.part(request)
            finished.append(request)
        return finished

    def next_end(self) -> int | None:
        """The step after which the next request is done. Entries of those that were preempted are thrown away."""
        ends = self._ends
        while ends:
            step, rank, request = ends[0]
            if self._joined.get(request, _NOBODY)[1] == rank:
                return step
            heapq.heappop(ends)
        return None

    def part(self, request: Request) -> None:
        """The request does not decode any more; its counts are up to date."""
        since, _ = self._joined.pop(request)
        gained = self.steps - since
        request.computed_tokens = computed = request.computed_tokens + gained
        request.output_tokens += gained
        page_size = self._page_size
        pages = request.pages
        pages += bytes(-(-computed // page_size) - len(pages))
        request.cached_pages = computed // page_size
        self.shared.pop(request, None)
        self.count -= 1
        self.context -= computed
        self.slack -= -computed % page_size
        self._takers[(self.steps - computed) % page_size] -= 1

    def _publish_shared(self) -> None:
        """Publish what filled up, in the order in which it did."""
        page_size, filled = self._page_size, []
        for request, rank in self.shared.items():
            ahead = request.computed_tokens - self._joined[request][0]
            full = (ahead + self.steps) // page_size
            filled += [
                ((page + 1) * page_size - ahead, rank, page, request) for page in range(request.cached_pages, full)
            ]
        for _, _, page, request in sorted(filled, key=lambda each: each[:3]):
            self._pool.publish(request, page, page + 1)
            request.cached_pages = page + 1
