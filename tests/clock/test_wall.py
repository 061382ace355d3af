from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kbench.clock.wall as wall
from kbench.clock.timer import make_timer, prepared_timer
from kbench.clock.wall import WallTimer
from kbench.errors import UsageError

CPU = torch.device("cpu")


class Clock:
    """A host whose time only passes in the calls."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.made: list[str] = []

    def __call__(self) -> int:
        return self.now_ns

    def call(self, name: str, us: float) -> Callable[[], object]:
        def run() -> None:
            self.made.append(name)
            self.now_ns += int(us * 1_000)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(wall, "perf_counter_ns", made)
    return made


def test_short_calls_are_batched_until_a_reading_is_long_enough(clock: Clock) -> None:
    timer = WallTimer(CPU)
    timer.prepare([clock.call("a", 0.3), clock.call("b", 0.3)])
    before = len(clock.made)
    readings = timer.window(1, 0.0)
    calls = len(clock.made) - before
    assert calls == len(readings) * 67 and readings == [pytest.approx(0.3)]


def test_long_calls_stand_alone(clock: Clock) -> None:
    timer = WallTimer(CPU)
    timer.prepare([clock.call("a", 500.0)])
    assert timer.window(3, 0.0) == [pytest.approx(500.0)] * 3


def test_a_window_has_both_enough_calls_and_enough_time(clock: Clock) -> None:
    timer = WallTimer(CPU)
    timer.prepare([clock.call("a", 1_000.0)])
    assert len(timer.window(3, 50.0)) == 50
    assert len(timer.window(80, 50.0)) == 80


def test_every_input_set_takes_its_turn(clock: Clock) -> None:
    timer = WallTimer(CPU)
    timer.prepare([clock.call(name, 100.0) for name in "abc"])
    assert set(clock.made) == set("abc")
    clock.made.clear()
    timer.window(9, 0.0)
    assert {name: clock.made.count(name) for name in "abc"} == {"a": 3, "b": 3, "c": 3}
    clock.made.clear()
    timer.round()
    assert clock.made == list("abc") and timer.round_calls == 3
    clock.made.clear()
    assert timer.witnessed() == pytest.approx(100.0)
    assert sorted(clock.made) == list("abc"), "a witnessed reading is one round"


def test_warm_up_ends_even_if_calls_take_no_time(clock: Clock) -> None:
    timer = WallTimer(CPU)
    timer.prepare([clock.call("a", 0.0)])
    assert len(clock.made) == 1_000


def test_the_cpu_gets_the_wall_clock(clock: Clock) -> None:
    timer = prepared_timer([clock.call("a", 100.0)], CPU)
    assert timer.name == "wall" and timer.flags == ()
    for name in ("graph", "event", "sundial"):
        with pytest.raises(UsageError, match=name):
            make_timer(name, CPU)


def test_what_a_call_raises_is_not_hidden() -> None:
    def breaks() -> None:
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        prepared_timer([breaks], CPU)
