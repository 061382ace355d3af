"""From rough columns to a trace: rows put in file order, numbered, counted from time zero, checked.

Owns the order of a trace's rows. Importers and transforms hand in columns whose parents are row numbers of their own
order; what comes out satisfies `integrity` or is refused by it. It knows no format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from kbench.errors import TraceError
from kbench.traces.columns import COLUMNS, AnyColumn, Floats, Int64s, Ints, Lists, frozen, unknown
from kbench.traces.integrity import check_trace
from kbench.traces.trace import Trace, TraceMeta

STEP_US = 20_000  # assumed for one output token where a later turn must be put in file order and nobody recorded more


def take(column: AnyColumn, rows: Int64s) -> AnyColumn:
    """The cells of `rows`, in that order."""
    if isinstance(column, tuple):
        return tuple(column[row] for row in rows.tolist())
    if isinstance(column, np.ndarray):
        return frozen(column[rows])
    if isinstance(column, Lists):
        lengths, slots = slots_of(column.offsets, rows)
        return Lists.packed(lengths, column.values[slots], column.known[rows])
    known = frozen(column.known[rows])
    if isinstance(column, Floats):
        return Floats(frozen(column.values[rows]), known)
    return Ints(frozen(column.values[rows]), known)


def known_ints(values: Int64s) -> Ints:
    """A column without unknown cells."""
    return Ints(frozen(values), frozen(np.ones(values.size, np.bool_)))


def no_parents(count: int) -> Lists:
    nothing = np.zeros(count, np.int64)
    return Lists.packed(nothing, np.zeros(0, np.int64), np.ones(count, np.bool_))


def arranged(
    columns: Mapping[str, AnyColumn], meta: TraceMeta, *, file: str, lines: Sequence[int] | None = None
) -> tuple[Trace, Int64s]:
    """The trace, and for each of its rows the rough row that it was.

    `columns` needs session_id (any numbers), arrival_us, input_tokens and output_tokens; without `turn`, turns follow
    from the parents. Rows are ordered by arrival, or by an assumed start where only a think time is known; parents come
    first.
    Raises TraceError for parents that lead back to themselves, for a child that arrives before its parent, and for what
    `integrity.check_trace` refuses.
    """
    given = {name: column for name, column in columns.items() if name != "request_id"}
    count = len(cast("Int64s", given["input_tokens"]))
    parents = cast("Lists", given.setdefault("parent_ids", no_parents(count)))
    depth, nominal = _starts(given, parents, file, lines)
    order = np.lexsort((depth, nominal))
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    given.setdefault("turn", depth)
    moved = not np.array_equal(order, np.arange(count))
    filled: dict[str, Any] = {}
    for spec in COLUMNS:
        column = given.get(spec.name)
        if column is not None:
            filled[spec.name] = take(column, order) if moved else column
        else:
            filled[spec.name] = frozen(np.arange(count)) if spec.name == "request_id" else unknown(spec, count)
    if parents.values.size:
        inherited: Lists = filled["parent_ids"]
        renumbered = place[inherited.values.astype(np.int64)]
        filled["parent_ids"] = Lists.packed(inherited.lengths, renumbered, inherited.known)
    filled["session_id"] = _dense(filled["session_id"])
    filled["arrival_us"] = _from_zero(filled["arrival_us"])
    trace = Trace(**filled, meta=meta)
    if lines is not None and moved:
        lines = np.asarray(lines)[order].tolist()
    check_trace(trace, file=file, lines=lines)
    return trace, order


def _dense(ids: Int64s) -> Int64s:
    """Ids 0, 1, 2… in the order of their first row."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(first.size, np.int64)
    rank[np.argsort(first)] = np.arange(first.size)
    return frozen(rank[inverse])


def _from_zero(arrivals: Ints) -> Ints:
    if not arrivals.known.any():
        return arrivals
    least = arrivals.values[arrivals.known].min()
    return Ints(frozen(np.where(arrivals.known, arrivals.values - least, 0)), arrivals.known)


def _starts(
    columns: Mapping[str, AnyColumn], parents: Lists, file: str, lines: Sequence[int] | None
) -> tuple[Int64s, Int64s]:
    """Depth of each row below its first ancestor, and its assumed start."""
    arrival = cast("Ints", columns["arrival_us"])
    start = np.array(arrival.values)
    depth = np.zeros(start.size, np.int64)
    if not parents.values.size:
        return depth, start
    child, parent = parents.row_of_values(), parents.values.astype(np.int64)
    late = np.flatnonzero(arrival.known[child] & arrival.known[parent] & (start[parent] > start[child]))
    if late.size:
        edge = int(late[0])
        what = f"arrives before its parent, which stands in line {_line(lines, parent[edge])}"
        remedy = "correct the times or the parent"
        raise TraceError(what, file=file, line=_line(lines, child[edge]), field="arrival", remedy=remedy)
    levels = _parents_first(parents, child, parent, file, lines)
    ends = _lasts(columns)
    think = cast("Ints | None", columns.get("think_us"))
    for level, rows in enumerate(levels[1:], start=1):
        depth[rows] = level
        guessed = rows[~arrival.known[rows]]
        counts, edges = slots_of(parents.offsets, guessed)
        above = parent[edges]
        if guessed.size:
            firsts = np.cumsum(counts) - counts
            start[guessed] = np.maximum.reduceat(start[above] + ends[above], firsts)
            start[guessed] += think.values[guessed] if think is not None else 0
    # A parent whose start was assumed may not be put behind a child whose arrival is known.
    for rows in reversed(levels[1:]):
        counts, edges = slots_of(parents.offsets, rows)
        above, below = parent[edges], np.repeat(start[rows], counts)
        free = ~arrival.known[above]
        np.minimum.at(start, above[free], below[free])
    return depth, start


def _lasts(columns: Mapping[str, AnyColumn]) -> Int64s:
    """How long each request is taken to last."""
    assumed = cast("Int64s", columns["output_tokens"]) * STEP_US
    duration = cast("Ints | None", columns.get("recorded_duration_us"))
    return assumed if duration is None else np.where(duration.known, duration.values, assumed)


def _line(lines: Sequence[int] | None, row: int) -> int:
    return int(lines[row]) if lines is not None else int(row) + 1


def slots_of(offsets: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
    """How many values each of the lists `rows` has, and where all of them stand."""
    counts = offsets[rows + 1] - offsets[rows]
    return counts, np.repeat(offsets[rows] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def _parents_first(
    parents: Lists, child: Int64s, parent: Int64s, file: str, lines: Sequence[int] | None
) -> list[Int64s]:
    """Rows by level: those without parents, then those all of whose parents stand in levels before (Kahn 1962)."""
    waiting = np.array(parents.lengths)
    by_parent = child[np.argsort(parent, kind="stable")]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(parent, minlength=waiting.size))))
    levels = [np.flatnonzero(waiting == 0)]
    while levels[-1].size:
        children = by_parent[slots_of(offsets, levels[-1])[1]]
        np.subtract.at(waiting, children, 1)
        levels.append(np.unique(children[waiting[children] == 0]))
    if waiting.any():
        line = _line(lines, int(np.argmax(waiting > 0)))
        what, remedy = "its parents lead back to itself", "break the cycle"
        raise TraceError(what, file=file, line=line, field="parent_ids", remedy=remedy)
    return levels[:-1]
