"""What a trace is in memory: columns, where they came from, one row as a view, and a hash of the content.

Owns `Trace`, `TraceMeta`, `RequestRow` and the canonical hash. It reads and writes no file (`schema` does) and does not
judge the content (`integrity` does); `trace_from_rows` is the way in for importers and synthesis and does both steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from kbench.traces.columns import COLUMNS, Floats, Int64s, Ints, Lists, canonical_parts, column_of

TRACE_VERSION = "1"
BLOCK_ID_SEMANTICS = "chain: an id names the whole prefix up to the end of its block; full blocks only"
MAX_SEQUENCE_TOKENS = 2**24

ContentKind = Literal["streams", "blocks", "tokens"]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TraceMeta:
    """Where a trace came from and what was done to it. None of it but `block_tokens` changes the content's hash."""

    source: str
    importer: str
    options: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    source_sha256: str | None = None
    licence: str = "unknown"
    citation: str = ""
    block_tokens: int | None = None
    dropped: Mapping[str, int] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One model call. None is "not recorded"; `trace.row(i)` makes these on demand, importers hand them in."""

    session_id: int
    input_tokens: int
    output_tokens: int
    request_id: int = 0  # trace_from_rows numbers rows itself
    turn: int = 0
    parent_ids: tuple[int, ...] = ()
    arrival_us: int | None = None
    think_us: int | None = None
    recorded_duration_us: int | None = None
    prefix_tokens: int | None = None
    shared_id: int | None = None
    shared_tokens: int | None = None
    block_ids: Sequence[int] | None = None
    tail_id: int | None = None
    token_ids: Sequence[int] | None = None
    output_token_ids: Sequence[int] | None = None
    regime: str | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """A workload in file order, one entry a request in every column (`request_id[i] == i`).

    A request without parents starts at `arrival_us`. One with parents starts `think_us` after the last of them ends,
    and not before its `arrival_us` where both are known. `output_tokens` is a forced length. Content is described in
    one of three ways for the whole trace (`content_kind`); who owns which token follows from it in `content`.
    """

    request_id: Int64s
    session_id: Int64s
    turn: Int64s
    parent_ids: Lists
    arrival_us: Ints
    think_us: Ints
    recorded_duration_us: Ints
    input_tokens: Int64s
    output_tokens: Int64s
    prefix_tokens: Ints  # of the first parent's input and output, kept at the head of this prompt
    shared_id: Ints
    shared_tokens: Ints  # at the head of the prompt, the same for every request of this shared_id
    block_ids: Lists
    tail_id: Ints
    token_ids: Lists
    output_token_ids: Lists
    regime: tuple[str | None, ...]
    ttft_slo_ms: Floats
    tpot_slo_ms: Floats
    meta: TraceMeta

    def __len__(self) -> int:
        return len(self.request_id)

    def row(self, request: int) -> RequestRow:
        """One request as a value; arrays of ids are views into the trace."""
        cells = {spec.name: _cell(getattr(self, spec.name), request) for spec in COLUMNS}
        parents = cells.pop("parent_ids")
        return RequestRow(parent_ids=tuple(int(parent) for parent in parents), **cells)

    def rows(self) -> Iterator[RequestRow]:
        return (self.row(request) for request in range(len(self)))

    def parents(self, request: int) -> list[int]:
        start, stop = self.parent_ids.offsets[request], self.parent_ids.offsets[request + 1]
        return [int(parent) for parent in self.parent_ids.values[start:stop]]

    @property
    def content_kind(self) -> ContentKind:
        """`blocks`: chain ids of full blocks; `tokens`: the exact prompts; `streams`: shared and inherited ranges."""
        if self.block_ids.known.any():
            return "blocks"
        return "tokens" if self.token_ids.known.any() else "streams"

    @cached_property
    def sha256(self) -> str:
        """Hash of the content: what a replay would do. Encoding, library versions and provenance do not change it."""
        digest = hashlib.sha256(f"kbench.trace/{TRACE_VERSION} {len(self)}".encode())
        if self.content_kind == "blocks":
            digest.update(f" block_tokens={self.meta.block_tokens}".encode())
        for spec in COLUMNS:
            # A column that says nothing is left out, so that a later optional column changes no existing hash.
            if parts := canonical_parts(getattr(self, spec.name)):
                digest.update(f"\n{spec.name} {spec.kind.value} {sum(map(len, parts))}\n".encode())
                for part in parts:
                    digest.update(part)
        return digest.hexdigest()


def _cell(column: Any, index: int) -> Any:
    if isinstance(column, (Ints, Floats, Lists)):
        return column.get(index)
    value = column[index]
    return value if isinstance(value, str) or value is None else int(value)


def trace_from_rows(
    rows: Sequence[RequestRow], meta: TraceMeta, *, file: str = "", lines: Sequence[int] | None = None
) -> Trace:
    """Columns from rows, numbered in their order, and checked. `file` and `lines` say where errors should point.

    Raises TraceError where the rows do not make a trace (see `integrity.check_trace`).
    """
    from kbench.traces.integrity import check_trace

    columns: dict[str, Any] = {
        spec.name: column_of(spec, [getattr(row, spec.name) for row in rows])
        for spec in COLUMNS
        if spec.name != "request_id"
    }
    columns["request_id"] = column_of(COLUMNS[0], range(len(rows)))
    trace = Trace(**columns, meta=meta)
    check_trace(trace, file=file or meta.source, lines=lines)
    return trace
