"""A kernel run in one line an operation: what it saves of the recorded calls, where it wins, where it loses.

Owns the weights: calls × the baseline's measured time. Latencies are never averaged over shapes: where nobody said how
often each shape is called there is no speed-up of the whole, only counts. It gates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbench.catalog import parse_shape
from kbench.decide.cells import FAILED, trials_of
from kbench.decide.comparison import Comparison, compare
from kbench.decide.estimate import Sessions, Unusable
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import number
from kbench.decide.shapes import NEAR, distance
from kbench.decide.timing import estimate_cell
from kbench.plan import model_label
from kbench.protocol import Status
from kbench.stats import session_interval
from kbench.suite.schema import Suite
from kbench.suite.shapes import Recorded, Row, merged, part_of

COUNTS = {"faster": "wins", "slower": "losses", "equivalent": "ties", "inconclusive": "inconclusive"}


@dataclass(frozen=True, slots=True)
class _Measured:
    comparison: Comparison
    failed: bool
    baseline_us: float
    """Median of the baseline's windows; NaN where there is none."""
    sessions: Sessions | None


@dataclass(frozen=True, slots=True)
class _Covered:
    """Of one operation: measured cells with the baseline's time in the calls that each stands for."""

    parts: tuple[tuple[float, _Measured], ...]
    covered: float
    total: float


def kernel_summary(suite: Suite, evidence: Evidence, recorded: Recorded | None = None) -> dict[str, Any]:
    """`summary` of `kbench kernel --json`: all operations together, and each by itself under `ops`.

    `recorded`: what files of `[kernel]` say; without it the suite's own replays of level 3 speak, where there are any.
    """
    known = recorded or _replayed(suite, evidence)
    ops: dict[str, list[_Measured]] = {}
    for cell in evidence.cells("kernel"):
        ops.setdefault(cell.op, []).append(_measured(suite, evidence, cell))
    found = {op: _covering(op, cells, known) for op, cells in ops.items()}
    return {
        **_counts(suite, [item for cells in ops.values() for item in cells]),
        **_weighted(list(found.values())),
        "weights": None if known is None else known.source,
        "ops": {op: {**_counts(suite, cells), **_weighted([found[op]])} for op, cells in ops.items()},
    }


def _measured(suite: Suite, evidence: Evidence, cell: Cell) -> _Measured:
    compared = compare(suite, evidence, cell)
    values = evidence.series(cell, "latency", suite.claim.baseline).value
    found = estimate_cell(suite, evidence, cell, "latency")
    failed = any(trial.status in FAILED for trial in trials_of(evidence, cell, suite.claim.candidate))
    usable = None if isinstance(found, Unusable) or not math.isfinite(compared.point) else found
    return _Measured(compared, failed, float(np.median(values)) if len(values) else math.nan, usable)


def _counts(suite: Suite, cells: Sequence[_Measured]) -> dict[str, Any]:
    counts = dict.fromkeys(COUNTS.values(), 0) | {"failed": 0}
    for item in cells:
        counts["failed" if item.failed else COUNTS[item.comparison.verdict]] += 1
    slower = [item.comparison for item in cells if item.comparison.point > 1.0 and not item.failed]
    worst = max(slower, key=lambda found: found.point, default=None)
    return {"cases": len(cells), **counts, "worst_regression": None if worst is None else _named(suite, worst)}


def _named(suite: Suite, found: Comparison) -> dict[str, Any]:
    return {
        "case": f"kernel/{found.cell.op}/{model_label(suite.model)}/{found.cell.point}",
        "ratio": number(found.point),
        "low": number(found.low),
        "high": number(found.high),
        "verdict": found.verdict,
    }


def _covering(op: str, cells: Sequence[_Measured], recorded: Recorded | None) -> _Covered:
    """Which recorded calls each measured cell stands for."""
    rows = () if recorded is None else _seen(op, recorded)
    able = [item for item in cells if item.sessions is not None and item.baseline_us > 0.0 and not item.failed]
    calls, covered = [0.0] * len(able), 0.0
    for row in rows:
        place = _nearest(row.shape, able, exact=recorded is not None and not recorded.steps)
        if place is not None and recorded is not None:
            calls[place] += row.calls
            covered += recorded.weight(row)
    total = sum(recorded.weight(row) for row in rows) if recorded is not None else 0.0
    parts = tuple((count * item.baseline_us, item) for count, item in zip(calls, able, strict=True) if count > 0.0)
    return _Covered(parts, covered, total)


