"""What a timer is, and which one a device gets.

Owns the protocol and the choice. A timer is given a rotation of calls (one for each input set), readies itself once and
then reads windows; its `name` travels with every value as the clock. It does not know what the calls compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kbench.errors import UsageError

Call = Callable[[], object]


class Timer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def round_calls(self) -> int:
        """Calls that one round makes; a multiple of the rotation, so that every input set is in each round."""
        ...

    @property
    def flags(self) -> tuple[str, ...]:
        """What is to be known about the readings of the last window, e.g. `LAUNCH_BOUND`."""
        ...

    def prepare(self, calls: Sequence[Call]) -> None:
        """Warm up, capture, calibrate. Raises what the calls raise."""
        ...

    def round(self) -> None:
        """Make the calls of one round, the timed path, without reading a clock."""
        ...

    def window(self, min_calls: int, min_ms: float) -> list[float]:
        """Readings in µs a call that cover at least `min_calls` calls and at least `min_ms`."""
        ...

    def witnessed(self) -> float:
        """One round, timed while a profiler watches, in µs a call: the same calls by two clocks. No gate number."""
        ...


def make_timer(name: str, device: torch.device) -> Timer:
    """`wall` anywhere; `graph`, `event`, `profiler` on CUDA."""
    from kbench.clock.cuda import EventTimer, GraphTimer
    from kbench.clock.profiler import ProfilerTimer
    from kbench.clock.wall import WallTimer

    if name == "wall":
        return WallTimer(device)
    on_cuda: dict[str, Callable[[torch.device], Timer]] = {
        "graph": GraphTimer,
        "event": EventTimer,
        "profiler": ProfilerTimer,
    }
    if name in on_cuda and device.type == "cuda":
        return on_cuda[name](device)
    raise UsageError(f"no timer {name!r} on {device.type}", remedy="auto, wall; on CUDA also graph, event, profiler")


def prepared_timer(calls: Sequence[Call], device: torch.device, name: str = "auto", flush_bytes: int = 0) -> Timer:
    """A timer that is ready. `auto`: wall on the CPU; on CUDA graph if the calls can be captured, else event.

    With `flush_bytes` (the cache state `flush`) each call is timed alone after a flush: events on CUDA, else the wall.
    """
    if flush_bytes:
        from kbench.clock.flush import FlushTimer

        if name not in ("auto", "event" if device.type == "cuda" else "wall"):
            raise UsageError(f"the timer {name!r} cannot flush before each call", remedy="auto, or another cache state")
        flushing = FlushTimer(device, flush_bytes)
        flushing.prepare(calls)
        return flushing
    if name != "auto":
        timer = make_timer(name, device)
        timer.prepare(calls)
        return timer
    if device.type != "cuda":
        return prepared_timer(calls, device, "wall")
    try:
        return prepared_timer(calls, device, "graph")
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # torch reports every refused capture as one; what the calls themselves raise comes again
        from kbench.clock.cuda import leave_capture

        torch.cuda.synchronize(device)
        leave_capture(device)
        return prepared_timer(calls, device, "event")
