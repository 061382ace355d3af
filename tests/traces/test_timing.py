"""Grids are found, wobbling ones too; spreading keeps the order and fills the grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbench.traces.timing import dejitter, timestamp_quantum_us


def poisson(mean_us: float, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).exponential(mean_us, count).cumsum().astype(np.int64)


@pytest.mark.parametrize("quantum", [1_000, 1_000_000, 3_000_000])
@pytest.mark.parametrize("mean_us", [300_000, 20_000_000])
def test_a_grid_is_found_dense_or_sparse(quantum: int, mean_us: int) -> None:
    arrivals = poisson(mean_us, 3_000, 1) // quantum * quantum
    assert timestamp_quantum_us(arrivals - arrivals[0]) == quantum


def test_a_wobbling_grid_is_found() -> None:
    marks = np.sort(poisson(300_000, 3_000, 1) // 3_000_000 * 3_000_000)
    wobble = np.random.default_rng(2).integers(-1, 2, 10_000) * 1_000
    arrivals = np.sort(np.maximum(marks + wobble[marks // 3_000_000], 0))
    assert timestamp_quantum_us(arrivals) == pytest.approx(3_000_000, rel=0.001)


def test_continuous_arrivals_lie_on_no_grid() -> None:
    assert timestamp_quantum_us(poisson(250_000, 2_000, 3)) == 1
    assert timestamp_quantum_us(np.array([5, 5, 5])) == 1
    assert timestamp_quantum_us(np.array([], np.int64)) == 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(0, 99))
def test_spreading_stays_sorted_and_inside_the_quantum(marks: list[int], seed: int) -> None:
    arrivals = np.sort(np.array(marks, np.int64)) * 1_000
    spread = dejitter(arrivals, 1_000, seed)
    assert spread[0] == 0 and (np.diff(spread) >= 0).all()
    assert (np.abs(spread - (arrivals - arrivals[0])) < 1_000).all()
    assert np.array_equal(spread, dejitter(arrivals, 1_000, seed))


def test_spreading_fills_the_quantum_evenly() -> None:
    spread = dejitter(np.zeros(4_000, np.int64), 3_000_000, 1)
    counts, _ = np.histogram(spread, bins=10, range=(0, 3_000_000))
    assert counts.min() > 320 and counts.max() < 480
