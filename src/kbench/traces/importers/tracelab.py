"""TraceLab sessions: the replay CSV (`session_id,arrival_time,round_idx,prefix_len,input_len,output_len,
tool_wait_after_ms`, times in ms, columns in any order) and the round trace (JSONL with ISO times and tool events).

Traps: `input_len` is what a round adds, so a prompt is `prefix_len + input_len`; a round starts `tool_wait_after_ms`
after the round before it ends, not at a recorded time. In the round trace `prefix_tokens` is what the provider's cache
served; a session's first round may have some, from before the recording: those tokens become a stream that the
sessions of one provider, model and project share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from kbench.errors import TraceError
from kbench.traces.columns import AnyColumn, Int64s, Ints, frozen
from kbench.traces.importers.cells import BadRow, json_object, shown, time_us, token_count
from kbench.traces.importers.common import ImportOptions, RowLog, built, text_lines
from kbench.traces.importers.sessions import parents_column, previous_in_session
from kbench.traces.trace import Trace, TraceMeta

NEEDED = ("arrival_time", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")
SESSION = ("session_id", "id")
_ROUND = ("session_id", "round_index", "input_tokens_total", "prefix_tokens", "output_tokens", "timing_events")
_INPUTS = ("user_message", "tool_result")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Round:
    session: str
    index: int
    start_us: int  # of the round in the round trace; of the session in the CSV
    end_us: int  # equal to the start in the CSV, which records no durations
    wait_after_us: int  # 0 in the round trace, where the next round's start says it
    prefix: int
    input_tokens: int
    output_tokens: int
    cached_with: str  # whose sessions share what a first round has cached


def read(source: Path, options: ImportOptions) -> Trace:
    """One round a row; the kind of file shows in its first character. Raises TraceError with line and field."""
    lines = text_lines(source)
    first = next(lines)
    rounds_are_objects = first[1].lstrip().startswith("{")
    names = {} if rounds_are_objects else _columns(source, first[1])
    log = RowLog(source, options.skip_bad_rows, width=10)
    sessions: dict[str, int] = {}
    shared: dict[str, int] = {}
    seen: dict[tuple[int, int], int] = {}
    for line, text in _chain(first, lines) if rounds_are_objects else lines:
        try:
            found = _from_object(text) if rounds_are_objects else _from_cells(text, names)
            session = sessions.setdefault(found.session, len(sessions))
            if (earlier := seen.setdefault((session, found.index), line)) != line:
                raise BadRow(_ROUND[1] if rounds_are_objects else "round_idx", f"line {earlier} is the same round")
            stream = shared.setdefault(found.cached_with, len(shared))
            counts = found.prefix, found.input_tokens, found.output_tokens
            log.keep((line, session, found.index, found.start_us, found.end_us, found.wait_after_us, *counts, stream))
        except BadRow as bad:
            log.reject(line, bad)
    return _trace(log, options, rounds_are_objects)


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _trace(log: RowLog, options: ImportOptions, timed: bool) -> Trace:
    lines, session, index, start, end, wait, prefix, inputs, outputs, stream = log.columns()
    before = previous_in_session(session, index)
    later = before >= 0
    parent = np.maximum(before, 0)
    think = np.maximum(start - end[parent], 0) if timed else wait[parent]
    kept = np.where(later, np.minimum(prefix, inputs[parent] + outputs[parent]), 0)
    head = ~later & (prefix > 0)
    columns: dict[str, AnyColumn] = {
        "session_id": session,
        "parent_ids": parents_column(before),
        "arrival_us": _where(~later, start),
        "think_us": _where(later, think),
        "recorded_duration_us": _where(np.full(lines.size, timed), np.maximum(end - start, 0)),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "prefix_tokens": _where(later, kept),
        "shared_id": _where(head, stream),
        "shared_tokens": _where(head, prefix),
    }
    meta = TraceMeta(
        source=log.source.name,
        importer="tracelab",
        licence="Apache-2.0 (examples); CC BY 4.0 (data set)",
        citation="TraceLab, UW SyFI",
    )
    notes = {
        "prefixes_cut_to_parent": int(np.count_nonzero(later & (prefix > kept))),
        "first_rounds_with_cached_prefix": int(np.count_nonzero(head)),
    }
    return built(log, lines, columns, meta, options, notes=notes)


def _where(known: Any, values: Int64s) -> Ints:
    return Ints(frozen(np.where(known, values, 0)), frozen(np.array(known)))


# --------------------------------------------------------------------------------------------- the replay CSV


def _columns(source: Path, text: str) -> dict[str, int]:
    found = {name.strip(): index for index, name in enumerate(text.split(","))}
    session = next((name for name in SESSION if name in found), None)
    missing = [name for name in NEEDED if name not in found]
    if session is None or missing:
        what = f"the first line has no column {missing[0] if missing else SESSION[0]!r}"
        raise TraceError(what, file=str(source), line=1, field="header", remedy="is this a TraceLab file?")
    return {**found, SESSION[0]: found[session]}


def _from_cells(text: str, names: dict[str, int]) -> _Round:
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) <= max(names.values()):
        raise BadRow("columns", f"{len(cells)} columns where {max(names.values()) + 1} belong")
    prefix = token_count(cells[names["prefix_len"]], "prefix_len", least=0)
    added = token_count(cells[names["input_len"]], "input_len", least=0)
    start = time_us(cells[names["arrival_time"]], "arrival_time", us_per_unit=1e3, unit="ms")
    return _Round(
        session=cells[names[SESSION[0]]],
        index=token_count(cells[names["round_idx"]], "round_idx", least=0),
        start_us=start,
        end_us=start,
        wait_after_us=time_us(cells[names["tool_wait_after_ms"]], "tool_wait_after_ms", us_per_unit=1e3, unit="ms"),
        prefix=prefix,
        input_tokens=token_count(prefix + added, "input_len"),
        output_tokens=token_count(cells[names["output_len"]], "output_len"),
        cached_with="",
    )


# --------------------------------------------------------------------------------------------- the round trace


def _from_object(text: str) -> _Round:
    record = json_object(text, _ROUND)
    events = record["timing_events"]
    if not isinstance(events, list) or not events or not all(isinstance(event, dict) for event in events):
        raise BadRow("timing_events", "not a list of events, or an empty one")
    times = [_moment(event.get("timestamp")) for event in events]
    # The call goes out after the last of the inputs that it answers: two tools may have run side by side.
    inputs = len(list(takewhile(lambda event: event.get("event_type") in _INPUTS, events)))
    total = token_count(record["input_tokens_total"], "input_tokens_total")
    prefix = token_count(record["prefix_tokens"], "prefix_tokens", least=0)
    if prefix > total:
        raise BadRow("prefix_tokens", f"{prefix} of {total} tokens")
    start = max(times[: max(1, inputs)])
    who = (str(record.get(name)) for name in ("provider", "model", "project"))
    return _Round(
        session=str(record["session_id"]),
        index=token_count(record["round_index"], "round_index", least=0),
        start_us=start,
        end_us=max(start, *times),
        wait_after_us=0,
        prefix=prefix,
        input_tokens=total,
        output_tokens=token_count(record["output_tokens"], "output_tokens"),
        cached_with="\0".join(who),
    )


def _moment(text: Any) -> int:
    """Microseconds since 1970 from an ISO time; one without an offset counts as UTC."""
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError as error:
        raise BadRow("timing_events", f"not a time: {shown(text)}") from error
    if moment is None:
        raise BadRow("timing_events", f"not a time: {shown(text)}")
    try:
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    except OverflowError as error:
        raise BadRow("timing_events", f"no such time: {shown(text)}") from error
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
