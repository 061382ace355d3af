"""Kernel time by torch.profiler: a second witness for device timers, who ran, and a timer of its own.

Owns what a trace says of calls: the union of kernel intervals, each call's span, names and streams. It makes the calls
that it is given, in the cache state in which they leave the device, and never runs while another timer reads: a
profiler widens the gaps between the kernels of every process on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from statistics import fmean, median

import torch
from torch.cuda import _sleep, synchronize
from torch.profiler import ProfilerActivity, profile

from kbench.clock.timer import Call
from kbench.errors import MeasurementError

BLOCKER = "spin_kernel"
"""What `torch.cuda._sleep` launches: timers hold the device with it. Nobody's work."""
MAX_CALLS = 2_000
"""Calls in one trace: each is several events."""


@dataclass(frozen=True, slots=True)
class KernelProfile:
    busy_us: float
    """Union of the kernels' intervals, a call."""
    sum_us: float
    """Sum of the kernels' durations, a call: above `busy_us` where kernels overlap."""
    span_us: float
    """From the first kernel's start to the last one's end, a call: gaps between kernels included."""
    timer_us: float
    """What the timer read for the very same calls, a call."""
    names: tuple[str, ...]
    """Kernels that ran, each once, the one with most time first."""
    kernels: float = 1.0
    """Kernels of a call, copies and memsets counted."""
    streams: int = 1
    """Streams on which they ran: more than one is work beside what a single stream's events can see."""


@dataclass(frozen=True, slots=True)
class CallProfile:
    """The same kernels, divided over the calls that made them: every call makes equally many."""

    spans_us: tuple[float, ...]
    """Each call from the start of its first kernel to the end of its last: its inner gaps, not those between calls."""
    sums_us: tuple[float, ...]
    """Each call's kernel durations, added up."""
    gap_us: float
    """Mean gap between two kernels, within calls and between them."""
    period_us: float
    """From the first call's first kernel to the last call's last, over the calls: as a clock around them all reads."""
    kernels: int
    """Kernels of a call, copies and memsets counted."""
    names: tuple[str, ...]
    timer_us: float

    @property
    def span_us(self) -> float:
        return fmean(self.spans_us)

    @property
    def sum_us(self) -> float:
        return fmean(self.sums_us)


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing that the device did."""

    start_us: float
    end_us: float
    name: str
    stream: int = 0


def profile_kernels(run: Callable[[], float], calls: int, device: torch.device) -> KernelProfile | None:
    """Profile `run`, which makes `calls` calls and returns its own reading. None if the profiler saw no kernel.

    It is run twice, since the first run under a profiler is slower; the second one counts.
    """
    activities, reading = _trace(run, device)
    if not activities:
        return None
    intervals = [(activity.start_us, activity.end_us) for activity in activities]
    span = max(end for _, end in intervals) - min(start for start, _ in intervals)
    total = sum(end - start for start, end in intervals)
    streams = len({activity.stream for activity in activities})
    names = _names(activities)
    count = len(activities) / calls
    return KernelProfile(union_length(intervals) / calls, total / calls, span / calls, reading, names, count, streams)


def profile_calls(
    run: Callable[[], float], calls: int, device: torch.device, *, leading: int = 0
) -> CallProfile | None:
    """As `profile_kernels`, call by call. `leading`: kernels before each call that are not its own, e.g. a flush."""
    activities, reading = _trace(run, device)
    return divide(activities, calls, leading, reading) if activities else None


def divide(activities: Sequence[Activity], calls: int, leading: int, timer_us: float) -> CallProfile:
    """Activities of `calls` equal calls → each call's time. They must divide evenly, or who did what is unknown."""
    ordered = sorted(activities, key=lambda activity: activity.start_us)
    each, rest = divmod(len(ordered), calls)
    if rest or each <= leading:
        raise MeasurementError(
            f"{len(ordered)} kernels do not divide over {calls} calls with {leading} before each",
            remedy="profile calls that launch the same kernels each time",
        )
    groups = [ordered[index * each + leading : (index + 1) * each] for index in range(calls)]
    gaps = [max(0.0, later.start_us - earlier.end_us) for earlier, later in pairwise(ordered)]
    return CallProfile(
        spans_us=tuple(max(one.end_us for one in group) - group[0].start_us for group in groups),
        sums_us=tuple(sum(one.end_us - one.start_us for one in group) for group in groups),
        gap_us=fmean(gaps) if gaps else 0.0,
        period_us=(max(one.end_us for one in ordered) - ordered[0].start_us) / calls,
        kernels=each - leading,
        names=_names([one for group in groups for one in group]),
        timer_us=timer_us,
    )


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """What the profiler saw of the calls in somebody's run: medians, in µs a call."""

    sum_us: float
    span_us: float
    between_us: float
    """From one call's last kernel to the next one's first: idle, and wider than without a profiler."""


