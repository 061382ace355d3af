"""Azure LLM inference traces, 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`.

Traps: seven fractional digits (100 ns, which strptime refuses), CRLF, no newline at the end, an offset in the 2024
files. One request a row; no sessions and no content, so every prompt is its own.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import numpy as np

from kbench.errors import TraceError
from kbench.traces.arrange import known_ints
from kbench.traces.columns import AnyColumn
from kbench.traces.importers.cells import BadRow, shown, token_count
from kbench.traces.importers.common import ImportOptions, RowLog, built, text_lines
from kbench.traces.trace import Trace, TraceMeta

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read(source: Path, options: ImportOptions) -> Trace:
    """One request a row. Raises TraceError with line and field."""
    log = RowLog(source, options.skip_bad_rows, width=4)
    for line, text in text_lines(source):
        if line == 1:
            _check_header(source, text)
            continue
        try:
            log.keep(_request(line, text))
        except BadRow as bad:
            log.reject(line, bad)
    meta = TraceMeta(
        source=source.name,
        importer="azure",
        licence="CC BY 4.0",
        citation="Azure Public Dataset; Patel et al., Splitwise, ISCA 2024",
    )
    lines, arrivals, inputs, outputs = log.columns()
    columns: dict[str, AnyColumn] = {
        "session_id": np.arange(lines.size),
        "arrival_us": known_ints(arrivals),
        "input_tokens": inputs,
        "output_tokens": outputs,
    }
    return built(log, lines, columns, meta, options)


def _check_header(source: Path, text: str) -> None:
    if tuple(cell.strip() for cell in text.split(",")) != HEADER:
        what = f"the first line is not {','.join(HEADER)}"
        raise TraceError(what, file=str(source), line=1, field="header", remedy="is this an Azure LLM inference trace?")


def _request(line: int, text: str) -> tuple[int, int, int, int]:
    cells = text.split(",")
    if len(cells) != len(HEADER):
        raise BadRow("columns", f"{len(cells)} columns where {len(HEADER)} belong")
    return line, _microseconds(cells[0]), token_count(cells[1], HEADER[1]), token_count(cells[2], HEADER[2])


def _microseconds(text: str) -> int:
    """Microseconds since 1970; what is below a microsecond is cut off, which keeps the order."""
    match = _STAMP.fullmatch(text.strip())
    if match is None:
        raise BadRow(HEADER[0], f"not a time like 2023-11-16 18:15:46.6805900: {shown(text)}")
    return _second(match[1]) * 1_000_000 + int((match[2] or "0").ljust(6, "0")[:6])


@lru_cache(maxsize=64)
def _second(text: str) -> int:
    """Seconds since 1970. Kept, because many requests share a second."""
    try:
        since = datetime.fromisoformat(text).replace(tzinfo=UTC) - _EPOCH
    except ValueError as error:
        raise BadRow(HEADER[0], f"no such time: {shown(text)}") from error
    return since.days * 86_400 + since.seconds
