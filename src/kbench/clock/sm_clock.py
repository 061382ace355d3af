"""The multiprocessors' clock while a window ran, read on the device; NVML answers some hundred milliseconds late.

Owns the two readings around a window: cycles and nanoseconds of every multiprocessor, before and after. Their quotient
is the mean clock in between, idle time included. Needs triton and CUDA; the kernel is made when the first instance is.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.cuda import current_stream

PROGRAMS_PER_SM = 4
"""More programs than multiprocessors, so that nearly each of them answers both times."""
FIELDS = 3
"""Multiprocessor, cycles, nanoseconds."""


class SmClock:
    """`begin()`, the window's work on the same stream, `end()`, and once it is done `mhz()`."""

    def __init__(self, device: torch.device) -> None:
        from kbench.clock import sm_stamp

        self._kernel: Any = sm_stamp._stamp
        self._device = device
        self._programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        shape = (self._programs, FIELDS)
        self._before = torch.zeros(shape, dtype=torch.int64, device=device)
        self._after = torch.zeros(shape, dtype=torch.int64, device=device)
        self.begin()
        self.end()
        current_stream(device).synchronize()

    def begin(self) -> None:
        self._kernel[(self._programs,)](self._before, num_warps=1)

    def end(self) -> None:
        self._kernel[(self._programs,)](self._after, num_warps=1)

    def mhz(self) -> float:
        """Median over the multiprocessors; 0 where none answered both times."""
        return mean_mhz(self._before.cpu(), self._after.cpu())


def mean_mhz(before: Tensor, after: Tensor) -> float:
    """Rows of (multiprocessor, cycles, nanoseconds), several of some multiprocessors: the first of each counts."""
    first, last = _by_multiprocessor(before), _by_multiprocessor(after)
    clocks = []
    for place, (cycles, nanoseconds) in first.items():
        if place in last and last[place][1] > nanoseconds and last[place][0] > cycles:
            clocks.append((last[place][0] - cycles) / (last[place][1] - nanoseconds) * 1_000)
    return median(clocks) if clocks else 0.0


def _by_multiprocessor(rows: Tensor) -> dict[int, tuple[int, int]]:
    places: dict[int, tuple[int, int]] = {}
    for place, cycles, nanoseconds in rows.tolist():
        places.setdefault(place, (cycles, nanoseconds))
    return places
