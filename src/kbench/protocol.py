"""Messages between a run and its workers: one JSON object a line, requests answered in order.

Owns what crosses the pipe (`Request`, `Reply`), what a trial reports (`Measurement`, `Outcome`) and their framing.
It knows neither torch nor what a trial measures, so that a torch-free worker can speak it in tests.

    parent                         worker
    open   {arm, device, ...}  →   ok
    prepare {case, thorough}   →   ok | unsupported | incorrect | failed …   (facts, measurements)
    window {case, block, …}    →   ok (measurements)
    finish {case}              →   ok (facts, measurements)
    trace  {case}              →   ok (facts), in a worker that times nothing
    job    {name, …}           →   ok (facts, measurements, files)
    close                      →   ok, exits
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kbench.errors import MeasurementError

PROTOCOL_VERSION = 1


class Status(StrEnum):
    """How a trial ended. Everything but `ok` is recorded with its message and leaves the other trials alone."""

    OK = "ok"
    UNSUPPORTED = "unsupported"
    INCORRECT = "incorrect"
    NON_DISCRIMINATING = "non-discriminating"
    FAILED = "failed"
    OUT_OF_MEMORY = "out-of-memory"
    CRASHED = "crashed"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One value that a trial took: `clock` names how (`wall`, `event`, `graph`, `profiler`, `count`, `virtual`)."""

    metric: str
    unit: str
    value: float
    clock: str = "wall"
    flags: tuple[str, ...] = ()
    segment: int = -1
    """Workload only: the segment of the trace; -1 elsewhere."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial says after a step: its status, values, and `facts` (JSON) that describe rather than measure."""

    status: Status = Status.OK
    message: str = ""
    measurements: tuple[Measurement, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    seq: int
    op: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    seq: int
    outcome: Outcome


def encode(message: Request | Reply) -> bytes:
    """One line of JSON, newline included. NaN and infinity travel as such: the record decides what they mean."""
    return json.dumps(asdict(message), separators=(",", ":")).encode() + b"\n"


def decode_request(line: bytes) -> Request:
    data = _parse(line)
    try:
        return Request(seq=int(data["seq"]), op=str(data["op"]), args=dict(data["args"]))
    except (KeyError, TypeError, ValueError) as error:
        raise MeasurementError(f"a request on the worker's pipe is malformed: {error}") from error


def decode_reply(line: bytes) -> Reply:
    data = _parse(line)
    try:
        raw = data["outcome"]
        measurements = tuple(
            Measurement(
                metric=str(item["metric"]),
                unit=str(item["unit"]),
                value=float(item["value"]),
                clock=str(item["clock"]),
                flags=tuple(item["flags"]),
                segment=int(item["segment"]),
            )
            for item in raw["measurements"]
        )
        outcome = Outcome(Status(raw["status"]), str(raw["message"]), measurements, dict(raw["facts"]))
        return Reply(seq=int(data["seq"]), outcome=outcome)
    except (KeyError, TypeError, ValueError) as error:
        raise MeasurementError(f"a reply on the worker's pipe is malformed: {error}") from error


def _parse(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise MeasurementError("a line on the worker's pipe is not JSON", remedy="run again with --debug") from error
    if not isinstance(data, dict):
        raise MeasurementError("a line on the worker's pipe is not an object")
    return data
