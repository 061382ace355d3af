"""Anybody's traces: one JSON object a line, its fields named as the columns of kbench's own schema.

Needed are `input_tokens` and `output_tokens` (or `token_ids` and `output_token_ids`, which are counted), and for a
request without parents a time: `arrival_us`, `arrival_ms` or `arrival_s`. `think_…` and `recorded_duration_…` take the
same units. `request_id` (else the number of the line), `session_id` and `shared_id` are text or whole numbers;
`parent_ids` names request ids, and without a session a request belongs to that of its first parent. `block_ids` may end
with the partial block's id.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kbench.traces.columns import COLUMNS, AnyColumn, Kind, Lists, column_of
from kbench.traces.importers.cells import BadRow, full_blocks, id_list, json_object, number, shown, time_us, token_count
from kbench.traces.importers.common import ImportOptions, RowLog, built, text_lines
from kbench.traces.importers.sessions import roots_of
from kbench.traces.trace import Trace, TraceMeta

Cells = dict[str, Any]


def read(source: Path, options: ImportOptions) -> Trace:
    """One request a line. Raises TraceError with line and field; an unknown field is one of the reasons."""
    log = RowLog(source, options.skip_bad_rows, width=1)
    rows: list[tuple[int, Cells]] = []
    line_of: dict[str | int, int] = {}
    for line, text in text_lines(source):
        try:
            cells = _cells(json_object(text), line, options.block_tokens)
            if (earlier := line_of.setdefault(cells["request_id"], line)) != line:
                raise BadRow("request_id", f"{shown(cells['request_id'])} is also that of line {earlier}")
            rows.append((line, cells))
        except BadRow as bad:
            log.reject(line, bad)
    rows = _with_their_parents(rows, log)
    log.keep([line for line, _ in rows])
    (lines,) = log.columns()
    meta = TraceMeta(source=source.name, importer="jsonl", block_tokens=options.block_tokens)
    return built(log, lines, _columns([cells for _, cells in rows]), meta, options)


def _cells(record: dict[str, Any], line: int, block_tokens: int | None) -> Cells:
    if not record.keys() <= FIELDS:
        name = min(map(str, record.keys() - FIELDS))
        raise BadRow(shown(name), "unknown field", f"fields are {', '.join(sorted(FIELDS))}")
    cells: Cells = {"request_id": line, "parent_ids": ()}
    for name, value in record.items():
        if value is None or name == "turn":  # turns follow from the parents
            continue
        column, read_cell = _READERS[name]
        if column in cells and name in _TIME_FIELDS:
            raise BadRow(name, "this time is there in two units")
        cells[column] = read_cell(value, name)
    for name, ids in (("input_tokens", "token_ids"), ("output_tokens", "output_token_ids")):
        if name not in cells:
            if ids not in cells:
                raise BadRow(name, "missing")
            cells[name] = token_count(len(cells[ids]), ids)
    if "block_ids" in cells:
        _split_blocks(cells, block_tokens)
    return cells


def _split_blocks(cells: Cells, block_tokens: int | None) -> None:
    if block_tokens is None:
        raise BadRow("block_ids", "of how many tokens?", "say --block-tokens")
    ids, length = cells["block_ids"], cells["input_tokens"]
    if len(ids) == length // block_tokens:
        return
    cells["block_ids"] = full_blocks(ids, length, block_tokens, "block_ids")
    cells.setdefault("tail_id", ids[-1])


def _name(value: Any, field: str) -> str | int:
    if type(value) is int or isinstance(value, str):
        return value
    raise BadRow(field, f"neither text nor a whole number: {shown(value)}")


def _names(value: Any, field: str) -> list[str | int]:
    if not isinstance(value, list):
        raise BadRow(field, f"not a list of request ids: {shown(value)}")
    return [_name(each, field) for each in value]


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
        raise BadRow(field, f"not a text: {shown(value)}")
    return value


def _time(factor: float, unit: str) -> Callable[[Any, str], int]:
    return lambda value, field: time_us(value, field, us_per_unit=factor, unit=unit)


def _count(least: int) -> Callable[[Any, str], int]:
    return lambda value, field: token_count(value, field, least=least)


def _limit(value: Any, field: str) -> float:
    return number(value, field, "ms")


_TIME_FIELDS = {
    f"{name}_{unit}": (f"{name}_us", _time(factor, unit))
    for name in ("arrival", "think", "recorded_duration")
    for unit, factor in (("us", 1.0), ("ms", 1e3), ("s", 1e6))
}
_READERS: Mapping[str, tuple[str, Callable[[Any, str], Any]]] = {
    **_TIME_FIELDS,
    **{name: (name, _count(1)) for name in ("input_tokens", "output_tokens", "shared_tokens")},
    **{name: (name, _count(0)) for name in ("prefix_tokens", "tail_id")},
    **{name: (name, id_list) for name in ("token_ids", "output_token_ids", "block_ids")},
    **{name: (name, _limit) for name in ("ttft_slo_ms", "tpot_slo_ms")},
    **{name: (name, _name) for name in ("request_id", "session_id", "shared_id")},
    "parent_ids": ("parent_ids", _names),
    "regime": ("regime", _text),
}
FIELDS = frozenset({*_READERS, "turn"})


def _with_their_parents(rows: list[tuple[int, Cells]], log: RowLog) -> list[tuple[int, Cells]]:
    """Rows whose parents are all there; leaving one out may leave its children without."""
    while True:
        known = {cells["request_id"] for _, cells in rows}
        whole = []
        for line, cells in rows:
            lost = next((parent for parent in cells["parent_ids"] if parent not in known), None)
            if lost is None:
                whole.append((line, cells))
            else:
                log.reject(line, BadRow("parent_ids", f"no request {shown(lost)}"))
        if len(whole) == len(rows):
            return whole
        rows = whole


def _columns(rows: list[Cells]) -> dict[str, AnyColumn]:
    place = {cells["request_id"]: row for row, cells in enumerate(rows)}
    parents = [[place[parent] for parent in cells["parent_ids"]] for cells in rows]
    roots = roots_of(np.array([above[0] if above else -1 for above in parents], np.int64)).tolist()
    sessions: dict[Any, int] = {}
    streams: dict[str | int, int] = {}
    session_ids = []
    for root, cells in zip(roots, rows, strict=True):
        # A session's name, or the row of its first request: two kinds, which must not meet.
        name = cells.get("session_id", rows[root].get("session_id"))
        session_ids.append(sessions.setdefault((root,) if name is None else name, len(sessions)))
    present = set().union(*(cells.keys() for cells in rows)) | {"session_id"}
    columns: dict[str, AnyColumn] = {}
    for spec in COLUMNS:
        if spec.name == "request_id" or spec.name not in present:
            continue
        if spec.name == "session_id":
            columns[spec.name] = column_of(spec, session_ids)
        elif spec.name == "parent_ids":
            columns[spec.name] = Lists.of(parents)
        elif spec.name == "shared_id":
            names = [cells.get("shared_id") for cells in rows]
            numbers = [None if name is None else streams.setdefault(name, len(streams)) for name in names]
            columns[spec.name] = column_of(spec, numbers)
        elif spec.kind is Kind.LISTS:
            columns[spec.name] = _lists([cells.get(spec.name) for cells in rows])
        else:
            columns[spec.name] = column_of(spec, [cells.get(spec.name) for cells in rows])
    return columns


def _lists(cells: list[array[int] | None]) -> Lists:
    known = np.fromiter((each is not None for each in cells), np.bool_, len(cells))
    lengths = np.fromiter((0 if each is None else len(each) for each in cells), np.int64, len(cells))
    flat = array("q")
    for each in cells:
        if each is not None:
            flat.extend(each)
    values = np.frombuffer(flat, np.int64) if flat else np.zeros(0, np.int64)
    return Lists.packed(lengths, values, known)
