"""Traces from traces: cut out, thinned, faster or slower. (`mix` puts several together.)

Requests are taken by whole sessions or whole prefix trees, never one by one: a row without its parent, or a prompt
without the one that it repeats, is another workload. Everything is seeded, and what was done, to which content, goes
into the metadata of the result. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, cast

import numpy as np

from kbench.errors import UsageError
from kbench.traces.arrange import arranged, take
from kbench.traces.columns import COLUMNS, AnyColumn, Int64s, Ints, Lists, frozen
from kbench.traces.integrity import check_trace
from kbench.traces.trace import Trace, TraceMeta

TRUNK_SHARE = 0.05  # a block in more of the requests than this belongs to no tree: a system prompt that many share


def slice_trace(
    trace: Trace,
    *,
    from_s: float = 0.0,
    to_s: float | None = None,
    sessions: int | None = None,
    sample: float = 1.0,
    seed: int = 0,
) -> Trace:
    """Sessions that start from `from_s` on and before `to_s`, the first `sessions` of them, a seeded share of these.

    A session that began in time is whole, also where it goes on later. `sample` is a share of the requests; with block
    ids it takes whole prefix trees, else whole sessions. Time zero is the first arrival that is left.
    Raises UsageError for an option out of its range and where nothing is left.
    """
    rules = (
        (isfinite(from_s) and from_s >= 0, "from_s", from_s, "0 or more"),
        (to_s is None or to_s > from_s, "to_s", to_s, "later than from_s"),
        (sessions is None or sessions >= 1, "sessions", sessions, "1 or more"),
        (0.0 < sample <= 1.0, "sample", sample, "above 0 and at most 1"),
        (0 <= seed < 2**63, "seed", seed, "0 or more"),
    )
    check("trace slice", rules)
    starts, session = _session_starts(trace)
    chosen = starts >= from_s * 1e6
    if to_s is not None:
        chosen &= starts < to_s * 1e6
    if sessions is not None:
        first = np.flatnonzero(chosen)[np.argsort(starts[chosen], kind="stable")][:sessions]
        chosen = np.isin(np.arange(starts.size), first)
    rows = np.flatnonzero(chosen[session])
    if rows.size and sample < 1.0:
        rows = rows[sampled(groups(trace)[rows], round(sample * rows.size), seed)]
    if not rows.size:
        raise UsageError("no session is left", where="trace slice", remedy="widen --from-s and --to-s")
    done = {"from_s": from_s, "to_s": to_s, "sessions": sessions, "sample": sample, "seed": seed}
    return rows_of(trace, rows, _meta(trace, "slice", done))


def scale_trace(
    trace: Trace, *, factor: float | None = None, rate: float | None = None, everything: bool = False
) -> Trace:
    """Sessions arrive `factor` times as often, or so that there are `rate` requests a second.

    Inside a session times stay as they are, unless `everything` is to be faster: think times and recorded durations
    too. Raises UsageError where not one of both is given, or for a rate of a trace that has none.
    """
    if (factor is None) == (rate is None):
        raise UsageError("one of --factor and --rate is needed", where="trace scale", remedy="e.g. --factor 2")
    known = trace.arrival_us.values[trace.arrival_us.known]
    duration_s = int(known.max() - known.min()) / 1e6
    if rate is not None and not duration_s:
        raise UsageError("all requests arrive at once: there is no rate", where="trace scale", remedy="use --factor")
    ratio = factor if factor is not None else cast("float", rate) * duration_s / len(trace)
    check("trace scale", [(isfinite(ratio) and 1e-6 <= ratio <= 1e6, "factor", ratio, "between 1e-6 and 1e6")])
    columns = scaled(trace, ratio, everything)
    done = {"factor": ratio, "rate": rate, "everything": everything}
    return arranged(columns, _meta(trace, "scale", done), file=trace.meta.source)[0]


def check(where: str, rules: Sequence[tuple[bool, str, Any, str]]) -> None:
    for holds, name, value, wanted in rules:
        if not holds:
            raise UsageError(f"{name} = {value!r}", where=where, remedy=f"must be {wanted}")


def identity(trace: Trace) -> dict[str, Any]:
    return {"sha256": trace.sha256, "importer": trace.meta.importer, "options": dict(trace.meta.options)}


def _meta(trace: Trace, operation: str, done: Mapping[str, Any]) -> TraceMeta:
    return replace(trace.meta, importer=operation, options={**done, "of": identity(trace)})


# --------------------------------------------------------------------------------------------- choosing rows


def _session_starts(trace: Trace) -> tuple[Int64s, Int64s]:
    """The first known arrival of each session, and the number of each row's session. A first request has an arrival."""
    _, session = np.unique(trace.session_id, return_inverse=True)
    starts = np.full(int(session.max()) + 1, np.iinfo(np.int64).max)
    known = trace.arrival_us.known
    np.minimum.at(starts, session[known], trace.arrival_us.values[known])
    return starts, session