def _weighted(groups: Sequence[_Covered]) -> dict[str, Any]:
    """The speed-up of all recorded calls that a measured cell stands for, and how much of the recording that is."""
    total = sum(group.total for group in groups)
    coverage = sum(group.covered for group in groups) / total if total > 0.0 else None
    parts = [part for group in groups for part in group.parts]
    whole = sum(time_us for time_us, _ in parts)
    if not whole > 0.0:
        return {"speedup": None, "low": None, "high": None, "saving": None, "shape_coverage": coverage}
    kept = [(time_us / whole, item) for time_us, item in parts]
    ratio = sum(share * item.comparison.point for share, item in kept)
    low, high = _interval(kept)
    return {
        "speedup": number(1.0 / ratio),
        "low": number(1.0 / high),
        "high": number(1.0 / low),
        "saving": number(1.0 - ratio),
        "shape_coverage": coverage,
    }


def _interval(kept: Sequence[tuple[float, _Measured]]) -> tuple[float, float]:
    """95 % limits of the ratio of weighted times, by t over the sessions that have every cell."""
    sessions = [item.sessions for _, item in kept if item.sessions is not None]
    common = sessions[0].session
    for own in sessions[1:]:
        common = np.intersect1d(common, own.session)
    if len(common) < 2:
        return math.nan, math.nan
    whole = np.zeros(len(common))
    for (share, _), own in zip(kept, sessions, strict=True):
        whole += share * np.exp(own.estimate[np.isin(own.session, common)])
    found = session_interval(np.log(whole))
    return math.exp(min(found.low, 700.0)), math.exp(min(found.high, 700.0))


def _seen(op: str, recorded: Recorded) -> tuple[Row, ...]:
    """What the operation sees of each row: of a step the sequences of its phase."""
    if not recorded.steps:
        return recorded.rows
    parts: list[Row] = []
    for row in recorded.rows:
        point = parse_shape(row.shape).point
        part = part_of(point, op) if point is not None else None
        if part is not None:
            parts.append(Row(str(part), row.calls, row.time_us))
    return merged(parts)


def _nearest(shape: str, cells: Sequence[_Measured], *, exact: bool) -> int | None:
    if exact:
        return next((place for place, item in enumerate(cells) if item.comparison.cell.point == shape), None)
    wanted = parse_shape(shape).point
    if wanted is None:
        return None
    found = [
        (distance(wanted, own.point if own.is_batch else None), place)
        for place, own in enumerate(parse_shape(item.comparison.cell.point) for item in cells)
    ]
    nearest, place = min(found, default=(math.inf, 0))
    return place if nearest <= NEAR else None


def _replayed(suite: Suite, evidence: Evidence) -> Recorded | None:
    """The steps of the suite's own replays of the baseline: real ones, else modelled ones; the newest of each trace."""
    rows: list[Row] = []
    names: dict[str, None] = {}
    for name in suite.workload.traces if suite.workload else ():
        for mode in ("exec", "virtual"):
            trials = trials_of(evidence, Cell("workload", "replay", name, mode), suite.claim.baseline)
            found = next((own for trial in reversed(trials) if trial.status == Status.OK and (own := _rows(trial))), ())
            if found:
                rows += found
                names[f"{mode} replay of {name}"] = None
                break
    return Recorded(merged(rows), ", ".join(names), steps=True, timed=True) if rows else None


def _rows(trial: Any) -> tuple[Row, ...]:
    listed = trial.facts.get("shapes")
    found = []
    for row in listed if isinstance(listed, list) else ():
        calls, time_us = (_number(row.get(key) if isinstance(row, Mapping) else None) for key in ("calls", "time_us"))
        if calls > 0.0 and time_us > 0.0:
            found.append(Row(str(row["point"]), calls, time_us))
    return tuple(found)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
