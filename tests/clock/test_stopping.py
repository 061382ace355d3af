from __future__ import annotations

import math
import random
from statistics import median

import pytest
from scipy.stats import quantile_test

from kbench.clock.stopping import Stop, median_interval, relative_half_width, stop, unstable


@pytest.mark.parametrize("count", [6, 7, 20, 101, 1_500])
def test_the_median_interval_is_that_of_scipy(count: int) -> None:
    chance = random.Random(count)
    readings = [chance.gauss(100, 3) for _ in range(count)]
    theirs = quantile_test(readings, q=100, p=0.5).confidence_interval(0.95)
    assert median_interval(readings) == pytest.approx((theirs.low, theirs.high))


def test_few_readings_give_no_interval() -> None:
    for count in range(6):
        assert median_interval([1.0] * count) == (-math.inf, math.inf)
        assert relative_half_width([1.0] * count) == math.inf
    assert median_interval([1.0] * 6) == (1.0, 1.0)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    chance = random.Random(3)
    covered = 0
    for _ in range(1_000):
        low, high = median_interval([chance.expovariate(1.0) for _ in range(25)])
        covered += low <= math.log(2) <= high
    assert covered >= 940


def test_it_stops_for_a_precision_or_a_budget_and_says_which() -> None:
    tight, wide = [100.0, 100.1] * 10, [50.0, 150.0] * 10
    assert stop(tight, precision=0.005, spent_ms=1, budget_ms=10) is Stop.PRECISION
    assert stop(wide, precision=0.005, spent_ms=1, budget_ms=10) is Stop.GO_ON
    assert stop(wide, precision=0.005, spent_ms=10, budget_ms=10) is Stop.BUDGET
    assert stop([], precision=0.005, spent_ms=10, budget_ms=10) is Stop.BUDGET
    assert stop(tight[:8], precision=0.005, spent_ms=1, budget_ms=10, at_least=20) is Stop.GO_ON
    assert [str(reason) for reason in Stop] == ["go on", "precision", "budget"]


def test_a_window_that_drifted_is_unstable() -> None:
    chance = random.Random(1)
    calm = [chance.gauss(100, 1) for _ in range(60)]
    assert not unstable(calm)
    assert unstable([value + (5 if index >= 30 else 0) for index, value in enumerate(calm)])
    assert not unstable([100.0] * 30 + [100.4] * 30), "less than half a percent is no drift"
    assert unstable([100.0] * 30 + [101.0] * 30)
    assert not unstable([100.0, 200.0] * 20), "scatter is no drift"
    assert not unstable([1.0, 1.0, 9.0, 9.0]), "too few to tell"
    assert median(calm) > 0
