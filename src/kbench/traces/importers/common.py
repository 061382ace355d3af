"""What importers share: options, lines of a text file, bad rows, and the way from rows to a trace.

Knows no format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kbench.errors import TraceError
from kbench.traces.schema import file_sha256
from kbench.traces.timing import LEAST_QUANTUM_US, dejitter, timestamp_quantum_us
from kbench.traces.trace import RequestRow, Trace, TraceMeta, trace_from_rows


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """How to read a source. All of it is written into the trace's metadata."""

    skip_bad_rows: bool = False
    dejitter: bool = False  # spread arrivals inside the grid that the timestamps were rounded to
    seed: int = 0  # of the spreading
    block_tokens: int | None = None  # where the format does not say; the importer's own default otherwise


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A request and the line that it came from."""

    line: int
    request: RequestRow


class BadRow(Exception):
    """A row that cannot be used; the reader decides whether that ends the import."""

    def __init__(self, field: str, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.field, self.what, self.remedy = field, what, remedy


@dataclass(slots=True)
class RowLog:
    """Takes rows in, and bad rows: an error, or with `skip` a count by field."""

    source: Path
    skip: bool
    rows: list[SourceRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def keep(self, line: int, request: RequestRow) -> None:
        self.rows.append(SourceRow(line, request))

    def reject(self, line: int, bad: BadRow) -> None:
        if not self.skip:
            remedy = bad.remedy or "correct the row, or leave bad rows out with --skip-bad-rows"
            raise TraceError(bad.what, file=str(self.source), line=line, field=bad.field, remedy=remedy)
        self.dropped[bad.field] += 1


def text_lines(source: Path) -> Iterator[tuple[int, str]]:
    """`(line number from 1, text)`: LF or CRLF, byte order mark or none, last newline or none; blank ends dropped."""
    try:
        data = source.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read: {error.strerror or error}", file=str(source)) from error
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").rstrip().split(b"\n"), start=1):
        try:
            yield number, raw.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            what = f"not UTF-8 text (byte {error.start + 1} of the line)"
            raise TraceError(what, file=str(source), line=number, remedy="is this the unpacked file?") from error


def token_count(text: Any, field_name: str, *, least: int = 1) -> int:
    """A length from a cell: an integer or its decimal text, at least `least`. Raises BadRow."""
    value = int(text) if isinstance(text, str) and text.strip().isdecimal() else text
    if type(value) is not int:
        raise BadRow(field_name, f"not a number of tokens: {text!r}")
    if not least <= value < 2**31:
        raise BadRow(field_name, f"{value} tokens: {least} or more are needed")
    return value


def finish(log: RowLog, meta: TraceMeta, options: ImportOptions) -> Trace:
    """Order by arrival, set time zero, spread if asked, add what was done to `meta`, build and check the trace."""
    if not log.rows:
        raise TraceError("no usable rows", file=str(log.source), remedy="is this a file of that format?")
    arrivals = np.array([row.request.arrival_us for row in log.rows], np.int64)
    order = np.argsort(arrivals, kind="stable")
    moved = int(np.count_nonzero(order != np.arange(order.size)))
    arrivals = arrivals[order] - arrivals.min()
    quantum = timestamp_quantum_us(arrivals)
    spread = options.dejitter and quantum >= LEAST_QUANTUM_US
    if spread:
        arrivals = dejitter(arrivals, quantum, options.seed)
    rows = [
        replace(log.rows[index].request, arrival_us=arrival, session_id=position)
        for position, (index, arrival) in enumerate(zip(order.tolist(), arrivals.tolist(), strict=True))
    ]
    done = {**asdict(options), "quantum_us": quantum, "dejittered": spread, "rows_moved_by_sorting": moved}
    meta = replace(meta, source_sha256=file_sha256(log.source), options=done, dropped=dict(sorted(log.dropped.items())))
    return trace_from_rows(rows, meta, file=str(log.source), lines=[log.rows[index].line for index in order.tolist()])
