"""Shapes from files: a list of one's own, what a workload had, what FlashInfer traced.

Owns the types and the expansion of `[kernel]`: shapes from files become points of the suite, how often each is called
stays beside it. The formats are `suite.shape_files`, `suite.recorded` and `suite.flashinfer`; what is concluded from
the weights is `decide.summary`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kbench.catalog import Point, operation, parse_shape
from kbench.errors import UsageError

if TYPE_CHECKING:
    from kbench.suite.schema import KernelLevel, Suite

MOST_SHAPES = 12
"""Shapes that are measured of a recording, those of most time first; the rest counts in the coverage alone."""
ENOUGH = 0.95
"""Share of the recorded time behind which no more shapes are taken."""
FILES = ("shapes", "recorded", "definition", "workload")
"""Keys of `[kernel]` that name files; their content is locked."""


@dataclass(frozen=True, slots=True)
class Row:
    """One shape, how often it was called, and the time in µs that its calls took together."""

    shape: str
    calls: float
    time_us: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a file says about how often which shape is called."""

    rows: tuple[Row, ...]
    source: str
    """Which file, and what of it."""
    steps: bool
    """Rows are whole engine steps, rounded: an operation sees its part of each. Otherwise they are its own shapes."""
    timed: bool
    """Whether `time_us` was recorded; otherwise it is 0 and calls alone say what matters."""
    notes: tuple[str, ...] = ()

    def weight(self, row: Row) -> float:
        return row.time_us if self.timed else row.calls


def merged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Each shape once, in the order of first appearance."""
    found: dict[str, Row] = {}
    for row in rows:
        have = found.get(row.shape)
        found[row.shape] = row if have is None else Row(row.shape, have.calls + row.calls, have.time_us + row.time_us)
    return tuple(found.values())


def part_of(point: Point, op: str) -> Point | None:
    """What of a batch an operation sees: the sequences of its phase, or all of them; None where there are none."""
    batches = operation(op).batches
    if batches == "none":
        return None
    if batches == "any":
        return point
    kept = tuple(group for group in point.groups if (group.query_tokens == 1) == (batches == "decode"))
    return Point(kept) if kept else None


def expanded(suite: Suite, root: Path) -> tuple[Suite, Recorded | None]:
    """The suite with the shapes of its files among its points, and what the files say about their calls."""
    level = suite.kernel
    if level is None or not any(getattr(level, key) for key in FILES):
        return suite, None
    recorded = _read(level, suite.claim.baseline, root)
    own = tuple(level.points)
    more = tuple(dict.fromkeys(_chosen(level, recorded))) if not (recorded.steps and own) else ()
    points = tuple(dict.fromkeys((*own, *more)))
    if not points:
        raise UsageError(
            f"no shape of {recorded.source} fits {', '.join(level.ops)}", remedy="name other ops, or add points"
        )
    return suite.model_copy(update={"kernel": level.model_copy(update={"points": points})}), recorded


def _read(level: KernelLevel, baseline: str, root: Path) -> Recorded:
    from kbench.suite import flashinfer, recorded, shape_files

    named = [key for key in ("shapes", "recorded", "definition") if getattr(level, key)]
    if len(named) > 1:
        raise UsageError(
            f"{' and '.join(named)} exclude each other", remedy="keep one: each says how often shapes occur"
        )
    if bool(level.definition) != bool(level.workload):
        raise UsageError("a definition needs a workload, and a workload a definition", remedy="name both files")
    if level.definition and level.workload:
        found = flashinfer.read(root / level.definition, root / level.workload)
        if found.definition.op not in level.ops:
            raise UsageError(
                f"{level.definition} defines {found.definition.op}, which is not among the ops",
                remedy=f'ops = ["{found.definition.op}"]',
            )
        return found.recorded
    if level.recorded:
        return recorded.read(level.recorded, baseline, root)
    return shape_files.read(root / str(level.shapes))


def _chosen(level: KernelLevel, recorded: Recorded) -> list[str]:
    """The shapes to measure: all of a list of one's own, those of most weight of a recording."""
    if not recorded.steps:
        ranked = sorted(recorded.rows, key=lambda row: -recorded.weight(row))
        return [row.shape for row in ranked[: max(MOST_SHAPES, len(ranked) if level.shapes else 0)]]
    found: list[str] = []
    for op in level.ops:
        found += _largest(recorded, op)
    return found


def _largest(recorded: Recorded, op: str) -> list[str]:
    parts: list[Row] = []
    for row in recorded.rows:
        point = parse_shape(row.shape).point
        part = part_of(point, op) if point is not None else None
        if part is not None:
            parts.append(Row(str(part), row.calls, row.time_us))
    ranked = sorted(merged(parts), key=lambda row: -recorded.weight(row))
    total, taken = sum(recorded.weight(row) for row in ranked), 0.0
    found: list[str] = []
    for row in ranked[:MOST_SHAPES]:
        if taken >= ENOUGH * total:
            break
        found.append(row.shape)
        taken += recorded.weight(row)
    return found
