"""What a step costs: the measured rows of one variant, the model fitted to them, and which points to measure.

Owns the table that replays in virtual time take step times from, its hold-out error, its file and the default grid.
It runs no step: `measure.costs` does, and hands in rows. The model itself is `step_model`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench.catalog import parse_point
from kbench.engine.step_model import (
    AXES,
    FOLDS,
    LEAST_POINTS,
    MeasuredRange,
    StepModel,
    StepShape,
    fit_model,
    folds_of,
)
from kbench.errors import EvidenceError, UsageError

__all__ = [
    "AXES",
    "CostTable",
    "HoldOut",
    "StepShape",
    "default_grid",
    "read_cost_rows",
    "write_cost_rows",
]

COSTS_VERSION = "1"


@dataclass(frozen=True, slots=True)
class HoldOut:
    """Relative errors at points that a fit had not seen; `inside` counts those within the range of its others."""

    points: int
    median: float
    worst: float
    inside: int
    inside_median: float
    inside_worst: float


class CostTable:
    """Measured rows of one variant and the model fitted to them; same rows, same nanoseconds."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], times: Mapping[StepShape, float]) -> None:
        self.rows = tuple(dict(row) for row in rows)
        self._times = dict(times)
        self._model = fit_model(times)
        self._range = MeasuredRange.of(times)

    @classmethod
    def fit(cls, rows: Iterable[Mapping[str, Any]]) -> CostTable:
        """Fit rows of one variant: `point` and `wall_ns` are used, the median where a point was measured repeatedly.

        Rows whose time is not a positive number, rows of several variants, and fewer than 4 points are refused.
        """
        kept = list(rows)
        variants = {str(row["variant"]) for row in kept if row.get("variant") is not None}
        if len(variants) > 1:
            raise UsageError(f"a cost grid of several variants: {', '.join(sorted(variants))}", remedy="choose one")
        measured: dict[StepShape, list[float]] = {}
        for row in kept:
            try:
                shape, time = StepShape.of_point(parse_point(str(row["point"]))), float(row["wall_ns"])
            except (KeyError, TypeError, ValueError) as error:
                what = f"a cost row without a usable point or wall_ns: {error}"
                raise UsageError(what, remedy="measure it again") from error
            if not 0 < time < float("inf"):
                raise UsageError(f"point {row['point']}: a step of {time} ns", remedy="measure the grid again")
            measured.setdefault(shape, []).append(time)
        if len(measured) < LEAST_POINTS:
            raise EvidenceError(
                f"a cost grid of {len(measured)} points",
                remedy=f"measure {LEAST_POINTS} or more; kbench step measures its default grid by itself",
            )
        return cls(kept, {shape: float(statistics.median(times)) for shape, times in measured.items()})

    @property
    def model(self) -> StepModel:
        return self._model

    @property
    def reach(self) -> MeasuredRange:
        """What was measured: `extrapolated` is everything else."""
        return self._range

    def residuals(self) -> tuple[float, ...]:
        """Measured over the median time of its point, for every repeated row: how much the same step varies."""
        found = []
        for row in self.rows:
            time = self._times[StepShape.of_point(parse_point(str(row["point"])))]
            found.append(float(row["wall_ns"]) / time)
        return tuple(sorted(found)) if len(found) > len(self._times) else ()

    def step_ns(self, shape: StepShape) -> int:
        """Modelled wall time of a step, in whole nanoseconds, at least 1."""
        return max(1, round(self._model.step_ns(shape)))

    def extrapolated(self, shape: StepShape) -> bool:
        """Whether the shape is outside what was measured.

        It is when any axis of `StepShape` is above the largest measured value of that axis, or when no step of its
        kind (decodes, chunks, both) was measured. Below the smallest value the fixed cost bounds the error: inside.
        """
        return not self._range.contains(shape)

    def hold_out(self, folds: int = FOLDS) -> HoldOut:
        """Leave out every `folds`-th point in turn, fit the others, predict the points left out."""
        errors: list[float] = []
        inside: list[float] = []
        for kept, left_out in folds_of(self._times, folds):
            model, reach = fit_model(kept), MeasuredRange.of(kept)
            for shape in left_out:
                error = abs(model.step_ns(shape) / self._times[shape] - 1.0)
                errors.append(error)
                if reach.contains(shape):
                    inside.append(error)
        if not errors:
            raise EvidenceError(f"{self.points} points are too few for a hold-out error", remedy="measure more points")
        return HoldOut(
            points=len(errors),
            median=statistics.median(errors),
            worst=max(errors),
            inside=len(inside),
            inside_median=statistics.median(inside) if inside else float("nan"),
            inside_worst=max(inside, default=float("nan")),
        )

    def scaled(self, factor: float) -> CostTable:
        """The same steps, all `factor` times as long: what a real replay adds to a step measured alone."""
        if not 0 < factor < float("inf"):
            raise UsageError(f"a cost scale of {factor}", remedy="use a number above 0")
        return CostTable.fit({**row, "wall_ns": factor * float(row["wall_ns"])} for row in self.rows)

    @property
    def points(self) -> int:
        return len(self._times)

    # ------------------------------------------------------------------------------------------- files

    def write_parquet(self, path: Path) -> None:
        """Write the rows with the shape of each point; whole or not at all."""
        write_cost_rows(self.rows, path)

    @classmethod
    def read_parquet(cls, path: Path, variant: str | None = None) -> CostTable:
        """Read and fit a grid; `variant` chooses one where the file holds several."""
        rows = read_cost_rows(path)
        if variant is not None:
            names = ", ".join(sorted({str(row.get("variant")) for row in rows}))
            rows = [row for row in rows if row.get("variant") == variant]
            if not rows:
                raise EvidenceError(f"no costs of variant {variant}", where=str(path), remedy=f"it has {names}")
        return cls.fit(rows)