def groups(trace: Trace) -> Int64s:
    """A number for each row, equal for rows that must stay together."""
    _, session = np.unique(trace.session_id, return_inverse=True)
    if trace.content_kind != "blocks" or not trace.block_ids.values.size:
        return session
    ids, index, counts = np.unique(trace.block_ids.values, return_inverse=True, return_counts=True)
    is_trunk = np.concatenate(([0], np.cumsum(counts[index] > TRUNK_SHARE * len(trace))))
    # Fewer requests have a longer prefix, so the trunk's blocks are the first ones.
    first = (
        trace.block_ids.offsets[:-1] + is_trunk[trace.block_ids.offsets[1:]] - is_trunk[trace.block_ids.offsets[:-1]]
    )
    has_tree = first < trace.block_ids.offsets[1:]
    tree = np.full(len(trace), -1)
    tree[has_tree] = index[first[has_tree]]
    group = session.copy()
    while True:  # a session may reach into more than one tree: those stay together too
        least = np.full(ids.size, len(trace))
        np.minimum.at(least, tree[has_tree], group[has_tree])
        joined = group.copy()
        joined[has_tree] = least[tree[has_tree]]
        of_session = np.full(int(session.max()) + 1, len(trace))
        np.minimum.at(of_session, session, joined)
        if np.array_equal(of_session[session], group):
            return group
        group = of_session[session]


def sampled(group: Int64s, wanted: int, seed: int) -> np.typing.NDArray[np.bool_]:
    """Rows of groups in a seeded order until there are `wanted`; at least one group."""
    _, dense, sizes = np.unique(group, return_inverse=True, return_counts=True)
    order = np.argsort(np.random.PCG64(seed).random_raw(sizes.size), kind="stable")
    before = np.cumsum(sizes[order]) - sizes[order]
    taken = np.zeros(sizes.size, np.bool_)
    taken[order[before < max(1, wanted)]] = True
    chosen: np.typing.NDArray[np.bool_] = taken[dense]
    return chosen


def rows_of(trace: Trace, rows: Int64s, meta: TraceMeta) -> Trace:
    """These rows in their order, from a time zero of their own. Parents of a row are among them."""
    columns: dict[str, Any] = {spec.name: take(getattr(trace, spec.name), rows) for spec in COLUMNS}
    place = np.full(len(trace), -1)
    place[rows] = np.arange(rows.size)
    parents: Lists = columns["parent_ids"]
    columns["parent_ids"] = Lists.packed(parents.lengths, place[parents.values.astype(np.int64)], parents.known)
    columns["request_id"] = frozen(np.arange(rows.size))
    arrival: Ints = columns["arrival_us"]
    least = arrival.values[arrival.known].min()
    columns["arrival_us"] = Ints(frozen(np.where(arrival.known, arrival.values - least, 0)), arrival.known)
    kept = Trace(**columns, meta=meta)
    check_trace(kept, file=meta.source)
    return kept


# --------------------------------------------------------------------------------------------- times and ids


def scaled(trace: Trace, ratio: float, everything: bool) -> dict[str, AnyColumn]:
    columns: dict[str, AnyColumn] = {spec.name: getattr(trace, spec.name) for spec in COLUMNS}
    if everything:
        for name in ("arrival_us", "think_us", "recorded_duration_us"):
            column = cast("Ints", columns[name])
            columns[name] = Ints(frozen(np.rint(column.values / ratio).astype(np.int64)), column.known)
        return columns
    starts, session = _session_starts(trace)
    moved = np.rint(starts / ratio).astype(np.int64) - starts
    arrival = trace.arrival_us
    columns["arrival_us"] = Ints(frozen(np.where(arrival.known, arrival.values + moved[session], 0)), arrival.known)
    return columns
