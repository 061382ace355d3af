"""How much of a recorded workload's time each measured cell stands for.

Owns the assignment of recorded step shapes (`shapes` in the facts of a replay) to cells. The weights are the
baseline's: a candidate must not choose what it is judged by. It knows no thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kbench.catalog import Point, parse_point
from kbench.decide.cells import trials_of, workload_cells
from kbench.decide.evidence import Cell, Evidence
from kbench.errors import UsageError
from kbench.protocol import Status
from kbench.suite.rule_schema import Regime
from kbench.suite.schema import Suite

NEAR = 2.0
"""Powers of two by which a recorded batch may differ from a cell in sequences, queries or context."""
LEAST_COVERAGE = 0.5
"""Share of the recorded time that must lie near a measured cell for these cells to speak for the workload."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One share of the covered time a cell, in the order of the cells."""

    shares: tuple[float, ...]
    coverage: float
    """Share of the recorded time that lies near any of them."""
    source: str
    """Which replays they are from."""


def cell_weights(suite: Suite, evidence: Evidence, regime: Regime, cells: Sequence[Cell]) -> Weights | str:
    """The weights of `cells`, or why there are none."""
    if evidence.weights:
        given = tuple(evidence.weights.get(cell.point, math.nan) for cell in cells)
        total = sum(given)
        if not all(math.isfinite(share) and share >= 0.0 for share in given) or total <= 0.0:
            return "no recorded shapes weigh these cells; record a workload, or judge every cell"
        return Weights(tuple(share / total for share in given), 1.0, "given")
    recorded: list[tuple[str, float]] = []
    modes: dict[str, None] = {}
    names = [cell.point for cell in workload_cells(suite, regime, "")]
    if not names:
        return "no recorded shapes weigh these cells: the regime has no trace class"
    for name in names:
        found = _recorded(suite, evidence, name)
        if found is None:
            return f"no replay of trace class {name!r} recorded step shapes; kbench workload replays it"
        modes[found[0]] = None
        recorded += found[1]
    return _assigned(recorded, cells, f"{', '.join(modes)} replay of {', '.join(names)}")


def _recorded(suite: Suite, evidence: Evidence, name: str) -> tuple[str, list[tuple[str, float]]] | None:
    """Mode, and point and time of every bucket, of the baseline's newest replay: a real one before a modelled one."""
    for mode in ("exec", "virtual"):
        cell = Cell("workload", "replay", name, mode)
        for trial in reversed(trials_of(evidence, cell, suite.claim.baseline)):
            if trial.status == Status.OK and (rows := _rows(trial.facts.get("shapes"))):
                return mode, rows
    return None


def _rows(shapes: Any) -> list[tuple[str, float]]:
    rows = []
    for row in shapes if isinstance(shapes, list) else ():
        time_us = row.get("time_us") if isinstance(row, Mapping) else None
        if isinstance(time_us, int | float) and math.isfinite(time_us) and time_us > 0.0:
            rows.append((str(row.get("point")), float(time_us)))
    return rows


def _assigned(recorded: Sequence[tuple[str, float]], cells: Sequence[Cell], source: str) -> Weights | str:
    """Each bucket's time to the nearest cell of its kind that is near enough."""
    places = [_parsed(cell.point) for cell in cells]
    shares, total = [0.0] * len(cells), 0.0
    for text, time_us in recorded:
        bucket = _parsed(text)
        total += time_us
        distances = [
            (distance(part, place), index)
            for index, (cell, place) in enumerate(zip(cells, places, strict=True))
            if place is not None and bucket is not None and (part := _part(bucket, cell)) is not None
        ]
        nearest, index = min(distances, default=(math.inf, 0))
        if nearest <= NEAR:
            shares[index] += time_us
    covered = sum(shares)
    coverage = covered / total if total > 0.0 else 0.0
    if coverage < LEAST_COVERAGE:
        return (
            f"the cells stand for {100 * coverage:.0f} % of the recorded time ({source}), at least "
            f"{100 * LEAST_COVERAGE:.0f} % is needed; add points such as {_largest(recorded)}"
        )
    return Weights(tuple(share / covered for share in shares), coverage, source)


def _part(bucket: Point, cell: Cell) -> Point | None:
    """What of a step a cell measures: all of it at level 2, the sequences of its phase at level 1."""
    if cell.level == "step":
        return bucket
    decode = cell.op.endswith(".decode")
    kept = tuple(group for group in bucket.groups if (group.query_tokens == 1) == decode)
    return Point(kept) if kept else None


def distance(first: Point, second: Point | None) -> float:
    """The largest of the differences in sequences, queries and context, in powers of two; infinite across phases."""
    if second is None or _kind(first) != _kind(second):
        return math.inf
    pairs = zip(_axes(first), _axes(second), strict=True)
    return max(abs(math.log2(a / b)) for a, b in pairs)


def _kind(point: Point) -> tuple[bool, bool]:
    queries = [group.query_tokens for group in point.groups]
    return any(query == 1 for query in queries), any(query > 1 for query in queries)


def _axes(point: Point) -> tuple[float, float, float]:
    return float(point.batch), float(point.query_tokens), float(max(point.context, 1))


def _largest(recorded: Sequence[tuple[str, float]]) -> str:
    return max(recorded, key=lambda row: row[1])[0] if recorded else "those of the trace"


def _parsed(text: str) -> Point | None:
    try:
        return parse_point(text)
    except UsageError:
        return None
