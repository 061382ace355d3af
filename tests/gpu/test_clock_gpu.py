"""Clocks on a CUDA device: cache states that differ, work that escapes, the clock read on the device, ceilings."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean, median

import pytest
import torch

from kbench.clock.cache import last_level_bytes, plan_state, reset_persisting
from kbench.clock.ceilings import ceilings, measure
from kbench.clock.device import DeviceClock
from kbench.clock.escape import device_escape, late_output
from kbench.clock.flush import FlushTimer
from kbench.clock.integrity import unpatched
from kbench.clock.profiler import ProfilerTimer, profile_calls, profile_kernels
from kbench.clock.sm_clock import SmClock
from kbench.clock.timer import prepared_timer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="wants the device alone"),
]

MIB = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


def copies(size: int, count: int, device: torch.device) -> list[object]:
    def make() -> object:
        source = torch.ones(size // 4, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return [make() for _ in range(count)]


def test_cache_states_are_told_apart(device: torch.device) -> None:
    """8 MiB in and out: hot it comes from L2, cold and flushed from memory."""
    size, cache = 8 * MIB, last_level_bytes(device)
    plans = {state: plan_state(2 * size, 0, cache, "cuda", state) for state in ("hot", "cold", "flush")}  # type: ignore[arg-type]
    assert [plan.label for plan in plans.values()] == ["hot", "cold", "flush"]
    times = {}
    for state, plan in plans.items():
        timer = prepared_timer(copies(size, plan.sets, device), device, flush_bytes=plan.flush_bytes)  # type: ignore[arg-type]
        times[state] = median(timer.window(20, 20.0))
        assert "LAUNCH_BOUND" not in timer.flags
    assert times["hot"] < 0.9 * times["cold"], times
    assert times["flush"] > times["hot"], times


def test_a_flushed_reading_is_the_profilers_for_a_long_call(device: torch.device) -> None:
    call = copies(512 * MIB, 1, device)[0]
    timer = FlushTimer(device, 256 * MIB)
    timer.prepare([call] * 10)  # type: ignore[list-item]
    reading = median(timer.window(20, 20.0))
    made = profile_calls(timer.witnessed, timer.round_calls, device, leading=1)
    assert made is not None and made.kernels == 1
    assert abs(reading - made.span_us) <= 0.03 * made.span_us, (reading, made.span_us)
    assert timer.flags == () and 0 < timer.floor_us < 20


def test_an_event_pair_is_too_coarse_for_a_microsecond_and_says_so(device: torch.device) -> None:
    value = torch.zeros(1, device=device)
    timer = FlushTimer(device, 128 * MIB)
    timer.prepare([lambda: value.add_(1)])
    timer.window(20, 5.0)
    assert "EVENT_FLOOR" in timer.flags, timer.floor_us


def test_the_profiler_is_a_timer(device: torch.device) -> None:
    call = copies(256 * MIB, 1, device)[0]
    timer = ProfilerTimer(device)
    timer.prepare([call])  # type: ignore[list-item]
    readings = timer.window(20, 2.0)
    graph = prepared_timer([call], device, "graph")  # type: ignore[list-item]
    assert len(readings) >= 20
    assert fmean(readings) == pytest.approx(median(graph.window(20, 20.0)), rel=0.03)


class SideStream:
    """Queues its work elsewhere and does not wait for it."""

    def __init__(self, device: torch.device, *, joins: bool) -> None:
        self.source = torch.ones(64 * MIB, device=device)
        self.out = torch.empty_like(self.source)
        self._stream = torch.cuda.Stream(device)
        self._joins = joins

    def __call__(self) -> torch.Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.out.copy_(self.source)
        if self._joins:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self.out


def test_work_on_another_stream_is_seen_by_the_wall_and_by_the_answer(device: torch.device) -> None:
    escaping, honest = SideStream(device, joins=False), SideStream(device, joins=True)
    seen = device_escape(escaping, device)
    assert seen.escaped and seen.flags == ("ASYNC_ESCAPE",), seen
    assert not device_escape(honest, device).escaped
    assert not device_escape(lambda: honest.out.add_(1), device).escaped
    asked = [late_output(escaping, lambda: escaping.out.fill_(-3.5), torch.cuda.synchronize, block=b) for b in (0, 1)]
    assert any(asked), "which of the two shows it depends on how fast the copy follows"
    assert not late_output(honest, lambda: honest.out.fill_(-3.5), torch.cuda.synchronize)


def test_short_work_on_another_stream_piles_up_behind_a_block(device: torch.device) -> None:
    escaping = SideStream(device, joins=False)
    escaping.source, escaping.out = escaping.source[: 4 * MIB], escaping.out[: 4 * MIB]
    assert device_escape(escaping, device).escaped


def test_a_short_honest_call_does_not_escape(device: torch.device) -> None:
    value = torch.zeros(16, device=device)
    assert not device_escape(lambda: value.add_(1), device).escaped
    assert not late_output(lambda: value.add_(1), lambda: value.fill_(-3.5), torch.cuda.synchronize, block=True)


def test_streams_are_counted(device: torch.device) -> None:
    value = torch.zeros(1 << 20, device=device)

    def one() -> float:
        for _ in range(4):
            value.mul_(1.5)
        return 0.0

    profile = profile_kernels(one, 4, device)
    assert profile is not None and profile.streams == 1


def test_the_clock_read_on_the_device_is_a_plausible_one(device: torch.device) -> None:
    clock = SmClock(device)
    values = torch.randn(4_096, 4_096, device=device, dtype=torch.bfloat16)
    clock.begin()
    for _ in range(200):
        torch.mm(values, values)
    clock.end()
    mhz = clock.mhz()
    assert 300 < mhz < 3_500
    slow = DeviceClock(device).read().get("sm_mhz")
    assert slow is None or 0.5 < mhz / slow < 2.0


def test_ceilings_are_below_the_physical_peak_and_kept(device: torch.device, tmp_path: Path) -> None:
    made = ceilings(device, tmp_path)
    assert ceilings(device, tmp_path) == made
    assert not made.impossible(1.0, bytes_moved=made.copy_bytes_per_us)
    for name, rate in made.gemm_flops_per_us.items():
        assert not made.impossible(1.0, flops=rate, dtype=name), (name, rate, made.peak_flops_per_us)
    assert {"bfloat16", "float16"} <= made.gemm_flops_per_us.keys()
    assert made.gemm_flops_per_us["bfloat16"] > 3 * made.gemm_flops_per_us.get("float32", 0.0)


def test_a_small_calibration_ends(device: torch.device) -> None:
    assert measure(device, scale=0.05).read_bytes_per_us > 0
    assert isinstance(reset_persisting(), bool)


def test_the_clock_is_whole_after_all_this() -> None:
    assert unpatched() == []
