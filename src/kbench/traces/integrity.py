"""What must hold between the columns of a trace before anything may be measured with it.

Owns the checks and their wording; each failure is a TraceError with the file, the row or source line, the field and
what to do. It knows nothing of Parquet and repairs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbench.errors import TraceError
from kbench.traces.columns import Bools, Ints, Lists
from kbench.traces.trace import MAX_SEQUENCE_TOKENS, Trace

MAX_TIME_US = 10 * 366 * 86_400 * 1_000_000  # ten years: what lies beyond is a wrong timestamp

_INT32 = 2**31 - 1
_VALUES_AT_ONCE = 2**21


@dataclass(frozen=True, slots=True)
class _Place:
    """Turns a row into the place that an error names: a line of the source, or the row number counted from 1."""

    file: str
    lines: Sequence[int] | None

    def error(self, row: int, field: str, what: str, remedy: str = "") -> TraceError:
        line = int(self.lines[row]) if self.lines is not None else row + 1
        return TraceError(f"request {row}: {what}", file=self.file, line=line, field=field, remedy=remedy)

    def refuse(self, bad: Bools, field: str, what: str, remedy: str = "") -> None:
        """Raise for the first row that is `bad`."""
        if bad.any():
            raise self.error(int(np.argmax(bad)), field, what, remedy)


def check_trace(trace: Trace, *, file: str, lines: Sequence[int] | None = None) -> None:
    """Raise TraceError for the first thing that makes `trace` unusable; return when there is none."""
    if len(trace) == 0:
        raise TraceError("the trace holds no requests", file=file, remedy="import or synthesise at least one request")
    place = _Place(file, lines)
    _check_lengths(trace, place)
    _check_times(trace, place)
    _check_parents(trace, place)
    _check_kind(trace, place)
    _check_shared(trace, place)
    if trace.content_kind == "blocks":
        _check_blocks(trace, place)
    if trace.content_kind == "tokens":
        _check_tokens(trace, place)


def _check_lengths(trace: Trace, place: _Place) -> None:
    place.refuse(
        trace.request_id != np.arange(len(trace)), "request_id", "ids must be 0, 1, 2… in file order", "renumber"
    )
    place.refuse(trace.input_tokens < 1, "input_tokens", "a prompt has at least one token")
    place.refuse(trace.output_tokens < 1, "output_tokens", "an output has at least one token", "drop the request")
    total = trace.input_tokens + trace.output_tokens
    place.refuse(total > MAX_SEQUENCE_TOKENS, "input_tokens", f"input + output pass {MAX_SEQUENCE_TOKENS:,} tokens")
    place.refuse((trace.turn < 0) | (trace.turn > _INT32), "turn", "a turn is 0 or more")
    for name, least in (("prefix_tokens", 0), ("shared_tokens", 1)):
        column: Ints = getattr(trace, name)
        bad = column.known & ((column.values < least) | (column.values > trace.input_tokens))
        place.refuse(bad, name, f"must lie between {least} and input_tokens")
    for name in ("ttft_slo_ms", "tpot_slo_ms"):
        slo = getattr(trace, name)
        place.refuse(slo.known & ~(slo.values > 0), name, "a limit must be above 0 ms")


def _check_times(trace: Trace, place: _Place) -> None:
    for name in ("arrival_us", "think_us", "recorded_duration_us"):
        column: Ints = getattr(trace, name)
        place.refuse(column.known & (column.values < 0), name, "a time cannot be negative")
        place.refuse(column.known & (column.values > MAX_TIME_US), name, "a time of more than 10 years")
    root = trace.parent_ids.lengths == 0
    place.refuse(root & ~trace.arrival_us.known, "arrival_us", "a request without parents needs an arrival")
    timed = trace.arrival_us.known | trace.think_us.known
    place.refuse(~root & ~timed, "think_us", "a request with parents needs an arrival or a think time")
    rows = np.flatnonzero(trace.arrival_us.known)
    early = np.flatnonzero(np.diff(trace.arrival_us.values[rows]) < 0)
    if early.size:
        raise place.error(
            int(rows[early[0] + 1]), "arrival_us", "arrives before an earlier row", "sort the requests by arrival"
        )


def _check_parents(trace: Trace, place: _Place) -> None:
    child = trace.parent_ids.row_of_values()
    parent = trace.parent_ids.values.astype(np.int64)
    _refuse_rows(place, child[parent < 0], "parent_ids", "a parent's id cannot be negative")
    # With dense ids in file order, "parents precede" is also "no cycles".
    _refuse_rows(place, child[parent >= child], "parent_ids", "a parent must stand in an earlier row", "reorder")
    other = trace.session_id[parent] != trace.session_id[child]
    _refuse_rows(place, child[other], "session_id", "differs from the session of its parent")
    _refuse_rows(place, child[trace.turn[parent] >= trace.turn[child]], "turn", "must be above the parent's turn")
    has_parent = trace.parent_ids.lengths > 0
    prefix = trace.prefix_tokens
    place.refuse(
        prefix.known & (prefix.values > 0) & ~has_parent, "prefix_tokens", "nothing to inherit from: no parent"
    )
    rows = np.flatnonzero(has_parent & prefix.known)
    first = trace.parent_ids.values[trace.parent_ids.offsets[rows]]
    over = prefix.values[rows] > trace.input_tokens[first] + trace.output_tokens[first]
    _refuse_rows(place, rows[over], "prefix_tokens", "longer than the parent's input and output together")


def _refuse_rows(place: _Place, rows: NDArray[np.int64], field: str, what: str, remedy: str = "") -> None:
    if rows.size:
        raise place.error(int(rows.min()), field, what, remedy)


def _check_kind(trace: Trace, place: _Place) -> None:
    """Content is described one way for all rows; two descriptions could contradict each other."""
    kind = trace.content_kind
    one_way = "describe the content one way: block_ids, token_ids, or shared and prefix tokens"
    if kind != "streams":
        place.refuse(trace.prefix_tokens.known, "prefix_tokens", f"not allowed beside {kind[:-1]}_ids", one_way)
        place.refuse(trace.shared_id.known, "shared_id", f"not allowed beside {kind[:-1]}_ids", one_way)
    if kind == "blocks":
        place.refuse(~trace.block_ids.known, "block_ids", "missing, while other requests have them", one_way)
        place.refuse(trace.token_ids.known, "token_ids", "not allowed beside block_ids", one_way)
    if kind == "tokens":
        place.refuse(~trace.token_ids.known, "token_ids", "missing, while other requests have them", one_way)
    if kind != "blocks":
        place.refuse(trace.tail_id.known, "tail_id", "needs block_ids")
    if kind != "tokens":
        place.refuse(trace.output_token_ids.known, "output_token_ids", "needs token_ids")


def _check_shared(trace: Trace, place: _Place) -> None:
    place.refuse(
        trace.shared_id.known != trace.shared_tokens.known, "shared_id", "shared_id and shared_tokens go together"
    )
    extent: dict[int, tuple[int, int]] = {}  # request → (shared id, tokens of it at the head), inherited ones included
    for row in np.flatnonzero(trace.shared_id.known | trace.prefix_tokens.known).tolist():
        parents, prefix = trace.parents(row), trace.prefix_tokens.get(row) or 0
        inherited_id, inherited = extent.get(parents[0], (0, 0)) if parents else (0, 0)
        own_id, own = trace.shared_id.get(row), trace.shared_tokens.get(row) or 0
        kept = min(inherited, prefix)
        if own_id is None:
            if kept:
                extent[row] = (inherited_id, kept)
            continue
        overlap = min(own, prefix)
        if overlap and (inherited_id != own_id or inherited < overlap):
            what = f"its first {overlap} tokens cannot be both the parent's and stream {own_id}'s"
            raise place.error(row, "shared_tokens", what, "give parent and child the same shared_id and shared_tokens")
        extent[row] = (own_id, max(own, kept))


def _check_blocks(trace: Trace, place: _Place) -> None:
    size = trace.meta.block_tokens
    if size is None or size < 1:
        raise TraceError("block_ids without a block size", file=place.file, field="kbench.trace.block_tokens")
    full = trace.input_tokens // size
    wrong = trace.block_ids.lengths != full
    place.refuse(wrong, "block_ids", f"must name input_tokens // {size} full blocks; a partial one goes into tail_id")
    no_tail = trace.tail_id.known & (trace.input_tokens % size == 0)
    place.refuse(no_tail, "tail_id", f"the prompt is a whole number of {size}-token blocks: it has no tail")
    _check_chain(trace, place)


def names_prefixes(block_ids: Lists) -> bool:
    """Whether each id stands at one position after one predecessor: only then does it name a whole prefix."""
    ids = block_ids.values
    if not ids.size:
        return True
    few = int(ids.min()) >= 0 and int(ids.max()) < 4 * ids.size + 1_024
    label = ids if few else np.unique(ids, return_inverse=True)[1]
    stands, follows = np.zeros((2, int(label.max()) + 1), np.int64)
    for lists, part in _in_parts(block_ids, label):
        position = _positions(lists)
        stands[part], follows[part] = position, _previous(part, position)
    for lists, part in _in_parts(block_ids, label):
        position = _positions(lists)
        if not np.array_equal(stands[part], position):
            return False
        if not np.array_equal(follows[part], _previous(part, position)):
            return False
    return True


def _in_parts(lists: Lists, label: NDArray[np.integer[Any]]) -> Iterator[tuple[Lists, NDArray[np.integer[Any]]]]:
    """The lists and the labels of their values, some millions of them at a time: what is computed of them is large."""
    first = 0
    while first < len(lists.known):
        stop = max(first + 1, int(np.searchsorted(lists.offsets, lists.offsets[first] + _VALUES_AT_ONCE)) - 1)
        part = label[lists.offsets[first] : lists.offsets[stop]]
        yield Lists(lists.offsets[first : stop + 1] - lists.offsets[first], part, lists.known[first:stop]), part
        first = stop


def _positions(block_ids: Lists) -> NDArray[np.int64]:
    return np.arange(block_ids.values.size) - np.repeat(block_ids.offsets[:-1], block_ids.lengths)


def _previous(ids: NDArray[np.integer[Any]], position: NDArray[np.int64]) -> NDArray[np.int64]:
    previous = np.roll(ids.astype(np.int64, copy=False), 1)
    previous[position == 0] = 0  # the first block follows nothing
    return previous


def _check_chain(trace: Trace, place: _Place) -> None:
    """Raise for the first row whose block id contradicts an earlier one."""
    if names_prefixes(trace.block_ids):
        return
    ids, rows, position = trace.block_ids.values, trace.block_ids.row_of_values(), _positions(trace.block_ids)
    previous = _previous(ids, position)
    order = np.argsort(ids, kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    moved = same & (position[order][1:] != position[order][:-1])
    forked = same & ~moved & (previous[order][1:] != previous[order][:-1])
    for bad, what in ((moved, "stands at two positions"), (forked, "follows two different blocks")):
        if bad.any():
            at = order[1:][bad].min()
            what = f"block id {ids[at]} {what}: these are not chain ids"
            raise place.error(int(rows[at]), "block_ids", what, "use prefix hashes, one id per prefix")


def _check_tokens(trace: Trace, place: _Place) -> None:
    for name, length in (("token_ids", trace.input_tokens), ("output_token_ids", trace.output_tokens)):
        column = getattr(trace, name)
        place.refuse(column.known & (column.lengths != length), name, "as many ids as tokens are needed")
        _refuse_rows(place, column.row_of_values()[column.values < 0], name, "a token id cannot be negative")
