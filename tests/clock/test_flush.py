from __future__ import annotations

import pytest
import torch

import kbench.clock.flush as flush
from kbench.clock.flush import FlushTimer
from kbench.clock.timer import prepared_timer
from kbench.errors import UsageError

CPU = torch.device("cpu")


class Bench:
    """Time passes in flushes and calls alone; what happened is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.log: list[str] = []
        monkeypatch.setattr(flush, "perf_counter_ns", lambda: self.now_ns)

    def step(self, name: str, us: float) -> None:
        self.log.append(name)
        self.now_ns += int(us * 1_000)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(monkeypatch)
    monkeypatch.setattr(flush.Flush, "__call__", lambda _: made.step("flush", 1_000))
    return made


def test_each_call_is_timed_alone_behind_a_flush_that_is_not_timed(bench: Bench) -> None:
    timer = prepared_timer([lambda: bench.step("a", 30), lambda: bench.step("b", 50)], CPU, flush_bytes=1_024)
    assert timer.name == "wall" and timer.round_calls == 2
    bench.log.clear()
    readings = timer.window(6, 0.0)
    assert sorted(readings) == [pytest.approx(30)] * 3 + [pytest.approx(50)] * 3
    assert bench.log[::2] == ["flush"] * 6 and sorted(bench.log[1::2]) == list("aaabbb")
    assert timer.flags == ()


def test_the_windows_length_counts_the_flushes(bench: Bench) -> None:
    timer = FlushTimer(CPU, 64)
    timer.prepare([lambda: bench.step("a", 1)])
    assert len(timer.window(1, 10.0)) == 10
    bench.log.clear()
    timer.round()
    assert bench.log == ["flush", "a"]
    assert timer.witnessed() == pytest.approx(1)


def test_a_call_no_longer_than_the_clocks_own_floor_is_flagged(bench: Bench) -> None:
    timer = FlushTimer(CPU, 64)
    timer.prepare([lambda: bench.step("a", 20)])
    assert timer.floor_us == 0.0
    timer.floor_us = 1.5
    timer.window(1, 0.0)
    assert timer.flags == ("EVENT_FLOOR",)
    timer.floor_us = 0.5
    timer.window(1, 0.0)
    assert timer.flags == (), "half a microsecond of twenty is below 3 %"


def test_other_clocks_cannot_flush() -> None:
    for name in ("graph", "profiler", "event"):
        with pytest.raises(UsageError, match=name):
            prepared_timer([lambda: None], CPU, name, flush_bytes=64)
