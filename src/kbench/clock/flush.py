"""One call at a time on a flushed cache: event pairs on CUDA, the host's clock on a CPU.

Before each call a buffer larger than the cache is written, outside of what is timed; nothing is subtracted. On CUDA a
batch of flushes and calls is queued behind a blocker, with an event pair around each call. Such a pair alone reads
`floor_us`, which a short kernel cannot be told from: `EVENT_FLOOR` says so. Rotation (`cold`) has no such floor.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from statistics import median
from time import perf_counter_ns

import torch
from torch.cuda import Event, _sleep, synchronize

from kbench.clock.cache import Flush
from kbench.clock.cuda import BLOCK_US, CYCLES_PER_US
from kbench.clock.timer import Call

BATCH = 20
"""Calls behind one blocker: with their flushes and events they must fit into the launch queue."""
WARM_UP_CALLS = 3
FLOOR_US = 0.3
FLOOR_SHARE = 0.03
"""What an error of the whole floor may be at most, absolute or of the reading, before it is flagged."""


class FlushTimer:
    """A reading is one call that found the cache full of something else."""

    def __init__(self, device: torch.device, flush_bytes: int) -> None:
        self._device = device
        self._flush = Flush(device, flush_bytes)
        self._calls: Sequence[Call] = ()
        self._rotation: Iterator[Call] = cycle(())
        self._block_us = BLOCK_US
        self._late = self._below_floor = False
        self.floor_us = 0.0
        """Median reading around nothing."""

    @property
    def name(self) -> str:
        return "event" if self._device.type == "cuda" else "wall"

    @property
    def round_calls(self) -> int:
        return len(self._calls)

    @property
    def flags(self) -> tuple[str, ...]:
        named = (("LAUNCH_BOUND", self._late), ("EVENT_FLOOR", self._below_floor))
        return tuple(name for name, holds in named if holds)

    def prepare(self, calls: Sequence[Call]) -> None:
        self._calls = tuple(calls)
        self._rotation = cycle(self._calls)
        for _ in range(max(WARM_UP_CALLS, len(self._calls))):
            next(self._rotation)()
        self._synchronize()
        start = perf_counter_ns()
        self._queue([next(self._rotation) for _ in range(WARM_UP_CALLS)])
        host_us = (perf_counter_ns() - start) / 1_000 / WARM_UP_CALLS
        self._synchronize()
        self._block_us = BLOCK_US + 2 * BATCH * host_us
        self.floor_us = median(self._read([_nothing] * BATCH)[0])
        self._read(list(islice(self._rotation, WARM_UP_CALLS)))

    def round(self) -> None:
        for call in self._calls:
            self._flush()
            call()
        self._synchronize()

    def window(self, min_calls: int, min_ms: float) -> list[float]:
        """At least `min_ms` with the flushes: a short call would take minutes without."""
        self._late = False
        readings: list[float] = []
        spent_us = 0.0
        while len(readings) < min_calls or spent_us < min_ms * 1_000:
            some, took_us = self._read(list(islice(self._rotation, BATCH if self._device.type == "cuda" else 1)))
            readings += some
            spent_us += took_us
        self._below_floor = self.floor_us > max(FLOOR_US, FLOOR_SHARE * median(readings))
        return readings

    def witnessed(self) -> float:
        """One round, at most a batch of it: for a profiler that leaves the flushes out."""
        return median(self._read(list(self._calls[:BATCH]))[0])

    def _read(self, calls: Sequence[Call]) -> tuple[list[float], float]:
        """Readings, and the time that they took with the flushes, in µs."""
        if self._device.type != "cuda":
            return self._read_host(calls)
        _sleep(int(self._block_us * CYCLES_PER_US))
        pairs = self._queue(calls)
        self._late = self._late or pairs[0][0].query()
        pairs[-1][1].synchronize()
        took_us = float(pairs[0][0].elapsed_time(pairs[-1][1])) * 1_000
        return [float(begin.elapsed_time(end)) * 1_000 for begin, end in pairs], took_us

    def _queue(self, calls: Sequence[Call]) -> list[tuple[Event, Event]]:
        if self._device.type != "cuda":
            self._read_host(calls)
            return []
        pairs = []
        held = []
        for call in calls:
            begin, end = Event(enable_timing=True), Event(enable_timing=True)
            self._flush()
            begin.record()
            held.append(call())
            end.record()
            pairs.append((begin, end))
        return pairs

    def _read_host(self, calls: Sequence[Call]) -> tuple[list[float], float]:
        readings = []
        begun = perf_counter_ns()
        for call in calls:
            self._flush()
            start = perf_counter_ns()
            call()
            readings.append((perf_counter_ns() - start) / 1_000)
        return readings, (perf_counter_ns() - begun) / 1_000

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            synchronize(self._device)


def _nothing() -> None:
    return None
