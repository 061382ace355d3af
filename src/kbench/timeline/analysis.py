"""From a trace to the accounts of its steps: who gets each microsecond.

Owns the two ways to look: on a GPU the device's events and the gaps between them, on a CPU the operators' self time on
the thread of the steps. It knows neither how an account is written down nor what bounds a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kbench.errors import UsageError
from kbench.timeline.account import Account, Saving, document
from kbench.timeline.classes import HOST, OPERATION_PHASES, PHASE_CLASS, Classifier
from kbench.timeline.device import Busy, Gap, Work, find_gaps, sweep
from kbench.timeline.events import ChromeTrace, DeviceEvent, Span, read_trace
from kbench.timeline.host import PHASE_PREFIX, HostThread
from kbench.timeline.steps import Segmentation, StepWindow, find_steps

SPAN_COST_US = 60.0
"""Leaving one annotated span and entering the next takes the interpreter 5 to 50 µs while a profiler records."""

_Item = TypeVar("_Item", Busy, Gap, Span)


Patterns = Mapping[str, str] | Iterable[tuple[str, str]] | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a step's time and what it was counted as. Pieces of one track do not overlap."""

    track: str
    """`step`, `phase`, `class` or `gap`."""
    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Study:
    """A trace with its steps accounted for."""

    trace: ChromeTrace
    kind: str
    """`cuda` or `cpu`: what the classes are the time of."""
    steps: Segmentation
    accounts: list[Account]
    pieces: list[Piece] = field(default_factory=list)


def analyse(
    source: Path | str | Mapping[str, Any],
    *,
    classes: Patterns = None,
    expected_saving: float | None = None,
    saved_class: str = "attention",
) -> dict[str, Any]:
    """Read a trace and account for its steps. JSON-ready; times are µs a step.

    classes: the caller's own `class: pattern`, tried before the built-in tables.
    expected_saving: the share s of the time of `saved_class` that a change is expected to save; then
    `largest_saving_us` is f × s × step. Without it that is None.
    Raises UsageError where the trace is not usable, with what, where and the remedy.
    """
    return describe(study(source, classes), classes, expected_saving=expected_saving, saved_class=saved_class)


def describe(
    found: Study, classes: Patterns = None, *, expected_saving: float | None = None, saved_class: str = "attention"
) -> dict[str, Any]:
    """The document of a study; see `analyse`."""
    if expected_saving is not None and not (math.isfinite(expected_saving) and 0 < expected_saving < 1):
        raise UsageError(f"expected_saving is {expected_saving}, not a share of time", remedy="between 0 and 1")
    names = Classifier.of(classes).names()
    if saved_class not in names:
        raise UsageError(f"no class {saved_class!r}", remedy=f"one of {', '.join(names)}")
    return document(
        source=found.trace.source,
        kind=found.kind,
        steps=found.steps,
        accounts=found.accounts,
        names=names,
        saving=Saving(expected_saving, saved_class),
    )


def study(source: Path | str | Mapping[str, Any], classes: Patterns = None) -> Study:
    """Read a trace and give each stretch of its steps to a class of work or to a gap. UsageError as `analyse`."""
    classifier = Classifier.of(classes)
    trace = read_trace(source)
    device = _busiest_device(trace)
    steps = find_steps(trace, device)
    if not steps.windows:
        raise UsageError(
            "the trace has neither device events nor operators",
            where=trace.source,
            remedy="profile with ProfilerActivity.CPU, and CUDA on a GPU",
        )
    found = Study(trace, "cuda" if device else "cpu", steps, [Account(each.wall_us, 1) for each in steps.windows])
    found.pieces.extend(
        Piece("step", window.label or "step", window.begin_us, window.end_us) for window in steps.windows
    )
    if device:
        _account_device(found, device, classifier)
    else:
        _account_host(found, classifier)
    return found


def _busiest_device(trace: ChromeTrace) -> tuple[DeviceEvent, ...]:
    if not trace.device_events:
        if any("Launch" in call.name for call in trace.calls.values()):
            raise UsageError(
                "the trace has kernel launches but no kernel: the device's recorder saw nothing",
                where=trace.source,
                remedy="no other profiler may hold the GPU; record in a fresh process",
            )
        return ()
    busy: dict[str, float] = defaultdict(float)
    for event in trace.device_events:
        busy[event.device] += event.end_us - event.begin_us
    chosen = max(busy, key=lambda name: busy[name])
    return tuple(event for event in trace.device_events if event.device == chosen)


# ------------------------------------------------------------------------------------------ host


def _host_threads(trace: ChromeTrace, classifier: Classifier) -> dict[tuple[str, str], HostThread]:
    spans: dict[tuple[str, str], list[Span]] = defaultdict(list)
    phases = [span for span in trace.annotations if span.name.startswith(PHASE_PREFIX)]
    for span in sorted([*trace.ops, *phases], key=lambda span: (span.begin_us, -span.end_us)):
        spans[span.thread].append(span)
    return {thread: HostThread.of(found, classifier) for thread, found in spans.items()}


