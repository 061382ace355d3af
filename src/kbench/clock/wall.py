"""The host's clock: batches of calls between two readings of `perf_counter_ns`.

A batch is as long as it must be for the clock's own cost and resolution not to matter. On CUDA the device is
synchronised at both ends, so that host and device time are in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from time import perf_counter_ns

import torch
from torch.cuda import synchronize

from kbench.clock.timer import Call

MIN_READING_US = 20.0
WARM_UP_US = 20_000.0


class WallTimer:
    name = "wall"
    flags: tuple[str, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: Sequence[Call] = ()
        self._rotation: Iterator[Call] = cycle(())
        self._batch = 1

    @property
    def round_calls(self) -> int:
        return len(self._calls)

    def prepare(self, calls: Sequence[Call]) -> None:
        """Every call once, then more for a fixed time; the fastest of them sets the batch."""
        self._calls = tuple(calls)
        self._rotation = cycle(self._calls)
        fastest = spent = self._read(1)
        made = 1
        while made < len(self._calls) or ((made < 3 or spent < WARM_UP_US) and made < 1_000):
            last = self._read(1)
            fastest, spent, made = min(fastest, last), spent + last, made + 1
        self._batch = max(1, -(-int(MIN_READING_US * 1_000) // max(1, int(fastest * 1_000))))

    def round(self) -> None:
        for call in self._calls:
            call()
        self._synchronize()

    def window(self, min_calls: int, min_ms: float) -> list[float]:
        readings: list[float] = []
        spent_us = 0.0
        while len(readings) * self._batch < min_calls or spent_us < min_ms * 1_000:
            reading = self._read(self._batch)
            readings.append(reading)
            spent_us += reading * self._batch
        return readings

    def witnessed(self) -> float:
        return self._read(self.round_calls)

    def _read(self, batch: int) -> float:
        """µs a call over `batch` calls of the rotation."""
        calls = list(islice(self._rotation, batch))
        self._synchronize()
        start = perf_counter_ns()
        for call in calls:
            call()
        self._synchronize()
        return (perf_counter_ns() - start) / 1_000 / batch

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            synchronize(self._device)
