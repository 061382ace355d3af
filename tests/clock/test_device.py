from __future__ import annotations

import torch

from kbench.clock.device import DeviceClock, peak_bytes_per_us, throttle_reasons
from kbench.clock.profiler import union_length


def test_only_reasons_that_slow_a_busy_device_count() -> None:
    assert throttle_reasons(0x4) == ["software power cap"]
    assert throttle_reasons(0x1 | 0x2) == []
    assert throttle_reasons(0x8 | 0x40) == ["hardware slowdown", "hardware thermal"]


def test_a_cpu_has_no_device_clock() -> None:
    assert DeviceClock(torch.device("cpu")).read() == {}
    assert peak_bytes_per_us(torch.device("cpu")) is None


def test_overlapping_kernels_count_once() -> None:
    assert union_length([]) == 0
    assert union_length([(5, 7), (0, 2)]) == 4
    assert union_length([(0, 10), (2, 3), (9, 12), (12, 13)]) == 13
