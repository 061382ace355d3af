"""What every target of a workload shares: when requests are due, what became of each, and what the steps were.

Owns the results of a replay, the dependency of a request on its parents, and the reuse that a trace allows. It knows
no engine, no torch, and takes the time from its caller, in nanoseconds since the replay's start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kbench.errors import UsageError
from kbench.traces.columns import Int64s
from kbench.traces.content import PAGE_BITS, Owners, owners
from kbench.traces.trace import Trace

RequestStatus = Literal["finished", "rejected", "unfinished", "failed", "cancelled", "not_sent"]
Mode = Literal["virtual", "exec", "http"]

STEP_COLUMNS = (
    "start_us",
    "duration_us",
    "decode_seqs",
    "decode_context_tokens",
    "prefill_tokens",
    "prefill_seqs",
    "prefill_work",
    "prefill_context_tokens",
    "preempted",
    "waiting",
    "in_use_pages",
    "evictable_pages",
    "blank_pages",
    "used_tokens",
)
"""Pages are counted during the step; `used_tokens` are what pages in use hold, `waiting` is who did not get in."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of one request. Times are microseconds since the replay's start, 0.0 where it never came to that."""

    request_id: int
    session_id: int
    turn: int
    status: RequestStatus
    scheduled_us: float
    """When the trace wants it sent; a request whose parents did not finish has no such time."""
    started_us: float
    """When a step with it first began."""
    first_token_us: float
    finished_us: float
    """When its last token came, or it was rejected."""
    input_tokens: int
    output_tokens: int
    """Tokens generated."""
    hit_tokens: int | None
    """Prompt tokens found in the cache at first admission; None where a server does not say."""
    planned_hit_tokens: int
    """Prompt tokens that a cache without limit would have found."""
    recomputed_tokens: int | None
    preemptions: int | None
    output: tuple[int, ...] = ()
    """Token ids, where tokens are real."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A replayed trace: requests in file order, and steps in columns (`STEP_COLUMNS`)."""

    mode: Mode
    requests: tuple[RequestResult, ...]
    steps: Mapping[str, Sequence[float]]
    page_size: int
    pages: int
    extrapolated_fraction: float = 0.0
    """Share of modelled step time outside the measured cost grid; 0.0 where steps were real."""
    counters: dict[str, float] = field(default_factory=dict)
    dispatch_lag_us: list[float] = field(default_factory=list)
    """How much later than scheduled each request was handed to the engine, where the clock is real."""


class Arrivals:
    """When each request is due: roots by their arrival, children after the last parent's end and their think time.

    `rate_scale` 2 makes roots (and a child's own recorded arrival, which it does not precede) come twice as fast;
    think times stay. `all_at_once` makes a backlog: every root is due at time 0, and nobody thinks. A request with a
    parent that did not finish is never due.
    """

    def __init__(self, trace: Trace, rate_scale: float = 1.0, *, all_at_once: bool = False) -> None:
        if not (rate_scale > 0 and math.isfinite(rate_scale)):
            raise UsageError(f"a rate scale of {rate_scale}", remedy="use a number above 0")
        self._think_ns = [0 if all_at_once else 1_000 * int(value) for value in trace.think_us.values]
        scale = math.inf if all_at_once else rate_scale
        self._own_ns = [round(1_000 * int(value) / scale) for value in trace.arrival_us.values]
        self._open: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}
        self._heap: list[tuple[int, int]] = []
        for request in range(len(trace)):
            parents = set(trace.parents(request))
            if parents:
                self._open[request] = len(parents)
                for parent in parents:
                    self._children.setdefault(parent, []).append(request)
            else:
                self._heap.append((self._own_ns[request], request))
        heapq.heapify(self._heap)

    @property
    def next_ns(self) -> int | None:
        """When the next request is due; None: nothing is due unless something finishes."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ns: int) -> list[tuple[int, int]]:
        """`(scheduled_ns, request)` of all requests due by now, in order; each is handed out once."""
        found = []
        while self._heap and self._heap[0][0] <= now_ns:
            found.append(heapq.heappop(self._heap))
        return found

    def finished(self, request: int, now_ns: int) -> None:
        """A request ended well: its children may become due."""
        for child in self._children.get(request, ()):
            self._open[child] -= 1
            if self._open[child] == 0:
                when = max(now_ns + self._think_ns[child], self._own_ns[child])
                heapq.heappush(self._heap, (when, child))


def planned_hits(trace: Trace, page_size: int, *, who: Owners | None = None) -> list[int]:
    """Prompt tokens of each request that an earlier request in file order brought in, in full pages.

    What a cache without limit would find if every earlier request had ended. The last prompt token never counts: it
    is computed for its logits. An owner's tokens are always taken from their beginning, so the furthest page known of
    each owner says which are known.
    """
    ranges = owners(trace) if who is None else who
    request = np.repeat(np.arange(len(trace)), np.diff(ranges.offsets))
    ends = np.append(ranges.starts[1:], 0)
    ends[ranges.offsets[1:] - 1] = trace.input_tokens + trace.output_tokens - 1  # the last token is never computed
    ends //= page_size
    # Only ranges with the last token of a page in them decide about pages.
    kept = ends > ranges.starts // page_size
    request, owner, end = request[kept], ranges.owners[kept], ends[kept]
    known = _largest_before(owner, end)
    reach = np.minimum(np.minimum(end, known), ((trace.input_tokens - 1) // page_size)[request])
    missed = (reach < end).astype(np.int64)
    before = np.cumsum(missed) - missed
    first = np.searchsorted(request, request)  # the first range of the same request
    hitting = before == before[first]
    hits = np.zeros(len(trace), np.int64)
    np.maximum.at(hits, request[hitting], reach[hitting])
    found: list[int] = (hits * page_size).tolist()
    return found


def _largest_before(owner: Int64s, end: Int64s) -> Int64s:
    """For each entry the largest `end` among earlier entries of its owner, 0 where there is none."""
    order = np.argsort(owner, kind="stable")
    group = np.cumsum(np.diff(owner[order], prepend=-1) != 0)
    # Owners in turn, each in a range of its own: the running maximum never looks back past the first of an owner.
    lifted = np.maximum.accumulate((group << PAGE_BITS + 1) + end[order])
    before = np.append(0, lifted[:-1]) - (group << PAGE_BITS + 1)
    largest = np.empty_like(end)
    largest[order] = np.maximum(before, 0)
    return largest
