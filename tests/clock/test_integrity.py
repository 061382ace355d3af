from __future__ import annotations

import statistics
import time

import pytest
import torch

import kbench.clock.cuda
import kbench.clock.wall
from kbench.clock.integrity import unpatched
from kbench.clock.wall import WallTimer


def test_an_untouched_clock_is_whole() -> None:
    assert unpatched() == []


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (time, "perf_counter_ns", "time.perf_counter_ns"),
        (time, "perf_counter", "time.perf_counter"),
        (statistics, "median", "statistics.median"),
        (torch.cuda, "Event", "torch.cuda.Event"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda.Event, "elapsed_time", "Event.elapsed_time"),
        (torch.cuda.CUDAGraph, "replay", "CUDAGraph.replay"),
        (kbench.clock.wall, "perf_counter_ns", "kbench.clock.wall.perf_counter_ns"),
        (kbench.clock.cuda, "Event", "kbench.clock.cuda.Event"),
        (WallTimer, "_read", "WallTimer._read"),
        (torch.Tensor, "clone", "Tensor.clone"),
    ],
)
def test_whatever_is_replaced_is_named(owner: object, name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, lambda *_: 0)
    found = unpatched()
    monkeypatch.undo()
    assert any(text.endswith(said) for text in found), found
    assert unpatched() == []


def test_patching_time_does_not_reach_a_timer_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    timer = WallTimer(torch.device("cpu"))
    timer.prepare([lambda: sum(range(1_000))])
    assert min(timer.window(3, 0.0)) > 0
