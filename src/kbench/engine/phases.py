"""Exclusive, independently stamped phases of an engine step.

Owns the phase names and the clocks that stamp them. Every phase has its own begin and its own end; nothing is filled
up, so that the sum over the wall time (the closure) says how much of a step the phases explain. A phase entered inside
another one interrupts it: its time is its own only. It does not know what happens inside a phase.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

PHASES = (
    "schedule",
    "prepare",
    "metadata",
    "h2d",
    "convert",
    "kv_write",
    "attention",
    "forward",
    "sample",
    "logits_copy",
    "bookkeeping",
)

INSIDE_FORWARD = frozenset({"convert", "kv_write", "attention"})
"""Phases that interrupt the forward pass where kernels are launched one by one. A replayed step has none of them: its
forward phase is the replay."""


class Phases(Protocol):
    """What the engine asks of a clock: a context manager a phase, which may be entered several times a step."""

    def __call__(self, name: str) -> AbstractContextManager[object]: ...


class _Nothing:
    """A phase of the clean pass: costs two empty calls."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


class NullClock:
    """Stamps nothing: the clock of the clean pass, whose wall time is the gate number."""

    __slots__ = ("_nothing",)

    def __init__(self) -> None:
        self._nothing = _Nothing()

    def __call__(self, name: str) -> _Nothing:
        return self._nothing


class _Span:
    """One phase: the time between its own two stamps, less that of phases entered inside it."""

    __slots__ = ("_stack", "begin_ns", "entries", "total_ns")

    def __init__(self, stack: list[_Span]) -> None:
        self._stack = stack
        self.total_ns = 0
        self.entries = 0
        self.begin_ns = 0

    def __enter__(self) -> None:
        # The stamp comes first, and last on the way out: the clock's own cost falls into the phases, not between them.
        now = perf_counter_ns()
        stack = self._stack
        if stack:
            outer = stack[-1]
            outer.total_ns += now - outer.begin_ns
        stack.append(self)
        self.entries += 1
        self.begin_ns = now

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        stack = self._stack
        stack.pop()
        now = perf_counter_ns()
        self.total_ns += now - self.begin_ns
        if stack:
            stack[-1].begin_ns = now


class PhaseClock:
    """Host time of each phase of one step; `take` reads and clears it."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        stack: list[_Span] = []
        self._spans = {name: _Span(stack) for name in PHASES}

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return self._spans[name]

    def take(self) -> dict[str, int]:
        """Nanoseconds of the phases that were entered since the last `take`."""
        taken = {name: span.total_ns for name, span in self._spans.items() if span.entries}
        for span in self._spans.values():
            span.total_ns = 0
            span.entries = 0
        return taken


def _event() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _DeviceSpan:
    """One phase on a CUDA stream: an event at either end of every stretch of it, read after the step."""

    __slots__ = ("_stack", "begun", "pairs")

    def __init__(self, stack: list[_DeviceSpan]) -> None:
        self._stack = stack
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.begun: torch.cuda.Event | None = None

    def begin(self) -> None:
        self.begun = _event()
        self.begun.record()

    def end(self) -> None:
        end = _event()
        end.record()
        if self.begun is not None:
            self.pairs.append((self.begun, end))

    def __enter__(self) -> None:
        if self._stack:
            self._stack[-1].end()
        self._stack.append(self)
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
        self._stack.pop()
        if self._stack:
            self._stack[-1].begin()


class DevicePhaseClock:
    """Device time between the two ends of each phase, by CUDA events; launch gaps inside a phase count as its time."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        stack: list[_DeviceSpan] = []
        self._spans = {name: _DeviceSpan(stack) for name in PHASES}

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return self._spans[name]

    def take(self) -> dict[str, int]:
        """Nanoseconds of the phases that were entered since the last `take`; waits for the device."""
        import torch

        torch.cuda.synchronize()
        taken = {}
        for name, span in self._spans.items():
            if span.pairs:
                taken[name] = round(sum(begin.elapsed_time(end) for begin, end in span.pairs) * 1e6)
                span.pairs.clear()
        return taken
