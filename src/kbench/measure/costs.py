"""The cost grid of one arm: how long steps of many shapes take, for replay in virtual time.

Owns the rows of costs.parquet. One runner with one pool, sized for the largest point and filled with random K and V
once, serves all points. Steps are taken one at a time in rounds over all points, in a new order each round.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from kbench.catalog import parse_point
from kbench.engine.costs import StepShape
from kbench.engine.kv import Slots
from kbench.engine.runner import Runner
from kbench.errors import UsageError
from kbench.measure.clean_step import clean_step
from kbench.measure.exec_batch import BatchState, KeptWeights, open_runner
from kbench.suite.schema import Arm

_ROUNDS = 3
_WARMUP_ROUNDS = 1


def measure_costs(
    arm: Arm,
    device: str,
    points: list[str],
    repeats: int,
    seed: int,
    session: int = 0,
    kept: KeptWeights | None = None,
) -> list[dict[str, Any]]:
    """`repeats` rows a point: wall and (CUDA) device time in ns, the median of a few steps, with the step's shape.

    `device_ns` is 0 on the CPU, where there is no device clock.
    """
    if not points or repeats < 1:
        raise UsageError("a cost grid needs points and repeats", remedy="name one point and one repeat, or more")
    parsed = [parse_point(point) for point in points]
    runner = open_runner(arm, device, parsed, kept)
    _fill(runner, seed)
    states = []
    for index, point in enumerate(parsed):
        first_id = sum(other.batch for other in parsed[:index])
        # Times do not depend on values: what one point writes may stand where another one reads.
        states.append(BatchState(runner, point, seed + index, first_id=first_id, keeps_kv=False))
    order = random.Random(seed)
    _rounds(runner, states, order, _WARMUP_ROUNDS)
    rows = []
    for repeat in range(repeats):
        taken = _rounds(runner, states, order, _ROUNDS)
        for point, (walls, devices) in zip(parsed, taken, strict=True):
            row: dict[str, Any] = {"variant": arm.name, "point": str(point), "session": session, "repeat": repeat}
            row |= {"wall_ns": round(median(walls)), "device_ns": round(median(devices))}
            rows.append(row | asdict(StepShape.of_point(point)))
    return rows


def _rounds(
    runner: Runner, states: list[BatchState], order: random.Random, rounds: int
) -> list[tuple[list[int], list[int]]]:
    """Wall and device ns of one step of every point a round, in a new order each round.

    No step follows one of its own shape: in a replay, too, caches and allocators have just served something else.
    """
    taken: list[tuple[list[int], list[int]]] = [([], []) for _ in states]
    for _ in range(rounds):
        for index in order.sample(range(len(states)), len(states)):
            wall, on_device = clean_step(runner, states[index])
            taken[index][0].append(wall)
            taken[index][1].append(on_device)
    return taken


def _fill(runner: Runner, seed: int) -> None:
    """Random K and V everywhere but in the null page: each point then finds its history wherever its pages are."""
    size = runner.config.page_size
    flat = torch.arange(size, (runner.pages + 1) * size, device=runner.device)
    generator = torch.Generator(runner.device).manual_seed(seed)
    runner.pool.fill_random(Slots(flat, flat // size, flat % size), generator)
