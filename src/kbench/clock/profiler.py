"""Kernel time by torch.profiler: a second witness for device timers, and who ran.

Owns the union of kernel intervals and the names. It makes the calls that it is given, in the cache state in which they
leave the device, and never runs while another timer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

BLOCKER = "spin_kernel"
"""What `torch.cuda._sleep` launches: timers hold the device with it. Nobody's work."""


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


def profile_kernels(run: Callable[[], float], calls: int, device: torch.device) -> KernelProfile | None:
    """Profile `run`, which makes `calls` calls and returns its own reading. None if the profiler saw no kernel.

    It is run twice, since the first run under a profiler is slower; the second one counts.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        torch.cuda.synchronize(device)
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        reading = run()
        torch.cuda.synchronize(device)
    events = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
    events = [event for event in events if not getattr(event, "is_user_annotation", False)]
    first = max((float(event.time_range.end) for event in events if BLOCKER in event.name), default=float("-inf"))
    spent: dict[str, float] = {}
    intervals = []
    for event in events:
        start, end = float(event.time_range.start), float(event.time_range.end)
        if start < first:
            continue
        intervals.append((start, end))
        spent[event.name] = spent.get(event.name, 0.0) + end - start
    if not intervals:
        return None
    span = max(end for _, end in intervals) - min(start for start, _ in intervals)
    names = tuple(sorted(spent, key=lambda name: -spent[name]))
    return KernelProfile(union_length(intervals) / calls, sum(spent.values()) / calls, span / calls, reading, names)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length covered by the intervals; what overlaps counts once."""
    covered, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered
