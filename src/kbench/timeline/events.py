"""A Chrome trace as typed events.

Owns reading (.json or .json.gz), checking, and the split into what the host called and what the device did. It knows
the trace format of torch.profiler (kineto), which vLLM and SGLang write too; it knows no class of work and no step.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench.errors import UsageError

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "runtime", "privateuse1_runtime"})
ANNOTATION_CATEGORIES = frozenset({"user_annotation", "python_annotation"})
_GZIP_MAGIC = b"\x1f\x8b"
_REMEDY = "record it again and let the profiler finish writing; see kbench timeline --help"


@dataclass(frozen=True, slots=True)
class Span:
    """Something on a host thread: an operator, an annotation, or a runtime call. Times in µs since the first event."""

    name: str
    begin_us: float
    end_us: float
    thread: tuple[str, str]
    correlation: int = 0

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A kernel, copy or fill on a device. `correlation` joins it to the call that launched it (0: unknown)."""

    name: str
    begin_us: float
    end_us: float
    device: str
    stream: str
    correlation: int
    graph: bool
    copy: bool


@dataclass(frozen=True, slots=True)
class ChromeTrace:
    """One trace, sorted by time."""

    source: str
    ops: tuple[Span, ...]
    annotations: tuple[Span, ...]
    calls: Mapping[int, Span]
    """Runtime and driver calls by correlation; one cudaGraphLaunch has many device events."""
    waits: tuple[Span, ...]
    """Calls that make a stream wait for an event of another."""
    device_events: tuple[DeviceEvent, ...]
    origin_us: float = 0.0
    """What the file's clock showed at the first event."""


def read_trace(source: Path | str | Mapping[str, Any]) -> ChromeTrace:
    """Read a trace file, or a document that was parsed already.

    UsageError: no file, not JSON, cut off, not a Chrome trace, or an event without usable times.
    """
    if isinstance(source, Mapping):
        return _build(source, "trace")
    return _build(read_document(source), str(source))


def read_document(source: Path | str) -> Any:
    """The JSON of a trace file, unchecked. UsageError: no file, not JSON, or cut off."""
    path = Path(source)
    return _parse(_bytes_of(path), str(path))


def _bytes_of(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the trace: {error.strerror or error}", where=str(path)) from error
    if not raw.startswith(_GZIP_MAGIC):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, zlib.error, OSError) as error:
        raise UsageError(f"the compressed trace is cut off or damaged: {error}", where=str(path), remedy=_REMEDY) from (
            error
        )


def _parse(raw: bytes, where: str) -> Any:
    if not raw.strip():
        raise UsageError("the trace is empty", where=where, remedy=_REMEDY)
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        text = error.doc.rstrip()
        cut = error.pos >= len(text) - 1 or not text.endswith("}" if text.lstrip().startswith("{") else "]")
        what = "the trace is cut off" if cut else f"not JSON: {error.msg}"
        raise UsageError(what, where=f"{where}:{error.lineno}", remedy=_REMEDY) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"not a JSON text: {error}", where=where, remedy=_REMEDY) from error


def _build(document: Any, where: str) -> ChromeTrace:
    raw = document.get("traceEvents") if isinstance(document, Mapping) else document
    if not isinstance(raw, list):
        raise UsageError(
            "not a Chrome trace: no list traceEvents", where=where, remedy="give a file of export_chrome_trace"
        )
    timed = [(index, event) for index, event in enumerate(raw) if _is_timed(event, index, where)]
    if not timed:
        raise UsageError("the trace holds no event with a duration", where=where, remedy=_REMEDY)
    origin = min(_number(event, "ts", index, where) for index, event in timed)
    ops, annotations, waits = [], [], []
    calls: dict[int, Span] = {}
    device_events = []
    for index, event in timed:
        category = str(event.get("cat", "")).lower()
        begin = _number(event, "ts", index, where) - origin
        duration = _number(event, "dur", index, where)
        if duration < 0:
            raise UsageError(f"event {index} ({event.get('name')!r}) has a negative duration", where=where)
        if category in DEVICE_CATEGORIES:
            device_events.append(_device_event(event, begin, begin + duration, category))
        elif category in LAUNCH_CATEGORIES:
            span = _span(event, begin, begin + duration)
            if span.correlation:
                calls[span.correlation] = span
            if "StreamWaitEvent" in span.name:
                waits.append(span)
        elif category in ANNOTATION_CATEGORIES:
            annotations.append(_span(event, begin, begin + duration))
        elif category in ("cpu_op", "operator"):
            ops.append(_span(event, begin, begin + duration))
    return ChromeTrace(
        source=where,
        ops=tuple(sorted(ops, key=_order)),
        annotations=tuple(sorted(annotations, key=_order)),
        calls=calls,
        waits=tuple(sorted(waits, key=_order)),
        device_events=tuple(sorted(device_events, key=lambda event: (event.begin_us, event.end_us))),
        origin_us=origin,
    )


def _order(span: Span) -> tuple[float, float]:
    """Parents before children: of two that begin together, the longer one is outside."""
    return (span.begin_us, -span.end_us)


def _is_timed(event: Any, index: int, where: str) -> bool:
    if not isinstance(event, Mapping):
        raise UsageError(f"event {index} is not an object", where=where, remedy=_REMEDY)
    return event.get("ph") == "X"


def _number(event: Mapping[str, Any], key: str, index: int, where: str) -> float:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(
            f"event {index} ({str(event.get('name', ''))[:60]!r}) has no usable {key!r}", where=where, remedy=_REMEDY
        )
    return float(value)


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, Mapping) else {}


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _span(event: Mapping[str, Any], begin: float, end: float) -> Span:
    thread = (str(event.get("pid", "")), str(event.get("tid", "")))
    return Span(str(event.get("name", "")), begin, end, thread, _whole(_arguments(event).get("correlation")))


def _device_event(event: Mapping[str, Any], begin: float, end: float, category: str) -> DeviceEvent:
    arguments = _arguments(event)
    return DeviceEvent(
        name=str(event.get("name", "")),
        begin_us=begin,
        end_us=end,
        device=str(arguments.get("device", event.get("pid", ""))),
        stream=str(arguments.get("stream", event.get("tid", ""))),
        correlation=_whole(arguments.get("correlation")),
        graph=_whole(arguments.get("graph node id")) > 0 or _whole(arguments.get("graph id")) > 0,
        copy=category != "kernel",
    )
