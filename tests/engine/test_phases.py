"""Phases are exclusive, stamped by themselves, and add up to no more than the wall."""

from __future__ import annotations

import pytest

from kbench.engine import phases
from kbench.engine.phases import PHASES, NullClock, PhaseClock


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clock's readings, one after the other."""
    readings: list[int] = []
    monkeypatch.setattr(phases, "perf_counter_ns", lambda: readings.pop(0))
    return readings


def test_each_phase_has_its_own_two_stamps(ticks: list[int]) -> None:
    ticks += [100, 110, 115, 145]
    clock = PhaseClock()
    with clock("prepare"):
        pass
    with clock("sample"):
        pass
    assert clock.take() == {"prepare": 10, "sample": 30}  # the 5 in between are nobody's


def test_a_phase_inside_another_interrupts_it(ticks: list[int]) -> None:
    ticks += [0, 10, 17, 40]
    clock = PhaseClock()
    with clock("forward"), clock("attention"):
        pass
    assert clock.take() == {"forward": 10 + 23, "attention": 7}


def test_entries_of_one_phase_add_up_and_take_clears(ticks: list[int]) -> None:
    ticks += [0, 1, 5, 7]
    clock = PhaseClock()
    for _ in range(2):
        with clock("kv_write"):
            pass
    assert clock.take() == {"kv_write": 3}
    assert clock.take() == {}


def test_unknown_phases_are_refused_and_the_null_clock_takes_any() -> None:
    with pytest.raises(KeyError):
        PhaseClock()("lunch")
    with NullClock()(PHASES[0]), NullClock()("lunch"):
        pass


def test_a_phase_ends_when_its_body_raises(ticks: list[int]) -> None:
    ticks += [0, 4, 10, 11]
    clock = PhaseClock()
    with pytest.raises(ValueError, match="x"), clock("sample"):
        raise ValueError("x")
    with clock("schedule"):
        pass
    assert clock.take() == {"sample": 4, "schedule": 1}
