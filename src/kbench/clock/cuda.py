"""The device's clock: events around a replayed graph, or around launches queued behind a blocker.

Both read device time without the host in it. A launch costs the host more than a short kernel runs, so events around
plain launches would time the host. `GraphTimer` captures many calls, each input set among them, and replays them;
`EventTimer` holds the device with a spinning kernel until all launches are queued, and says so when that failed.

Seen on an H200: while a process has the device's only context, each node of a graph takes 0.35 µs longer than once a
second context has existed, and so it does while a profiler is attached to any process. The pair of workers of a session
is past that; a lone process is not.

Bound here at import, before code under test is loaded: what is patched into `torch.cuda` later reaches no timer
(`clock.integrity` says that it was).
"""

# mypy: disable-error-code="no-untyped-call"
# torch.cuda's streams and events carry no annotations.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from time import perf_counter_ns

import torch
from torch.cuda import CUDAGraph, Event, Stream, _sleep, current_stream, synchronize
from torch.cuda import graph as capture_into
from torch.cuda import stream as on_stream

from kbench.clock.timer import Call

GRAPH_US = 5_000.0
"""Length of a graph: what events and the first launch add (some µs) is below 0.1 % of it."""
GRAPH_CALLS = 2_000
QUEUED_CALLS = 100
"""The launch queue holds about a thousand kernels; a call is a handful."""
READING_US = 1_000.0
BLOCK_US = 300.0
"""Shortest block; what the host needs to launch comes on top, twice."""
WITNESS_BLOCKS = 8
"""A profiler slows launches down: a reading that it watches is blocked for so many times as long."""
CYCLES_PER_US = 2_000
"""Of the spinning kernel at the highest clock. Slower clocks only block for longer."""


class GraphTimer:
    """A CUDA graph of `round_calls` calls; a reading is one replay."""

    name = "graph"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: CUDAGraph | None = None
        self._held: list[object] = []
        self._block_us = BLOCK_US
        self._late = 0
        self._readings = 0
        self.round_calls = 0

    @property
    def flags(self) -> tuple[str, ...]:
        """A few late readings leave the median alone; more than half of them do not."""
        return ("LAUNCH_BOUND",) if 2 * self._late > self._readings else ()

    def prepare(self, calls: Sequence[Call]) -> None:
        """Capture the rotation once, see how long it takes, and capture as many rotations as make a long graph."""
        stream = Stream(self._device)
        stream.wait_stream(current_stream(self._device))
        with on_stream(stream):
            for call in calls:
                call()
        current_stream(self._device).wait_stream(stream)
        synchronize(self._device)
        self._capture(calls)
        self._hide_launch()
        rotation_us = max(0.1, self._read() * len(calls))
        rotations = min(int(GRAPH_US / rotation_us) + 1, GRAPH_CALLS // len(calls))
        if rotations > 1:
            self._capture(list(calls) * rotations)
            self._hide_launch()
        for _ in range(2):
            self._read()

    def round(self) -> None:
        assert self._graph is not None
        self._graph.replay()
        synchronize(self._device)

    def window(self, min_calls: int, min_ms: float) -> list[float]:
        self._late = self._readings = 0
        readings: list[float] = []
        spent_us = 0.0
        while len(readings) * self.round_calls < min_calls or spent_us < min_ms * 1_000:
            reading = self._read()
            readings.append(reading)
            spent_us += reading * self.round_calls
        return readings

    def witnessed(self) -> float:
        return self._read(WITNESS_BLOCKS)

    def _capture(self, calls: Sequence[Call]) -> None:
        self._graph, self._held = None, []
        synchronize(self._device)
        graph = CUDAGraph()
        with capture_into(graph):
            held = [call() for call in calls]
        self._graph, self._held, self.round_calls = graph, held, len(calls)
        synchronize(self._device)

    def _hide_launch(self) -> None:
        """Block the device for as long as a launch of this graph takes the host. The first launch also uploads it."""
        assert self._graph is not None
        host_us = []
        for _ in range(3):
            synchronize(self._device)
            start = perf_counter_ns()
            self._graph.replay()
            host_us.append((perf_counter_ns() - start) / 1_000)
        synchronize(self._device)
        self._block_us = BLOCK_US + 2 * min(host_us)

    def _read(self, blocks: float = 1.0) -> float:
        assert self._graph is not None
        begin, end = Event(enable_timing=True), Event(enable_timing=True)
        _sleep(int(blocks * self._block_us * CYCLES_PER_US))
        begin.record()
        self._graph.replay()
        end.record()
        self._late += begin.query()  # the device was free before the whole graph was launched
        self._readings += 1
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1_000 / self.round_calls


def leave_capture(device: torch.device) -> None:
    """After a capture that failed: torch's generator stays in capture mode until another capture ends well."""
    value = torch.zeros(1, device=device)
    graph = CUDAGraph()
    with capture_into(graph):
        value.add_(1)
    synchronize(device)


class EventTimer:
    """Launches queued behind a spinning kernel; a reading is one batch. For calls that cannot be captured."""

    name = "event"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: Sequence[Call] = ()
        self._rotation: Iterator[Call] = cycle(())
        self._batch = 1
        self._block_us = BLOCK_US
        self._late = False

    @property
    def round_calls(self) -> int:
        return len(self._calls)

    @property
    def flags(self) -> tuple[str, ...]:
        return ("LAUNCH_BOUND",) if self._late else ()

    def prepare(self, calls: Sequence[Call]) -> None:
        self._calls = tuple(calls)
        self._rotation = cycle(self._calls)
        self.round()
        self.round()
        start = perf_counter_ns()
        for call in self._calls:
            call()
        host_us = (perf_counter_ns() - start) / 1_000 / len(self._calls)
        synchronize(self._device)
        self._block_us = BLOCK_US + 2 * host_us
        device_us = max(0.5, min(self._read() for _ in range(3)))
        self._batch = max(1, min(QUEUED_CALLS, int(READING_US / device_us) + 1))
        self._block_us = BLOCK_US + 2 * host_us * self._batch
        self._read()

    def round(self) -> None:
        for call in self._calls:
            call()
        synchronize(self._device)

    def window(self, min_calls: int, min_ms: float) -> list[float]:
        self._late = False
        readings: list[float] = []
        spent_us = 0.0
        while len(readings) * self._batch < min_calls or spent_us < min_ms * 1_000:
            reading = self._read()
            readings.append(reading)
            spent_us += reading * self._batch
        return readings

    def witnessed(self) -> float:
        """All input sets once, so that the calls are those of a round."""
        return self._read(self.round_calls, WITNESS_BLOCKS)

    def _read(self, batch: int = 0, blocks: float = 1.0) -> float:
        calls = list(islice(self._rotation, batch or self._batch))
        begin, end = Event(enable_timing=True), Event(enable_timing=True)
        _sleep(int(blocks * self._block_us * CYCLES_PER_US))
        begin.record()
        held = [call() for call in calls]
        end.record()
        self._late = self._late or begin.query()  # the device went on before the last launch was queued
        end.synchronize()
        del held
        return float(begin.elapsed_time(end)) * 1_000 / len(calls)
