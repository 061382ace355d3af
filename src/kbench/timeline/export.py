"""One trace for ui.perfetto.dev: what was recorded, and above it what kbench made of it.

Owns the tracks that are added to a Chrome trace: steps, phases, classes of work and causes of gaps, in a process of
their own. Events of the recorded trace stay as they are.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbench.errors import UsageError
from kbench.timeline.analysis import Piece, Study
from kbench.timeline.events import read_document

PROCESS = 700_000_001
"""Process ids of a kernel end far below it."""
TRACKS = (("step", "steps"), ("phase", "phases"), ("class", "classes of work"), ("gap", "gaps by cause"))
_JOINED_US = 1e-3
"""Pieces of one name nearer than a nanosecond are one."""


def export(found: Study, path: Path) -> int:
    """Write `found`'s trace with kbench's tracks to `path` (.json or .json.gz); the number of events added.

    UsageError where the file cannot be written.
    """
    document = read_document(found.trace.source)
    recorded = document["traceEvents"] if isinstance(document, Mapping) else document
    more = dict(document) if isinstance(document, Mapping) else {}
    added = list(_tracks(found))
    text = json.dumps({**more, "traceEvents": [*recorded, *added]}, separators=(",", ":"), allow_nan=False).encode()
    try:
        # No time of day in the header: the same trace gives the same bytes.
        path.write_bytes(gzip.compress(text, 6, mtime=0) if path.name.endswith(".gz") else text)
    except OSError as error:
        raise UsageError(f"cannot write the trace: {error.strerror or error}", where=str(path)) from error
    return len(added)


def _tracks(found: Study) -> Iterator[dict[str, Any]]:
    yield _named("process_name", {"name": "kbench"})
    yield _named("process_sort_index", {"sort_index": -1})
    for index, (track, title) in enumerate(TRACKS, start=1):
        pieces = _joined([piece for piece in found.pieces if piece.track == track])
        if not pieces:
            continue
        yield _named("thread_name", {"name": title}, index)
        yield _named("thread_sort_index", {"sort_index": index}, index)
        for piece in pieces:
            yield {
                "ph": "X",
                "cat": "kbench",
                "name": piece.name,
                "pid": PROCESS,
                "tid": index,
                "ts": found.trace.origin_us + piece.begin_us,
                "dur": piece.end_us - piece.begin_us,
            }


def _named(what: str, args: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "ts": 0, "args": args}


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """In order of time, and what was cut at an operator's edge put together again."""
    made: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: (each.begin_us, -each.end_us)):
        last = made[-1] if made else None
        joins = last is not None and last.name == piece.name and abs(piece.begin_us - last.end_us) <= _JOINED_US
        if last is not None and joins and piece.track != "step":
            made[-1] = Piece(last.track, last.name, last.begin_us, piece.end_us)
        else:
            made.append(piece)
    return made
