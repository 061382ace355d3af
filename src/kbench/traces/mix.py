"""Several traces as one, each with its share of the requests.

Owns what may be put together and that ids of different traces never meet. Which requests are taken, and how their
arrivals are stretched, is `transform`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, cast

import numpy as np

from kbench.errors import UsageError
from kbench.traces.arrange import arranged
from kbench.traces.columns import COLUMNS, AnyColumn, Int64s, Ints, Lists, frozen
from kbench.traces.trace import Trace, TraceMeta
from kbench.traces.transform import check, groups, identity, rows_of, sampled, scaled


@dataclass(frozen=True, slots=True)
class Part:
    """A trace to mix in, and how many of the requests shall be its own, relative to the other parts."""

    name: str
    trace: Trace
    share: float


def mix_traces(parts: Sequence[Part], *, seed: int = 0) -> Trace:
    """As many requests as the parts allow in these shares, whole sessions or trees drawn from each.

    All parts span the duration of the longest one: the sessions of a shorter one arrive more slowly. Sessions, shared
    streams and blocks of different parts are different. Raises UsageError for parts that describe their content in
    different ways.
    """
    rules = [(isfinite(part.share) and part.share > 0, part.name, part.share, "a share above 0") for part in parts]
    check("trace mix", [(len(parts) >= 2, "parts", len(parts), "2 or more"), *rules])
    whole = sum(part.share for part in parts)
    total = min(len(part.trace) * whole / part.share for part in parts)
    traces = _alike(parts)
    spans = [int(trace.arrival_us.values.max()) for trace in traces]
    chosen: list[Mapping[str, AnyColumn]] = []
    said = []
    for index, (part, trace, span) in enumerate(zip(parts, traces, spans, strict=True)):
        wanted = max(1, round(total * part.share / whole))
        rows = np.flatnonzero(sampled(groups(trace), wanted, seed + index))
        kept = rows_of(trace, rows, trace.meta)
        ratio = span / max(spans) if span else 1.0
        chosen.append(scaled(kept, ratio, everything=False))
        said.append({"name": part.name, "requests": len(kept), "factor": ratio, **identity(part.trace)})
    meta = TraceMeta(
        source="mix of " + ", ".join(part.trace.meta.source for part in parts),
        importer="mix",
        options={"seed": seed, "parts": said},
        licence="; ".join(dict.fromkeys(part.trace.meta.licence for part in parts)),
        citation="; ".join(dict.fromkeys(part.trace.meta.citation for part in parts if part.trace.meta.citation)),
        block_tokens=traces[0].meta.block_tokens,
        dropped={f"{part.name}: {why}": n for part in parts for why, n in part.trace.meta.dropped.items()},
    )
    return arranged(_joined(chosen), meta, file="trace mix")[0]


def _alike(parts: Sequence[Part]) -> list[Trace]:
    """The traces with content described in one way: prompts that share nothing can be said in blocks too."""
    sizes = {part.trace.meta.block_tokens for part in parts if part.trace.content_kind == "blocks"}
    kinds = {part.trace.content_kind for part in parts}
    if len(kinds) == 1 and len(sizes) <= 1:
        return [part.trace for part in parts]
    plain = [_shares_nothing(part.trace) or part.trace.content_kind == "blocks" for part in parts]
    if len(sizes) != 1 or not all(plain):
        said = ", ".join(
            f"{part.name}: {part.trace.content_kind} {part.trace.meta.block_tokens or ''}" for part in parts
        )
        remedy = "mix traces of one kind, or of one block size"
        raise UsageError(f"content is described in different ways ({said})", where="trace mix", remedy=remedy)
    (size,) = sizes
    return [
        part.trace if part.trace.content_kind == "blocks" else _in_blocks(part.trace, cast("int", size))
        for part in parts
    ]


def _shares_nothing(trace: Trace) -> bool:
    prefix = trace.prefix_tokens
    shares = trace.shared_id.known.any() or (prefix.values[prefix.known] > 0).any()
    return trace.content_kind == "streams" and not shares


def _in_blocks(trace: Trace, size: int) -> Trace:
    full = trace.input_tokens // size
    ids = Lists.packed(full, np.arange(int(full.sum())), np.ones(len(trace), np.bool_))
    nothing = Ints(frozen(np.zeros(len(trace), np.int64)), frozen(np.zeros(len(trace), np.bool_)))
    meta = replace(trace.meta, block_tokens=size)
    return replace(trace, block_ids=ids, prefix_tokens=nothing, meta=meta)


def _joined(parts: Sequence[Mapping[str, AnyColumn]]) -> dict[str, AnyColumn]:
    """The rows of all parts, ids of each beyond those of the ones before it."""
    rows = np.cumsum([0, *(len(cast("Int64s", part["input_tokens"])) for part in parts)])
    joined: dict[str, AnyColumn] = {}
    for spec in COLUMNS:
        if spec.name == "request_id":
            continue
        cells: list[Any] = [part[spec.name] for part in parts]
        if spec.name == "parent_ids":
            cells = [_shifted(each, int(first)) for each, first in zip(cells, rows[:-1], strict=True)]
        elif spec.name in ("session_id", "shared_id") or spec.name == "block_ids":
            cells = _apart(cells)
        joined[spec.name] = _concatenated(cells)
    return joined


def _shifted(column: Any, by: int) -> Any:
    if isinstance(column, np.ndarray):
        return frozen(column + by)
    if isinstance(column, Lists):
        return Lists(column.offsets, frozen(column.values.astype(np.int64) + by), column.known)
    return Ints(frozen(np.where(column.known, column.values + by, 0)), column.known)


def _apart(cells: Sequence[Any]) -> list[Any]:
    """Ids renumbered 0, 1, 2… through all the parts."""
    used, out = 0, []
    for column in cells:
        values = column if isinstance(column, np.ndarray) else column.values
        known = np.ones(values.size, np.bool_) if not isinstance(column, Ints) else column.known
        ids, dense = np.unique(values[known], return_inverse=True)
        renumbered = np.zeros(values.size, np.int64)
        renumbered[known] = used + dense
        used += ids.size
        if isinstance(column, np.ndarray):
            out.append(frozen(renumbered))
        else:
            out.append(replace(column, values=frozen(renumbered)))
    return out


def _concatenated(cells: Sequence[Any]) -> AnyColumn:
    first = cells[0]
    if isinstance(first, tuple):
        return tuple(text for column in cells for text in column)
    if isinstance(first, np.ndarray):
        return frozen(np.concatenate(cells))
    known = np.concatenate([column.known for column in cells])
    values = np.concatenate([column.values for column in cells])
    if isinstance(first, Lists):
        return Lists.packed(np.concatenate([column.lengths for column in cells]), values, known)
    return cast("AnyColumn", type(first)(frozen(values), frozen(known)))
