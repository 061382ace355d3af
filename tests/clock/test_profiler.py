from __future__ import annotations

import pytest
import torch

from kbench.clock.profiler import Activity, divide
from kbench.clock.sm_clock import mean_mhz
from kbench.clock.timer import make_timer
from kbench.errors import MeasurementError, UsageError


def activities(*intervals: tuple[float, float, str]) -> list[Activity]:
    return [Activity(start, end, name) for start, end, name in intervals]


def test_kernels_are_divided_over_their_calls() -> None:
    """Two calls of two kernels, 1 µs apart within a call and 3 µs between calls."""
    made = divide(activities((0, 4, "a"), (5, 7, "b"), (10, 14, "a"), (15, 18, "b")), 2, 0, 9.5)
    assert (made.spans_us, made.sums_us) == ((7, 8), (6, 7))
    assert (made.span_us, made.sum_us, made.kernels, made.timer_us) == (7.5, 6.5, 2, 9.5)
    assert made.period_us == 9
    assert made.gap_us == pytest.approx(5 / 3) and made.names == ("a", "b")


def test_what_comes_before_each_call_is_not_its_own() -> None:
    made = divide(activities((0, 50, "flush"), (50, 52, "a"), (60, 110, "flush"), (111, 115, "a")), 2, 1, 0.0)
    assert (made.spans_us, made.kernels, made.names) == ((2, 4), 1, ("a",))


def test_order_is_that_of_the_device_and_overlap_counts_once_in_a_span() -> None:
    made = divide(activities((2, 9, "b"), (0, 10, "a")), 1, 0, 0.0)
    assert (made.span_us, made.sum_us, made.gap_us) == (10, 17, 0)


@pytest.mark.parametrize(("calls", "leading"), [(2, 0), (3, 1), (4, 0)])
def test_kernels_that_do_not_divide_are_nobodys(calls: int, leading: int) -> None:
    with pytest.raises(MeasurementError, match="do not divide"):
        divide(activities((0, 1, "a"), (1, 2, "a"), (2, 3, "b")), calls, leading, 0.0)


def test_a_cpu_has_no_profiler_timer() -> None:
    with pytest.raises(UsageError, match="profiler"):
        make_timer("profiler", torch.device("cpu"))


def test_the_clock_is_cycles_over_time_of_one_multiprocessor() -> None:
    before = torch.tensor([[0, 1_000, 500], [0, 9_000, 900], [1, 50, 500], [2, 7, 500]])
    after = torch.tensor([[1, 50 + 1_980_000, 1_000_500], [0, 1_000 + 1_980_000, 1_000_500], [3, 1, 1]])
    assert mean_mhz(before, after) == pytest.approx(1_980)
    assert mean_mhz(before, torch.tensor([[5, 1, 1]])) == 0.0