def write_cost_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """costs.parquet: the measured rows (`variant, point, wall_ns, device_ns, session, repeat`) and their shapes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    full = []
    for row in rows:
        shape = StepShape.of_point(parse_point(str(row["point"])))
        full.append({**row, **{axis: getattr(shape, axis) for axis in AXES}})
    table = pa.Table.from_pylist(full).replace_schema_metadata({"kbench.costs.version": COSTS_VERSION})
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(path)


def read_cost_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of costs.parquet; UsageError where it is not one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"not a readable cost grid: {str(error).splitlines()[0]}", where=str(path)) from error
    version = (table.schema.metadata or {}).get(b"kbench.costs.version", b"none").decode()
    missing = {"point", "wall_ns"} - set(table.column_names)
    if version != COSTS_VERSION or missing:
        what = f"version {version}" if version != COSTS_VERSION else f"without column {', '.join(sorted(missing))}"
        raise UsageError(f"a cost grid of {what}", where=str(path), remedy="measure it with this kbench")
    found: list[dict[str, Any]] = table.to_pylist()
    return found


# ------------------------------------------------------------------------------------------------ grid


def default_grid(
    max_batched_tokens: int,
    max_seqs: int,
    max_context: int,
    max_kv_tokens: int | None = None,
    captured: Sequence[int] = (),
) -> list[str]:
    """30 to 45 points (fewer in a tiny engine) that span the steps of a scheduler with these limits.

    Decode batches × contexts, chunks × KV lengths, several short prompts at once, and both together. With
    `max_kv_tokens` no point holds more tokens of KV than that. With `captured` batch sizes decodes alone come in these:
    what lies between two of them costs what the larger does.
    """
    room = max_kv_tokens or max_seqs * max_context
    points: list[str] = []
    seqs = min(max_seqs, max_batched_tokens, room)
    for batch in _spread_over(captured, seqs, 5):
        points += [_group(batch, 1, kv) for kv in _spread(min(32, max_context), min(max_context, room // batch), 4)]
    longest = min(max_context, room)
    for chunk in _spread(2, min(max_batched_tokens, longest), 4):
        points += [_group(1, chunk, kv) for kv in _spread(chunk, longest, 3)]
    several = min(8, max_seqs, max_batched_tokens // 2, room // 2)
    if several > 1:
        kv = max(2, min(longest, room // several))
        points.append(_group(several, max(2, min(max_batched_tokens // several, kv)), kv))
    for chunk in (4, 64):
        count = min(max_seqs, max_batched_tokens // chunk, room // chunk)
        if count > 1 and chunk <= max_context:
            points.append(_group(count, chunk, chunk))
    for batch in _spread(1, max(1, min(seqs, max_batched_tokens - 2, max_seqs - 1)), 3):
        points += _mixed(batch, max_batched_tokens - batch, longest, room)
    return list(dict.fromkeys(points))


def _mixed(batch: int, budget: int, longest: int, room: int) -> list[str]:
    """Decodes beside one chunk that uses up the budget, short and long, or a small one."""
    found = []
    for context, chunk, end in ((1.0, budget, 1.0), (0.1, budget, 0.0), (0.3, max(2, budget // 8), 0.3)):
        kv = max(1, min(int(longest * context), room // (2 * batch)))
        chunk = min(chunk, budget, longest, room - kv * batch)
        if chunk >= 2:
            chunk_kv = min(max(chunk, int(longest * end)), room - kv * batch)
            found.append(f"{_group(batch, 1, kv)}+{_group(1, chunk, chunk_kv)}")
    return found


def _spread(low: int, high: int, count: int) -> list[int]:
    """Up to `count` distinct whole numbers from `low` to `high`, evenly spaced by ratio, ends included."""
    if high <= low:
        return [max(1, high)]
    return sorted({round(low * (high / low) ** (index / (count - 1))) for index in range(count)})


def _spread_over(captured: Sequence[int], high: int, count: int) -> list[int]:
    """As `_spread` from 1 on, each moved up to a captured size where there is one that is not above `high`."""
    spread = _spread(1, high, count)
    inside = sorted(size for size in captured if size <= high)
    return sorted({next((size for size in inside if size >= value), value) for value in spread})


def _group(count: int, query: int, kv: int) -> str:
    return f"{count}*{query}" + (f"@{kv}" if kv != query else "")
