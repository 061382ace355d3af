"""What a device did in a stretch of time: exclusive time by event, and why it stood still.

Owns the sweep over streams that overlap, and the causes of gaps. It knows launches, streams and graphs; of classes it
knows only that a collective or a copy hides behind computation.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kbench.timeline.events import DeviceEvent, Span

QUEUED_GAP_US = 5.0
"""Between two kernels that were queued in time on one stream the device needs about 1 µs; more than this is unknown."""


@dataclass(frozen=True, slots=True)
class Work:
    """A device event with its class and the call that launched it (None where the trace has none)."""

    event: DeviceEvent
    work_class: str
    call: Span | None

    @property
    def in_graph(self) -> bool:
        return self.event.graph or (self.call is not None and "GraphLaunch" in self.call.name)


@dataclass(frozen=True, slots=True)
class Busy:
    """A stretch of time given to one event, though others may run beside it."""

    begin_us: float
    end_us: float
    work: Work


@dataclass(frozen=True, slots=True)
class Gap:
    begin_us: float
    end_us: float
    cause: str


def sweep(works: Sequence[Work]) -> list[Busy]:
    """Give every busy instant to one event: computation before copies before collectives, then the earlier one.

    Only what nothing else hides is left to a collective: its *exposed* time. `works` are sorted by begin.
    """
    found: list[Busy] = []
    active: list[tuple[int, float, int]] = []
    index, clock = 0, 0.0
    while index < len(works) or active:
        if not active:
            clock = max(clock, works[index].event.begin_us)
        while index < len(works) and works[index].event.begin_us <= clock:
            heapq.heappush(active, (_rank(works[index]), works[index].event.begin_us, index))
            index += 1
        while active and works[active[0][2]].event.end_us <= clock:
            heapq.heappop(active)
        if not active:
            continue
        top = works[active[0][2]]
        until = top.event.end_us
        if index < len(works):
            until = min(until, works[index].event.begin_us)
        if until > clock:
            found.append(Busy(clock, until, top))
        clock = until
    return found


def _rank(work: Work) -> int:
    if work.work_class == "collective":
        return 2
    return 1 if work.event.copy else 0


def find_gaps(works: Sequence[Work], waits: Sequence[Span]) -> list[Gap]:
    """Every stretch between two events in which nothing ran on any stream, with its cause."""
    wait_begins = [span.begin_us for span in waits]
    found = []
    last: Work | None = None
    for work in works:
        if last is not None and work.event.begin_us > last.event.end_us:
            cause = _cause(last, work, wait_begins)
            found.append(Gap(last.event.end_us, work.event.begin_us, cause))
        if last is None or work.event.end_us >= last.event.end_us:
            last = work
    return found


def _cause(before: Work, after: Work, wait_begins: list[float]) -> str:
    if after.in_graph and before.in_graph and after.event.correlation == before.event.correlation != 0:
        return "in_graph"
    if after.call is None:
        return "unknown"
    if after.call.end_us > before.event.end_us:
        return "host_wait"
    if "collective" in (before.work_class, after.work_class):
        return "collective_wait"
    earlier_us = before.call.begin_us if before.call is not None else float("-inf")
    waited = bisect_left(wait_begins, after.call.begin_us) > bisect_right(wait_begins, earlier_us)
    if waited or before.event.stream != after.event.stream or before.event.copy != after.event.copy:
        return "stream_dependency"
    return "stream_dependency" if after.event.begin_us - before.event.end_us <= QUEUED_GAP_US else "unknown"