def watch_run(
    run: Callable[[], object], device: torch.device, names: Sequence[str], kernels: int, *, all_calls: bool
) -> WatchedRun | None:
    """Every call that `run` makes is `kernels` kernels with these names; others (flushes) are not its own.

    For code that warms up and counts as it likes, the later half of the calls. None where they cannot be told apart.
    """
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as traced:
        run()
        synchronize(device)
    activities = sorted(_activities(traced), key=lambda activity: activity.start_us)
    own = [activity for activity in activities if activity.name in names]
    calls, rest = divmod(len(own), kernels)
    if rest or not calls:
        return None
    groups = [own[index * kernels : (index + 1) * kernels] for index in range(0 if all_calls else calls // 2, calls)]
    ends = [max(one.end_us for one in group) for group in groups]
    between = [max(0.0, later[0].start_us - end) for end, later in zip(ends, groups[1:], strict=False)]
    return WatchedRun(
        median(sum(one.end_us - one.start_us for one in group) for group in groups),
        median(end - group[0].start_us for end, group in zip(ends, groups, strict=True)),
        median(between) if between else 0.0,
    )


class ProfilerTimer:
    """A reading is one call's span by CUPTI. For processes in which nothing else is timed."""

    name = "profiler"
    flags: tuple[str, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: Sequence[Call] = ()
        self._rotation: Iterator[Call] = cycle(())
        self._latest: tuple[float, ...] = ()

    @property
    def round_calls(self) -> int:
        return len(self._calls)

    def prepare(self, calls: Sequence[Call]) -> None:
        self._calls = tuple(calls)
        self._rotation = cycle(self._calls)
        for _ in range(2):
            self.round()
        self._latest = self._spans(min(MAX_CALLS, len(self._calls)))

    def round(self) -> None:
        for call in self._calls:
            call()
        synchronize(self._device)

    def window(self, min_calls: int, min_ms: float) -> list[float]:
        readings: list[float] = []
        while len(readings) < min_calls or sum(readings) < min_ms * 1_000:
            wanted = max(min_calls - len(readings), int(min_ms * 1_000 / max(0.5, fmean(self._latest))), 1)
            self._latest = self._spans(min(MAX_CALLS, wanted))
            readings += self._latest
        return readings

    def witnessed(self) -> float:
        """It is the witness."""
        return fmean(self._latest)

    def _spans(self, count: int) -> tuple[float, ...]:
        def run() -> float:
            for call in islice(self._rotation, count):
                call()
            return 0.0

        made = profile_calls(run, count, self._device)
        if made is None:
            raise MeasurementError("the profiler saw no kernel", remedy="use the timer graph or event")
        return made.spans_us


def _trace(run: Callable[[], float], device: torch.device) -> tuple[list[Activity], float]:
    """What the device did in the second of two runs, and what that run returned."""
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as traced:
        run()
        synchronize(device)
        _sleep(1)  # type: ignore[no-untyped-call]
        reading = run()
        synchronize(device)
    found = _activities(traced)
    first = max((activity.end_us for activity in found if BLOCKER in activity.name), default=float("-inf"))
    return [activity for activity in found if activity.start_us >= first], reading


def _activities(traced: profile) -> list[Activity]:
    recorded = traced.events()  # type: ignore[no-untyped-call]
    events = [event for event in recorded or () if event.device_type.name == "CUDA"]
    return [
        Activity(
            float(event.time_range.start),
            float(event.time_range.end),
            event.name,
            int(getattr(event, "device_resource_id", 0) or 0),
        )
        for event in events
        if not getattr(event, "is_user_annotation", False)
    ]


def _names(activities: Iterable[Activity]) -> tuple[str, ...]:
    spent: dict[str, float] = {}
    for activity in activities:
        spent[activity.name] = spent.get(activity.name, 0.0) + activity.end_us - activity.start_us
    return tuple(sorted(spent, key=lambda name: -spent[name]))


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length covered by the intervals; what overlaps counts once."""
    covered, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered
