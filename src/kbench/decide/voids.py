"""Which sessions a rule's predeclared codes void: for both arms, whichever arm the event came from.

Owns the evidence of each code. What it looks at (`Event`) does not say which arm it was: a session is void because of
what happened in it, never because of whom it happened to. It knows no numbers that a verdict rests on.

    throttle         more than `THROTTLED_SHARE` of the windows of one case, both arms together, were throttled
    ecc              an uncorrectable memory error: counted by the driver, or named in a trial's message
    gpu_lost         a device that the driver no longer shows, or that a trial's message says is gone
    wrong_backend    an implementation other than the one asked for answered in this session
    host_contention  other processes took more than `FOREIGN_SHARE` of the usable cores' time

`baseline_crash` is not among them: a session that lost a worker, of either arm, is partial and never estimated from;
the code says that a baseline's crash is no worse than that (a candidate's is: it fails).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kbench.decide.selections import mismatches
from kbench.record import RunRecord, SessionMark

THROTTLED = "THROTTLED"
THROTTLED_SHARE = 0.05
FOREIGN_SHARE = 0.25
INTERRUPTED = "interrupted"
"""Reason of a session that ended with its run: nobody's event."""

MESSAGES = {
    "ecc": re.compile(r"uncorrectable\s+(ECC|memory)|ECC\s*Uncorrectable", re.IGNORECASE),
    "gpu_lost": re.compile(
        r"GPU is lost|fallen off the bus|no CUDA-capable device|devices?(\(s\) is/are| is| are) busy or unavailable"
        r"|cudaErrorDevicesUnavailable|device (was )?lost",
        re.IGNORECASE,
    ),
}
"""What the driver says of itself. A sticky error of a kernel (illegal access, launch failure) is none of these."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened in one session, without the arm that it happened to."""

    message: str = ""
    mismatched: bool = False
    throttled: float = 0.0
    """Share of the windows of one case that were throttled."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """What the parent read before and after the session (`run.conditions`)."""


def void_sessions(run: RunRecord, codes: Collection[str]) -> dict[int, tuple[str, ...]]:
    """Session → the declared codes that occurred in it, sorted."""
    wanted = frozenset(codes) - {"baseline_crash"}
    if not wanted:
        return {}
    found: dict[int, set[str]] = {}
    for session, event in _events(run, wanted):
        occurred = codes_of(event) & wanted
        if occurred:
            found.setdefault(session, set()).update(occurred)
    return {session: tuple(sorted(occurred)) for session, occurred in sorted(found.items())}


def codes_of(event: Event) -> frozenset[str]:
    """Every code that this event is evidence of, declared or not."""
    seen = event.conditions
    found = {code for code, said in MESSAGES.items() if said.search(event.message)}
    if event.mismatched:
        found.add("wrong_backend")
    if event.throttled > THROTTLED_SHARE:
        found.add("throttle")
    if _last(seen.get("ecc_uncorrected")) > _first(seen.get("ecc_uncorrected")):
        found.add("ecc")
    if _last(seen.get("gpus")) < _first(seen.get("gpus")):
        found.add("gpu_lost")
    share = seen.get("foreign_cpu_share")
    if isinstance(share, int | float) and share > FOREIGN_SHARE:
        found.add("host_contention")
    return frozenset(found)


def explained(message: str, facts: Mapping[str, Any], codes: Collection[str]) -> bool:
    """Whether these codes are the reason for how a trial ended: only then is it nobody's evidence."""
    return bool(codes_of(Event(message, any(mismatches(facts)))) & frozenset(codes))


def lost_sessions(marks: Sequence[SessionMark], void: Collection[int] = ()) -> int:
    """Sessions that ended with a worker of either arm and are not void already."""
    lost = [mark for mark in marks if not mark.complete and mark.reason not in ("", INTERRUPTED)]
    return sum(mark.session not in void for mark in lost)


def _events(run: RunRecord, wanted: frozenset[str]) -> Iterator[tuple[int, Event]]:
    measured = {mark.session for mark in run.sessions}
    for mark in run.sessions:
        yield mark.session, Event(message=mark.reason, conditions=mark.conditions)
    for trial in run.trials:
        # Replays and the traced pass carry numbers of no session: nothing of a session's windows rests on them.
        if trial.session in measured and not trial.case.startswith(("workload/", "timeline/")):
            mismatched = "wrong_backend" in wanted and any(mismatches(trial.facts))
            yield trial.session, Event(message=trial.message, mismatched=mismatched)
    if "throttle" in wanted:
        yield from ((session, Event(throttled=share)) for session, share in _throttled(run))


def _throttled(run: RunRecord) -> Iterator[tuple[int, float]]:
    """Session and share of throttled windows, for every case that has any."""
    table = run.samples
    hot = [code for code, text in enumerate(table.values.get("flags", ())) if THROTTLED in text.split(",")]
    if not hot or "window" not in table.values["scope"]:
        return
    window = table.codes["scope"] == table.values["scope"].index("window")
    session, case = table.whole["session"][window], table.codes["case"][window].astype(np.int64)
    flagged = np.isin(table.codes["flags"][window], hot)
    key = session * len(table.values["case"]) + case
    distinct, inverse = np.unique(key, return_inverse=True)
    shares = np.bincount(inverse, weights=flagged) / np.bincount(inverse)
    for place, share in zip(distinct.tolist(), shares.tolist(), strict=True):
        yield place // len(table.values["case"]), float(share)


def _first(values: Any) -> float:
    return _number(values, 0)


def _last(values: Any) -> float:
    return _number(values, -1)


def _number(values: Any, place: int) -> float:
    """NaN, which compares false with everything, for what was not read."""
    if not isinstance(values, list | tuple) or len(values) != 2:
        return float("nan")
    value = values[place]
    return float(value) if isinstance(value, int | float) else float("nan")
