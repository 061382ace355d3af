"""ServeGen clients: requests drawn from the published rates and length distributions of a model's clients.

A client is two files: `chunk-I-trace.csv`, without a header, with `window start in s, requests/s, CV, Gamma | Weibull |
nothing, shape, scale` every 600 s; and `chunk-I-dataset.json`, every 21,600 s the probabilities of input and output
lengths, each as the *text* of a Python dictionary, which is read as a literal and never run. The source is a folder of
clients, or one client's trace file. Windows without requests are skipped; in each other window exactly rate × 600
requests are drawn, their gaps scaled so that they fill the window. Nothing is known of sessions or of content.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbench.errors import TraceError
from kbench.traces.arrange import known_ints
from kbench.traces.columns import AnyColumn, Int64s, frozen
from kbench.traces.draw import Draw
from kbench.traces.importers.cells import BadRow, json_object, number, shown
from kbench.traces.importers.common import ImportOptions, RowLog, built, text_lines, whole_text
from kbench.traces.schema import file_sha256
from kbench.traces.trace import MAX_SEQUENCE_TOKENS, Trace, TraceMeta

WINDOW_S = 600
_NAME = re.compile(r"chunk-(\d{1,9})-trace\.csv")
_MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class _Window:
    line: int
    start_s: float
    requests: int
    pattern: str
    shape: float


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Token counts and the probability of at most so many."""

    tokens: Int64s
    up_to: NDArray[np.float64]

    def draw(self, units: NDArray[np.float64]) -> Int64s:
        return self.tokens[np.minimum(np.searchsorted(self.up_to, units, side="right"), self.tokens.size - 1)]


def read(source: Path, options: ImportOptions) -> Trace:
    """Requests of `options.seconds` from `options.from_s` on. Raises TraceError with file, line and field."""
    log = RowLog(source, options.skip_bad_rows, width=4)
    digest = hashlib.sha256()
    drawn = [np.zeros((0, 4), np.int64)]
    total = 0
    for client, trace_file in _clients(source):
        data_file = trace_file.with_name(f"chunk-{client}-dataset.json")
        for part in (trace_file, data_file):
            if not part.is_file():
                raise TraceError("no such file", file=str(part), remedy="a client is a trace and a dataset file")
            digest.update(f"{part.name} {file_sha256(part)}\n".encode())
        data: dict[float, Any] | None = None
        for window in _windows(trace_file, log, options):
            total += window.requests
            if total > _MOST_REQUESTS:
                raise TraceError(f"more than {_MOST_REQUESTS:,} requests", file=str(source), remedy="shorten --seconds")
            data = _dataset(data_file) if data is None else data
            lengths = _lengths_at(data, window.start_s, data_file)
            if lengths is None:
                log.dropped["lengths unknown"] += window.requests
                continue
            drawn.append(_requests(window, lengths, options.seed, client))
    table = np.concatenate(drawn)
    inside = (table[:, 1] >= options.from_s * 1e6) & (table[:, 1] < (options.from_s + options.seconds) * 1e6)
    log.keep(table[inside].ravel().tolist())
    if not log.cells:
        what = f"no requests between {options.from_s:g} and {options.from_s + options.seconds:g} s"
        raise TraceError(what, file=str(source), remedy="choose another part with --from-s and --seconds")
    lines, arrivals, inputs, outputs = log.columns()
    meta = TraceMeta(
        source=source.name,
        importer="servegen",
        licence="Apache-2.0",
        citation="Xiang et al., ServeGen, arXiv 2505.09999",
    )
    columns: dict[str, AnyColumn] = {
        "session_id": np.arange(lines.size),
        "arrival_us": known_ints(arrivals),
        "input_tokens": inputs,
        "output_tokens": outputs,
    }
    drawn_part = {"from_s": options.from_s, "seconds": options.seconds}
    return built(log, lines, columns, meta, options, source_sha256=digest.hexdigest(), notes=drawn_part)


def _clients(source: Path) -> list[tuple[int, Path]]:
    """Numbers and trace files of the clients, in the order of their numbers."""
    if source.is_file():
        match = _NAME.fullmatch(source.name)
        if match is None:
            raise TraceError("not a client's file", file=str(source), remedy="name chunk-I-trace.csv or its folder")
        return [(int(match[1]), source)]
    found = [(int(match[1]), path) for path in source.iterdir() if (match := _NAME.fullmatch(path.name))]
    if not found:
        raise TraceError("no chunk-I-trace.csv in this folder", file=str(source), remedy="is this a ServeGen model?")
    return sorted(found)


