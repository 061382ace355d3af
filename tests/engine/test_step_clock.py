"""Durations: many at once are those of each step, whatever is asked first; noise is a function of the step's number."""

from __future__ import annotations

import math
import random

import pytest

from kbench.engine.costs import CostTable, StepShape, default_grid
from kbench.engine.step_clock import StepClock, StepNoise
from kbench.errors import UsageError


def table(repeats: int = 3) -> CostTable:
    draw = random.Random(1)
    return CostTable.fit(
        {"variant": "invented", "point": point, "wall_ns": 1e6 * draw.uniform(1.0, 3.0), "repeat": repeat}
        for point in default_grid(64, 16, 400)
        for repeat in range(repeats)
    )


COSTS = table()


def clock(captured: tuple[int, ...] = (), seed: int | None = 5) -> StepClock:
    return StepClock(COSTS, noise=None if seed is None else StepNoise(COSTS.residuals(), seed), captured=captured)


@pytest.mark.parametrize("captured", [(), (1, 4, 16)])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(("seqs", "context", "steps"), [(1, 3, 700), (3, 90, 10), (5, 700, 5_000), (20, 60, 90)])
def test_runs_are_their_steps(captured: tuple[int, ...], seed: int | None, seqs: int, context: int, steps: int) -> None:
    run, each = clock(captured, seed), clock(captured, seed)
    durations = run.decodes(seqs, context, steps, math.inf, 1_000)
    singles = [each.step(StepShape(seqs, context + seqs * (step + 1)), 1_000 + step) for step in range(steps)]
    assert list(durations) == singles
    assert (run.modelled_ns, run.extrapolated_ns) == (each.modelled_ns, each.extrapolated_ns)
    assert sum(singles) == each.modelled_ns
    halfway = sum(singles[: steps // 2])
    assert list(clock(captured, seed).decodes(seqs, context, steps, halfway, 1_000)) == singles[: steps // 2]
    assert list(run.decodes(seqs, context, steps, halfway + 1, 1_000)) == singles[: steps // 2 + 1]


def test_chunks_are_their_steps() -> None:
    run, each = clock(), clock()
    durations = run.chunks(2, 50, 30, 60, 8, math.inf, 7)
    shapes = [StepShape(2, 50 + 2 * step, 30, 1, 30 * (60 + 30 * step), 60 + 30 * step) for step in range(1, 9)]
    assert list(durations) == [each.step(shape, 7 + step) for step, shape in enumerate(shapes)]


def test_noise_does_not_know_the_order_of_asking() -> None:
    noise, other = StepNoise((0.9, 1.0, 1.2), 3), StepNoise((0.9, 1.0, 1.2), 3)
    forwards = [noise.of(step) for step in range(3_000)]
    assert [other.of(step) for step in reversed(range(3_000))] == forwards[::-1]
    assert [factor for factor, _ in zip(other.since(1_500), range(1_500), strict=False)] == forwards[1_500:]
    assert all(800 < forwards.count(factor) < 1_200 for factor in (0.9, 1.0, 1.2))
    assert forwards != [StepNoise((0.9, 1.0, 1.2), 4).of(step) for step in range(3_000)]


def test_noise_needs_repeated_points() -> None:
    assert len(COSTS.residuals()) == 3 * COSTS.points
    with pytest.raises(UsageError, match="repeated"):
        StepNoise(table(1).residuals(), 1)


def test_a_batch_costs_what_the_next_captured_one_does() -> None:
    padded = clock((4, 16), None)
    assert padded.step(StepShape(3, 100), 0) == COSTS.step_ns(StepShape(4, 100))
    assert padded.step(StepShape(17, 100), 0) == COSTS.step_ns(StepShape(17, 100))
    mixed = StepShape(3, 100, 8, 1, 80, 10)
    assert padded.step(mixed, 0) == COSTS.step_ns(mixed)
