"""A scheduler in fast motion: what running requests do by themselves is kept as sums, not as requests.

A request that decodes does the same in every step: one token more, a page more every `page_size` steps, and an end that
is known when it begins. So a step that only decodes costs a few additions, however many requests decode, and any number
of such steps can be taken at once (`decoding`), and so can full chunks of one prompt beside them. Admissions, the last
chunk of a prompt and preemptions are taken one step at a time, but still without a look at those that decode.

`Scheduler` alone, step by step, is what this must agree with to the last page, eviction and hit
(`tests/targets/test_stepping.py`). It needs a `NumberPool`, knows no clock and costs nothing.
"""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import NamedTuple

from kbench.engine.core import NumberedContent, Request, RequestStatus, Scheduled, StepPlan
from kbench.engine.decoding import Decoding
from kbench.engine.number_pool import NumberPool
from kbench.engine.scheduler import Scheduler

_LONGEST = 4_096
"""Steps taken at once, so that few are prepared in vain."""


class MixedStep(NamedTuple):
    """A step whose pages are taken. `decodes` sequences have `context` tokens after it; `slack` slots stay empty."""

    decodes: int
    context: int
    slack: int
    others: tuple[Scheduled, ...]
    preempted: int


class FastForward:
    """Owns the scheduler's requests between `enter` and `leave`: until then their counts of tokens are not up to date.

    Requests may be added to the scheduler at any time, and not aborted.
    """

    def __init__(self, scheduler: Scheduler, pool: NumberPool) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._config = scheduler.config
        self.decoding = Decoding(scheduler.config, pool)
        self._able = True
        self._prompt: Request | None = None
        """The one request whose prompt is not computed yet; the last one running."""
        self._blocked = False
        self._evicts_in_order = True
        self.enter()

    # ------------------------------------------------------------------------------- in and out

    def enter(self) -> None:
        """Take over the running requests."""
        running = list(self._scheduler.running)
        if running and not _decodes(running[-1]):
            self._prompt = running.pop()
        self._able = len(running) <= self._config.max_batched_tokens and all(map(_decodes, running))
        if self._able:
            for request in running:
                self.decoding.join(request)

    def leave(self) -> None:
        """Bring all requests up to date and let go of them."""
        self.decoding.clear()
        self._prompt = None
        self._blocked = False

    # ------------------------------------------------------------------------------- many steps

    def longest_run(self) -> int:
        """How many steps from now on only decode and have their pages; 0 where the next one may do anything else.

        The last of them may be somebody's last.
        """
        scheduler, config, decodes = self._scheduler, self._config, self.decoding.count
        if not decodes or not self._able or scheduler.rejecting:
            return 0
        budget = config.max_batched_tokens - decodes
        if self._prompt is not None and budget:
            return 0
        if scheduler.waiting and budget and len(scheduler.running) < config.max_seqs and not self._blocked:
            return 0
        end = self.decoding.next_end()
        steps = _LONGEST if end is None else min(end - self.decoding.steps, _LONGEST)
        pool = self._pool
        blocked_in_vain = self._blocked and not self._evicts_in_order
        # What is evicted might matter to what is published, or to the first one waiting: look at each such step.
        room = pool.blank if self.decoding.shared or blocked_in_vain else pool.free
        if decodes * -(-steps // config.page_size) > room:
            needed = accumulate(self.decoding.takes(steps))
            steps = next((step for step, pages in enumerate(needed) if pages > room), steps)
        if steps == 0 and blocked_in_vain:
            self._blocked = False
        elif steps == 0 and self.decoding.missing <= pool.free:
            return 1
        return steps

    def advance(self, taken: array[int]) -> list[Request]:
        """Take as many steps as `taken` has, pages included; the requests that the last one finished."""
        steps = len(taken)
        self.decoding.take(sum(taken))
        counters = self._scheduler.counters
        counters.steps += steps
        counters.computed_tokens += steps * self.decoding.count
        return self._gain(steps)

    # ------------------------------------------------------------------------------- many chunks

    def longest_chunks(self) -> int:
        """How many steps compute one full chunk of one prompt each beside what decodes; 0 where that is not sure.

        A full chunk uses up the budget, so nobody is admitted whoever waits, and the prompt is not done after any.
        """
        prompt, pool, page_size = self._prompt, self._pool, self._config.page_size
        if prompt is None or not self._able or self.decoding.shared or self._scheduler.rejecting:
            return 0
        budget = self.chunk
        if budget < 2:
            return 0
        steps = min((prompt.total_tokens - prompt.computed_tokens - 1) // budget, _LONGEST)
        end = self.decoding.next_end()
        if end is not None:
            steps = min(steps, end - self.decoding.steps)
        if steps < 2:
            return 0
        if pool.free < self.decoding.count * -(-steps // page_size) + -(-steps * budget // page_size):
            needed = accumulate(self.takes_with_chunks(steps))
            steps = next((step for step, pages in enumerate(needed) if pages > pool.free), steps)
        # A page that is known already might be evicted before the prompt gets there, or not.
        known = self._config.prefix_caching and pool.knows_any(prompt, prompt.cached_pages)
        return 0 if known else steps

    @property
    def chunk(self) -> int:
        """Tokens of a full chunk."""
        return self._config.max_batched_tokens - self.decoding.count

    @property
    def computed(self) -> int:
        """Tokens of the prompt, as far as it is computed."""
        return 0 if self._prompt is None else self._prompt.computed_tokens

    def takes_with_chunks(self, steps: int) -> array[int]:
        """Pages that each of the next `steps` steps takes if it computes a full chunk."""
        page_size, chunk, computed = self._config.page_size, self.chunk, self.computed
        taken = self.decoding.takes(steps)
        held = -(-computed // page_size)
        for step in range(steps):
            computed += chunk
            needed = -(-computed // page_size)
            taken[step] += needed - held
            held = needed
        return taken

    def advance_chunks(self, taken: array[int]) -> list[Request]:
        """`advance`, with a full chunk in every step."""
        prompt, page_size = self._prompt, self._config.page_size
        assert prompt is not None  # `longest_chunks` said so
        before = prompt.computed_tokens
        prompt.computed_tokens = after = before + len(taken) * self.chunk
        more = -(-after // page_size) - len(prompt.pages)
        prompt.pages += bytes(more)
        self._scheduler.account(prompt, before)
        self._scheduler.counters.computed_tokens += after - before
        self.decoding.slack -= more * page_size  # those pages are the prompt's
        return self.advance(taken)

    def _gain(self, steps: int) -> list[Request]:
        """Tokens of those that decode, and the ends of those that are done."""
        finished = self.decoding.gain(steps)
        for request in finished:
            self._scheduler.end(request)
        if finished:
            self._blocked = False
        return finished

    # ------------------------------------------------------------------------------- one step

    def plan(self) -> MixedStep | None:
        """The next step, whatever it is, with its pages taken; None where only the scheduler can tell."""
        if not self._able:
            return None
        scheduler, config = self._scheduler, self._config
        preempted = self._take_pages()
        others: list[Scheduled] = []
        budget = config.max_batched_tokens - self.decoding.count
        prompt = self._prompt
        if prompt is not None and budget:
            chunk = self._next_chunk(prompt, budget)
            missing = -(-chunk.kv_tokens // config.page_size) - len(prompt.pages)
            if missing > self._pool.free:
                self._preempt(prompt)
                preempted += 1
            else:
                prompt.pages += self._pool.allocate(missing)
                others.append(chunk)
                budget -= chunk.query_tokens
        if budget and scheduler.waiting and not preempted and not self._blocked:
            hits = scheduler.admit(others, budget)
            self._blocked = not others and self._stays_out(scheduler.waiting[0], hits)
        slack = self.decoding.slack - self.decoding.count
        for other in others:
            slack += -other.kv_tokens % config.page_size
        return MixedStep(
            self.decoding.count, self.decoding.context + self.decoding.count, slack, tuple(others), preempted
        )

    def _take_pages(self) -> int:
        """Pages for those that decode. Where they run out, the last ones running give way; how many did.

        Pages go to those that decode in their order, so the ones taken before somebody gives way stay where they are.
        """
        decoding, pool, preempted, taken = self.decoding, self._pool, 0, 0
        while (missing := decoding.missing - taken) > pool.free:
            taken += pool.free
            decoding.take(pool.free)
            self._preempt(self._scheduler.running[-1])
            preempted += 1
        decoding.take(missing)
        return preempted

    def _preempt(self, victim: Request) -> None:
        if victim is self._prompt:
            self._prompt = None
        else:
            self.decoding.part(victim)
        self._blocked = False
        self._scheduler.preempt(self._scheduler.running.pop())

    @staticmethod
    def _next_chunk(prompt: Request, budget: int) -> Scheduled:
        query = min(prompt.total_tokens - prompt.computed_tokens, budget)
        kv = prompt.computed_tokens + query
        return Scheduled(prompt, query, kv, kv == prompt.total_tokens)

    def _stays_out(self, head: Request, hits: int) -> bool:
        """Whether the first one waiting, which has no room but `hits` cached pages, gets none before somebody ends.

        Steps that decode only take pages, so there are fewer and fewer. It could need fewer too: where somebody
        brings a page that it looks for, or where evictions take the front of what it found and keep the rest.
        """
        if len(self._scheduler.running) >= self._config.max_seqs:
            return False
        self._evicts_in_order = True
        if self._config.prefix_caching:
            for request in self.decoding.shared:
                place = request.cached_pages
                if _number(request, place) == _number(head, place):
                    return False
            self._evicts_in_order = self._pool.evicts_from_the_end(head, hits)
        return True

    def commit(self, step: MixedStep) -> list[Request]:
        """Account for a step that happened; the requests that it finished."""
        scheduler = self._scheduler
        finished = self._gain(1)
        scheduler.counters.computed_tokens += step.decodes
        if not step.others:
            scheduler.counters.steps += 1
            return finished
        finished += scheduler.commit(StepPlan(step.others))
        for request, _, _, samples in step.others:
            if not samples:
                self._prompt = request
                continue
            if request is self._prompt:
                self._prompt = None
            if request.status is RequestStatus.RUNNING:
                self.decoding.join(request)
            else:
                self._blocked = False
        return finished


def _decodes(request: Request) -> bool:
    return request.output_tokens > 0 and request.total_tokens - request.computed_tokens == 1


def _number(request: Request, page: int) -> int | None:
    content = request.content
    if isinstance(content, NumberedContent) and page < len(content.numbers):
        return int(content.numbers[page])
    return None
