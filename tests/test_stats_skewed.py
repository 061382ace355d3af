"""Bounds for few skewed values: against their own declaration, and against data that nobody declared."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kbench.stats import family_error, skewed_bounds, skewed_critical


@pytest.mark.parametrize("n", [20, 60])
@pytest.mark.parametrize("error", [0.025, 0.0083])
def test_a_left_tail_passes_at_most_as_often_as_declared(n: int, error: float) -> None:
    """Other random numbers, another generator, a gamma instead of an exponential: true mean 0."""
    rng = np.random.Generator(np.random.MT19937(5))
    wrong = sum(skewed_bounds(1.0 - rng.gamma(1.0, 1.0, n), error)[0] > 0.0 for _ in range(4_000))
    assert wrong <= scipy_stats.binom.ppf(0.999, 4_000, error)


def test_a_right_tail_is_the_mirror_of_a_left_one() -> None:
    values = np.random.default_rng(1).exponential(1.0, 25)
    low, high = skewed_bounds(values, 0.01)
    mirrored_low, mirrored_high = skewed_bounds(-values, 0.01)
    assert (low, high) == pytest.approx((-mirrored_high, -mirrored_low))
    assert high - values.mean() > values.mean() - low


@pytest.mark.parametrize("n", [8, 20, 60, 200, 5_000])
def test_it_asks_for_more_than_student_and_less_with_more_values(n: int) -> None:
    assert skewed_critical(0.025, n) >= scipy_stats.t.ppf(0.975, n - 1)
    assert skewed_critical(0.025, n) >= skewed_critical(0.025, 2 * n) - 0.02
    assert skewed_critical(0.0083, n) > skewed_critical(0.025, n)


@given(st.lists(st.floats(-10.0, 10.0), min_size=2, max_size=40), st.floats(0.001, 0.05), st.floats(0.001, 0.05))
def test_less_error_never_narrows(values: list[float], one: float, other: float) -> None:
    less, more = sorted((one, other))
    wide, narrow = skewed_bounds(values, less), skewed_bounds(values, more)
    assert wide[0] <= narrow[0] + 1e-12
    assert wide[1] >= narrow[1] - 1e-12


def test_what_is_out_of_reach_is_infinite() -> None:
    assert skewed_critical(1e-6, 20) == math.inf
    assert skewed_bounds([1.0, 2.0, 3.0], 1e-6) == (-math.inf, math.inf)
    assert skewed_bounds([1.0], 0.025) == (-math.inf, math.inf)
    assert skewed_bounds([2.0, 2.0], 0.025) == (2.0, 2.0)


@pytest.mark.parametrize("values", [[], [math.nan, 1.0], [1.0, math.inf]])
def test_bad_values_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="values"):
        skewed_bounds(values, 0.025)


@pytest.mark.parametrize(("regimes", "segments"), [(1, 20), (2, 20), (6, 20), (6, 60)])
def test_the_family_error_of_usual_plans_is_below_twice_alpha(regimes: int, segments: int) -> None:
    found = family_error(regimes, segments, 0.05)
    assert 0.01 < found < 0.10
    assert found == family_error(regimes, segments, 0.05)


def test_the_family_error_is_of_the_share_that_each_regime_may_spend() -> None:
    assert family_error(1, 20, 0.05) == family_error(1, 20, 0.025)  # never more than 0.025 each
    assert family_error(6, 20, 0.01) < family_error(6, 20, 0.05)


def test_few_segments_and_many_regimes_are_refused_where_the_simulation_cannot_tell() -> None:
    assert family_error(10_000, 20, 0.05) == 1.0