def _account_host(found: Study, classifier: Classifier) -> None:
    """On a CPU the operators are the work: self time on the steps' thread, by class; the interpreter is a gap.

    An engine that annotates its phases says where all of its time goes: a hole between them is unknown if it is longer
    than recording the next span takes.
    """
    threads, thread = _host_threads(found.trace, classifier), found.steps.thread
    segments = threads[thread].segments if thread in threads else ()
    longest_us = SPAN_COST_US if any(segment.phase for segment in segments) else math.inf
    index = 0
    for window, account in zip(found.steps.windows, found.accounts, strict=True):
        clock = window.begin_us
        while index < len(segments) and segments[index].end_us <= window.begin_us:
            index += 1
        at = index
        while at < len(segments) and segments[at].begin_us < window.end_us:
            segment = segments[at]
            begin, end = max(segment.begin_us, window.begin_us), min(segment.end_us, window.end_us)
            _hole(found, account, clock, begin, longest_us)
            name = _host_class(segment.op, segment.op_class, segment.phase)
            if name == HOST:
                account.gaps["host_wait"] += end - begin
                found.pieces.append(Piece("gap", "host_wait", begin, end))
            else:
                account.classes[name] += end - begin
                account.names[(segment.op or f"phase {segment.phase}", name)] += end - begin
                found.pieces.append(Piece("class", name, begin, end))
            if segment.phase:
                account.phases[segment.phase] += end - begin
                found.pieces.append(Piece("phase", segment.phase, begin, end))
            clock = end
            at += 1
        _hole(found, account, clock, window.end_us, longest_us)


def _hole(found: Study, account: Account, begin_us: float, end_us: float, longest_us: float) -> None:
    """No operator and no phase: the interpreter's time, or nobody knows whose."""
    if end_us > begin_us:
        cause = "host_wait" if end_us - begin_us <= longest_us else "unknown"
        account.gaps[cause] += end_us - begin_us
        found.pieces.append(Piece("gap", cause, begin_us, end_us))


def _host_class(op: str, op_class: str | None, phase: str) -> str:
    if phase in OPERATION_PHASES:
        return PHASE_CLASS[phase]
    if not op or op_class == HOST:
        return HOST
    if phase in PHASE_CLASS:
        return PHASE_CLASS[phase]
    return op_class or "other"


# ---------------------------------------------------------------------------------------- device


def _account_device(found: Study, device: Sequence[DeviceEvent], classifier: Classifier) -> None:
    trace, windows, pieces = found.trace, found.steps.windows, found.pieces
    threads = _host_threads(trace, classifier)
    works = []
    for event in device:
        call = trace.calls.get(event.correlation)
        at = threads[call.thread].at(call.begin_us) if call is not None and call.thread in threads else None
        phase, op_class = (at.phase, at.op_class) if at is not None else ("", None)
        # One graph launch has kernels of many classes: only their own names tell.
        if call is not None and "GraphLaunch" in call.name:
            phase, op_class = "", None
        works.append(Work(event, classifier.kernel(event.name, phase, op_class), call))
    busy, gaps = sweep(works), find_gaps(works, trace.waits)
    for account, begin, end, item in _inside(windows, found.accounts, busy):
        account.classes[item.work.work_class] += end - begin
        account.names[(item.work.event.name, item.work.work_class)] += end - begin
        pieces.append(Piece("class", item.work.work_class, begin, end))
    for account, begin, end, gap in _inside(windows, found.accounts, gaps):
        account.gaps[gap.cause] += end - begin
        pieces.append(Piece("gap", gap.cause, begin, end))
    first, last = works[0].event.begin_us, max(work.event.end_us for work in works)
    for window, account in zip(windows, found.accounts, strict=True):
        # Before the first and after the last event the device has nothing to do until the host calls.
        for begin, end in ((window.begin_us, min(first, window.end_us)), (max(last, window.begin_us), window.end_us)):
            if end > begin:
                account.gaps["host_wait"] += end - begin
                pieces.append(Piece("gap", "host_wait", begin, end))
    _add_phases(found)


def _add_phases(found: Study) -> None:
    """The host's time in each annotated phase."""
    thread = found.steps.thread
    phases = [span for span in found.trace.annotations if span.name.startswith(PHASE_PREFIX) and span.thread == thread]
    for account, begin, end, span in _inside(found.steps.windows, found.accounts, phases):
        account.phases[span.name[len(PHASE_PREFIX) :].strip()] += end - begin
        found.pieces.append(Piece("phase", span.name[len(PHASE_PREFIX) :].strip(), begin, end))


def _inside(
    windows: Sequence[StepWindow], accounts: Sequence[Account], items: Sequence[_Item]
) -> Iterator[tuple[Account, float, float, _Item]]:
    """Every item with every window that it touches, and from when to when it is inside; both are sorted."""
    first = 0
    for window, account in zip(windows, accounts, strict=True):
        while first < len(items) and items[first].end_us <= window.begin_us:
            first += 1
        at = first
        while at < len(items) and items[at].begin_us < window.end_us:
            begin, end = max(items[at].begin_us, window.begin_us), min(items[at].end_us, window.end_us)
            if end > begin:
                yield account, begin, end, items[at]
            at += 1
