"""BurstGPT: CSV with `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, in later releases also
`Session ID` and `Elapsed time`.

Traps: timestamps are whole seconds (rows of one second are in order; see `--dejitter`), failed calls have 0 response
tokens and are bad rows here, and the two further columns may be there, and may be empty. Rows of one session follow
each other; what of a session's text is repeated in the next prompt is not recorded, so no reuse is claimed.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from kbench.errors import TraceError
from kbench.traces.arrange import known_ints
from kbench.traces.columns import AnyColumn, Ints, frozen
from kbench.traces.importers.cells import BadRow, time_us, token_count
from kbench.traces.importers.common import ImportOptions, RowLog, built, text_lines
from kbench.traces.importers.sessions import parents_column, previous_in_session
from kbench.traces.trace import Trace, TraceMeta

NEEDED = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
OPTIONAL = ("Session ID", "Elapsed time")


def read(source: Path, options: ImportOptions) -> Trace:
    """One request a row. Raises TraceError with line and field."""
    log = RowLog(source, options.skip_bad_rows, width=6)
    names: dict[str, int] = {}
    sessions: dict[str, int] = {}
    for line, text in text_lines(source):
        if line == 1:
            names = _columns(source, text)
            continue
        try:
            log.keep(_request(line, text, names, sessions))
        except BadRow as bad:
            log.reject(line, bad)
    lines, arrivals, inputs, outputs, named, elapsed = log.columns()
    # Rows without a session are sessions of their own.
    session = np.where(named >= 0, named, len(sessions) + np.arange(lines.size))
    columns: dict[str, AnyColumn] = {
        "session_id": session,
        "parent_ids": parents_column(previous_in_session(session, arrivals, lines)),
        "arrival_us": known_ints(arrivals),
        "recorded_duration_us": Ints(frozen(np.maximum(elapsed, 0)), frozen(elapsed >= 0)),
        "input_tokens": inputs,
        "output_tokens": outputs,
    }
    meta = TraceMeta(
        source=source.name,
        importer="burstgpt",
        licence="CC BY 4.0",
        citation="Wang et al., BurstGPT, KDD 2025",
    )
    return built(log, lines, columns, meta, options)


def _columns(source: Path, text: str) -> dict[str, int]:
    found = {name.strip(): index for index, name in enumerate(text.split(","))}
    for name in NEEDED:
        if name not in found:
            what = f"the first line has no column {name!r}"
            raise TraceError(what, file=str(source), line=1, field="header", remedy="is this a BurstGPT file?")
    return {name: found[name] for name in (*NEEDED, *OPTIONAL) if name in found} | {"": len(text.split(","))}


def _request(line: int, text: str, names: dict[str, int], sessions: dict[str, int]) -> tuple[int, ...]:
    cells = text.split(",") if '"' not in text else _quoted(text)
    if len(cells) != names[""]:
        raise BadRow("columns", f"{len(cells)} columns where {names['']} belong")
    request, response, total = (token_count(cells[names[name]], name, least=0) for name in NEEDED[2:5])
    if request + response != total:
        raise BadRow("Total tokens", f"{total} tokens, where request and response make {request + response}")
    request, response = token_count(request, "Request tokens"), token_count(response, "Response tokens")
    session = cells[names["Session ID"]].strip() if "Session ID" in names else ""
    elapsed = cells[names["Elapsed time"]].strip() if "Elapsed time" in names else ""
    return (
        line,
        time_us(cells[names["Timestamp"]], "Timestamp", us_per_unit=1e6, unit="s"),
        request,
        response,
        sessions.setdefault(session, len(sessions)) if session else -1,
        time_us(elapsed, "Elapsed time", us_per_unit=1e6, unit="s") if elapsed else -1,
    )


def _quoted(text: str) -> list[str]:
    try:
        return next(csv.reader([text.replace("\0", "")]), [])
    except csv.Error as error:
        raise BadRow("columns", f"not a row of CSV: {error}") from error