def _windows(path: Path, log: RowLog, options: ImportOptions) -> Iterator[_Window]:
    """Windows that have requests and overlap the wanted part."""
    rows = RowLog(path, log.skip, width=1, dropped=log.dropped)  # errors name this file
    for line, text in text_lines(path):
        try:
            window = _window(line, text)
        except BadRow as bad:
            rows.reject(line, bad)
            continue
        wanted = window.start_s + WINDOW_S > options.from_s and window.start_s < options.from_s + options.seconds
        if wanted and window.requests:
            yield window


def _window(line: int, text: str) -> _Window:
    cells = text.split(",")
    if len(cells) != 6:
        raise BadRow("columns", f"{len(cells)} columns where 6 belong")
    start, rate = number(cells[0], "window start", "s"), number(cells[1], "rate", "requests/s")
    pattern, shape = cells[3].strip(), number(cells[4], "shape", "shape")
    if not 0 <= start < 3e8:
        raise BadRow("window start", f"not a time in the recording: {shown(cells[0])}")
    if not 0 <= rate < 1e5:
        raise BadRow("rate", f"not a rate: {shown(cells[1])}")
    if pattern not in ("Gamma", "Weibull", ""):
        raise BadRow("pattern", f"neither Gamma nor Weibull nor empty: {shown(pattern)}")
    if pattern and rate and not 1e-3 <= shape <= 1e4:
        raise BadRow("shape", f"not between 0.001 and 10,000: {shown(cells[4])}")
    return _Window(line, start, round(rate * WINDOW_S), pattern, shape)


def _dataset(path: Path) -> dict[float, Any]:
    try:
        found = json_object(whole_text(path))
        return {number(key, "window", "s"): value for key, value in sorted(found.items())}
    except BadRow as bad:
        raise TraceError(bad.what, file=str(path), field=bad.field) from bad


def _lengths_at(data: dict[float, Any], at_s: float, path: Path) -> tuple[_Lengths, _Lengths] | None:
    """The input and output lengths that hold at a time; None where the file has none for it."""
    starts = [start for start in data if start <= at_s]
    if not starts:
        return None
    start = max(starts)
    window = data[start]
    if isinstance(window, dict) and isinstance(window.get("input_tokens"), str):  # parsed once
        try:
            window = tuple(_lengths(window.get(name), name) for name in ("input_tokens", "output_tokens"))
        except BadRow as bad:
            raise TraceError(f"window {start:g}: {bad.what}", file=str(path), field=bad.field) from bad
        data[start] = window
    if not isinstance(window, tuple):
        raise TraceError(f"window {start:g}: no lengths as text", file=str(path), field="input_tokens")
    inputs, outputs = window
    return None if inputs is None or outputs is None else (inputs, outputs)


def _lengths(text: Any, field: str) -> _Lengths | None:
    if not isinstance(text, str):
        raise BadRow(field, "missing, or not text")
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise BadRow(field, f"not the text of a dictionary: {shown(text)}") from error
    if not isinstance(found, dict):
        raise BadRow(field, f"not the text of a dictionary: {shown(text)}")
    if not found:
        return None
    chances = []
    for tokens, chance in sorted(found.items()) if set(map(type, found)) <= {int} else ():
        if not 1 <= tokens < MAX_SEQUENCE_TOKENS // 2 or number(chance, field, "probability") < 0:
            raise BadRow(field, f"not tokens and their probability: {tokens}: {shown(chance)}")
        chances.append(float(chance))
    if not sum(chances) > 0:
        raise BadRow(field, "no lengths with a probability above 0")
    up_to = np.cumsum(chances)
    return _Lengths(np.array(sorted(found), np.int64), up_to / up_to[-1])


def _requests(window: _Window, lengths: tuple[_Lengths, _Lengths], seed: int, client: int) -> Int64s:
    """Line, arrival in us, input and output tokens of a window's requests."""
    count = window.requests
    draw = Draw(seed, (client << 32) + int(window.start_s))
    if window.pattern == "Gamma":
        gaps = np.array([draw.gamma(window.shape) for _ in range(count + 1)])
    else:
        gaps = -np.log1p(-draw.units(count + 1))
        if window.pattern == "Weibull":
            gaps **= 1.0 / window.shape
    at = np.cumsum(gaps)
    part = at[:-1] / at[-1] if at[-1] > 0 and np.isfinite(at[-1]) else np.zeros(count)
    arrivals = ((window.start_s + part * WINDOW_S) * 1e6).astype(np.int64)
    inputs, outputs = lengths
    return frozen(
        np.column_stack(
            [np.full(count, window.line), arrivals, inputs.draw(draw.units(count)), outputs.draw(draw.units(count))]
        )
    )
