"""What importers share: options, lines of a text file, bad rows, and the way from rows to a trace.

Knows no format; single cells are `cells`'. Rows are numbers in flat arrays, so that a million of them stay small.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from kbench.errors import TraceError
from kbench.traces.arrange import arranged
from kbench.traces.columns import AnyColumn, Int64s, Ints, Lists, frozen
from kbench.traces.importers.cells import BadRow
from kbench.traces.integrity import MAX_TIME_US
from kbench.traces.schema import file_sha256
from kbench.traces.timing import LEAST_QUANTUM_US, dejitter, timestamp_quantum_us
from kbench.traces.trace import Trace, TraceMeta

_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LEAST_MARKS = 8  # arrivals at so many different times; any two or three have a common divisor
_ALWAYS_SAID = ("skip_bad_rows", "dejitter", "seed")


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """How to read a source. What was asked for is written into the trace's metadata."""

    skip_bad_rows: bool = False
    dejitter: bool = False  # spread arrivals inside the grid that the timestamps were rounded to
    seed: int = 0  # of the spreading, and of what a format leaves to chance (servegen)
    block_tokens: int | None = None  # where the format does not say; the importer's own default otherwise
    chars_per_token: float | None = None  # otel: lengths from the text where no usage was recorded
    from_s: float = 0.0  # servegen: the part of the recorded weeks to draw requests for
    seconds: float = 3_600.0

    def __post_init__(self) -> None:
        rules = (
            (0 <= self.seed < 2**63, "seed", "0 or more"),
            (self.block_tokens is None or 1 <= self.block_tokens <= 2**20, "block_tokens", "between 1 and 1,048,576"),
            (self.chars_per_token is None or 0.1 <= self.chars_per_token <= 100, "chars_per_token", "0.1 to 100"),
            (0 <= self.from_s < 1e9, "from_s", "0 or more"),
            (0 < self.seconds < 1e9, "seconds", "above 0"),
        )
        for holds, name, wanted in rules:
            if not holds:
                raise TraceError(
                    f"{getattr(self, name)!r}", file="trace import", field=name, remedy=f"must be {wanted}"
                )


@dataclass(slots=True)
class RowLog:
    """Takes rows in as numbers, the line first, and bad rows: an error, or with `skip` a count by field."""

    source: Path
    skip: bool
    width: int  # numbers a row
    cells: array[int] = field(default_factory=lambda: array("q"))
    dropped: Counter[str] = field(default_factory=Counter)

    def keep(self, cells: Sequence[int]) -> None:
        self.cells.extend(cells)

    def reject(self, line: int, bad: BadRow) -> None:
        if not self.skip:
            remedy = bad.remedy or "correct the row, or leave bad rows out with --skip-bad"
            raise TraceError(bad.what, file=str(self.source), line=line, field=bad.field, remedy=remedy)
        self.dropped[bad.field] += 1

    def columns(self) -> list[Int64s]:
        """What was kept, a column a number. Raises TraceError where that is nothing."""
        if not self.cells:
            raise TraceError("no usable rows", file=str(self.source), remedy="is this a file of that format?")
        table = np.frombuffer(self.cells, np.int64).reshape(-1, self.width)
        return [frozen(table[:, column]) for column in range(self.width)]


@dataclass(slots=True)
class IdLists:
    """Lists of ids that grow by a row."""

    values: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))

    def add(self, ids: array[int]) -> None:
        self.values.extend(ids)
        self.lengths.append(len(ids))

    def column(self) -> Lists:
        """The column. It looks at the numbers where they are, a copy could be large: add nothing afterwards."""
        offsets = np.concatenate(([0], np.cumsum(np.frombuffer(self.lengths, np.int64))))
        values = np.frombuffer(self.values, np.int64) if self.values else np.zeros(0, np.int64)
        values.setflags(write=False)
        return Lists(frozen(offsets), values, frozen(np.ones(len(self.lengths), np.bool_)))


# --------------------------------------------------------------------------------------------- lines


def text_lines(source: Path) -> Iterator[tuple[int, str]]:
    """`(line number from 1, text)`, packed with gzip or not.

    LF or CRLF, byte order mark or none, last newline or none. Blank lines at the end are dropped; an empty file has one
    empty line.
    """
    number, blank = 0, 0
    try:
        with _opened(source) as stream:
            for number, raw in enumerate(stream, start=1):  # the errors below name it
                data = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
                if not data.strip():
                    blank += 1
                    continue
                yield from ((number - back, "") for back in range(blank, 0, -1))
                blank = 0
                yield number, data.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte {error.start + 1} of the line)"
        raise TraceError(what, file=str(source), line=number, remedy="is this the right file?") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = f"packed with gzip, and cut short or damaged: {error}"
        raise TraceError(what, file=str(source), line=number + 1, remedy="get the file again") from error
    except OSError as error:
        raise TraceError(f"cannot read: {error.strerror or error}", file=str(source)) from error
    if number == blank:
        yield 1, ""


def _opened(source: Path) -> IO[bytes]:
    with source.open("rb") as probe:
        packed = probe.read(2) == _GZIP
    return cast("IO[bytes]", gzip.open(source)) if packed else source.open("rb")


def whole_text(source: Path) -> str:
    """The text of a file that is one document."""
    return "\n".join(text for _, text in text_lines(source))


# --------------------------------------------------------------------------------------------- rows to a trace


def built(
    log: RowLog,
    lines: Int64s,
    columns: Mapping[str, AnyColumn],
    meta: TraceMeta,
    options: ImportOptions,
    *,
    source_sha256: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Trace:
    """Order the rows, set time zero, spread arrivals if asked, add what was done to `meta`, build and check.

    `notes` are further facts about the import that go into the metadata.
    """
    _refuse_long_spans(log.source, lines, cast("Ints", columns["arrival_us"]))
    trace, order = arranged(columns, meta, file=str(log.source), lines=lines.tolist())
    arrivals = trace.arrival_us.values[trace.arrival_us.known]
    quantum = timestamp_quantum_us(arrivals)
    is_grid = quantum >= LEAST_QUANTUM_US and np.unique(arrivals).size >= _LEAST_MARKS
    spread = options.dejitter and is_grid
    if spread:
        times = np.zeros(len(trace), np.int64)
        times[trace.arrival_us.known] = dejitter(arrivals, quantum, options.seed)
        trace = replace(trace, arrival_us=Ints(frozen(times), trace.arrival_us.known))
    moved = int(np.count_nonzero(order != np.arange(order.size)))
    given = asdict(options)
    defaults = asdict(ImportOptions())
    done = {
        **{name: value for name, value in given.items() if name in _ALWAYS_SAID or value != defaults[name]},
        **(notes or {}),
        "quantum_us": quantum,
        "dejittered": spread,
        "rows_moved_by_sorting": moved,
    }
    meta = replace(
        meta,
        source_sha256=file_sha256(log.source) if source_sha256 is None else source_sha256,
        options=done,
        dropped=dict(sorted(log.dropped.items())),
    )
    return replace(trace, meta=meta)


def _refuse_long_spans(source: Path, lines: Int64s, arrivals: Ints) -> None:
    """A row that lies years from the others is a wrong timestamp; the one that is farthest from the middle is named."""
    rows = np.flatnonzero(arrivals.known)
    times = arrivals.values[rows]
    if times.size and int(times.max()) - int(times.min()) > MAX_TIME_US:
        worst = int(np.argmax(np.abs(times - int(np.median(times)))))
        raise TraceError(
            "lies more than 10 years from the other arrivals",
            file=str(source),
            line=int(lines[rows[worst]]),
            field="arrival",
            remedy="correct the timestamp",
        )
