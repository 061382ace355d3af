"""Where one engine step begins and ends.

Owns the span names of the engines it knows, and the guess (clusters between long gaps) where a trace has none of them.
It knows no class of work.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kbench.timeline.events import ChromeTrace, DeviceEvent, Span


@dataclass(frozen=True, slots=True)
class StepWindow:
    """One step. `label` says what it computed where the trace tells (for kbench: the point)."""

    begin_us: float
    end_us: float
    label: str

    @property
    def wall_us(self) -> float:
        return self.end_us - self.begin_us


@dataclass(frozen=True, slots=True)
class Segmentation:
    windows: tuple[StepWindow, ...]
    how: str
    thread: tuple[str, str] | None
    """The host thread of the steps; None where nothing names one."""
    idle: int = 0
    """Waits between two steps that were so long that nobody can have asked for anything: they are in no step."""
    repeats: bool = False
    """Whether steps of one label are the same step again, as kbench's own are; another engine's steps are not."""


_SPANS = (
    ("kbench.step", re.compile(r"^kbench\.step\s*(?P<label>.*)$"), True),
    ("execute_context", re.compile(r"^(?P<label>execute_(new_)?context_\d+.*)$"), False),
    ("gpu_model_runner: forward", re.compile(r"^gpu_model_runner: forward(?P<label>)$"), False),
    ("SGLang step", re.compile(r"^(?P<label>step(\[|_| )(?!fn|func).*)$", re.IGNORECASE), False),
    ("ProfilerStep", re.compile(r"^ProfilerStep\s*\#?(?P<label>)\d*$"), True),
)
"""Name, pattern, and whether the span is the whole step or only its forward pass."""

_CLUSTER_FACTOR = 20.0
_CLUSTER_LEAST_US = 50.0
_IDLE_FACTOR = 20.0
_IDLE_LEAST_US = 20_000.0
"""A wait between two steps of 20 times the median wait, and of 20 ms, is an engine without requests."""
_BATCH = re.compile(r"context_(\d+)\((\d+)\).*generation_(\d+)\((\d+)\)")
"""How vLLM names a step: requests and their query tokens, of prompts and of decodes."""
_NO_BATCH = re.compile(r"context_0\(0\).*generation_0\(0\)")


def find_steps(trace: ChromeTrace, device: Sequence[DeviceEvent]) -> Segmentation:
    """The steps of a trace by the first kind of span that it has, else by clusters of work.

    With device events, a span that is only the forward pass stands for the period from its first kernel to the next
    step's first kernel: sampling, bookkeeping and the wait for the host belong to the step.
    """
    for name, pattern, whole in _SPANS:
        spans = _outermost([span for span in trace.annotations if _is_step(pattern, span)])
        if not spans:
            continue
        labels = [_label(pattern, span) for span in spans]
        thread = spans[0].thread
        repeats = name == "kbench.step"
        if not device:
            if whole:
                return Segmentation(_host_windows(spans, labels), f"span {name}", thread, repeats=repeats)
            windows, idle = _host_periods(trace, spans, labels)
            return Segmentation(windows, f"begin to begin of span {name}", thread, idle)
        launched = _launched(trace, spans, device)
        if whole and (windows := _whole_windows(spans, labels, launched)):
            return Segmentation(windows, f"span {name}", thread, repeats=repeats)
        windows, idle = _periods(device, labels, launched)
        if windows:
            return Segmentation(windows, f"first kernel to first kernel of span {name}", thread, idle, repeats)
        return Segmentation(
            _host_windows(spans, labels), f"span {name}, no kernel launched in it was found", thread, repeats=repeats
        )
    return _clusters(trace, device)


def _is_step(pattern: re.Pattern[str], span: Span) -> bool:
    return pattern.match(span.name) is not None and not _NO_BATCH.search(span.name)


def _label(pattern: re.Pattern[str], span: Span) -> str:
    match = pattern.match(span.name)
    label = match["label"].strip() if match else ""
    batch = _BATCH.search(label)
    return f"prefill {batch[1]} ({batch[2]}), decode {batch[3]} ({batch[4]})" if batch else label


def _outermost(spans: list[Span]) -> list[Span]:
    """The spans of the thread with most time in them, without those inside another."""
    by_thread: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_thread[span.thread].append(span)
    if not by_thread:
        return []
    chosen = max(by_thread.values(), key=lambda group: sum(span.duration_us for span in group))
    kept: list[Span] = []
    for span in chosen:
        if span.duration_us > 0 and (not kept or span.begin_us >= kept[-1].end_us):
            kept.append(span)
    return kept


def _host_windows(spans: list[Span], labels: list[str]) -> tuple[StepWindow, ...]:
    return tuple(StepWindow(span.begin_us, span.end_us, label) for span, label in zip(spans, labels, strict=True))


def _launched(trace: ChromeTrace, spans: list[Span], device: Sequence[DeviceEvent]) -> list[tuple[float, float] | None]:
    """First begin and last end of the device events that each span launched; None where it launched none."""
    found: list[tuple[float, float] | None] = [None] * len(spans)
    starts = [span.begin_us for span in spans]
    for event in device:
        call = trace.calls.get(event.correlation)
        if call is None:
            continue
        index = bisect_right(starts, call.begin_us) - 1
        if index < 0 or call.begin_us > spans[index].end_us:
            continue
        known = found[index]
        if known is None:
            found[index] = (event.begin_us, event.end_us)
        else:
            found[index] = (min(known[0], event.begin_us), max(known[1], event.end_us))
    return found


def _whole_windows(
    spans: list[Span], labels: list[str], launched: list[tuple[float, float] | None]
) -> tuple[StepWindow, ...]:
    """Each span until its last kernel; empty where kernels of one run into the next (the engine did not wait)."""
    windows = []
    for index, (span, label) in enumerate(zip(spans, labels, strict=True)):
        work = launched[index]
        end_us = max(span.end_us, work[1]) if work else span.end_us
        if index + 1 < len(spans) and end_us > spans[index + 1].begin_us:
            return ()
        windows.append(StepWindow(span.begin_us, end_us, label))
    return tuple(windows)


def _periods(
    device: Sequence[DeviceEvent], labels: list[str], launched: list[tuple[float, float] | None]
) -> tuple[tuple[StepWindow, ...], int]:
    """From a step's first kernel to the next step's; the last step ends with its own last kernel."""
    known = [(work, label) for work, label in zip(launched, labels, strict=True) if work is not None]
    work = [(event.begin_us, event.end_us) for event in device]
    return _until_the_next([begin for (begin, _), _ in known], [label for _, label in known], work)


def _host_periods(trace: ChromeTrace, spans: list[Span], labels: list[str]) -> tuple[tuple[StepWindow, ...], int]:
    """From a forward pass to the next one: sampling and bookkeeping follow it, and belong to the step."""
    work = [(span.begin_us, span.end_us) for span in (*trace.ops, *spans) if span.thread == spans[0].thread]
    return _until_the_next([span.begin_us for span in spans], labels, work)


def _until_the_next(
    begins: list[float], labels: list[str], work: list[tuple[float, float]]
) -> tuple[tuple[StepWindow, ...], int]:
    """(steps, idle waits). A step lasts until the next one begins, or until its last work where the engine was idle."""
    merged = _union(work)
    starts = [begin for begin, _ in merged]
    lasts = [
        _last_end(merged, starts, begin, until) for begin, until in zip(begins, [*begins[1:], math.inf], strict=True)
    ]
    waits = [after - last for last, after in zip(lasts, begins[1:], strict=False)]
    limit = max(_IDLE_LEAST_US, _IDLE_FACTOR * sorted(waits)[len(waits) // 2]) if waits else math.inf
    idle = [wait > limit for wait in waits]
    ends = [last if gone else after for last, after, gone in zip(lasts, begins[1:], idle, strict=False)]
    windows = [StepWindow(begin, end, label) for begin, end, label in zip(begins, ends, labels, strict=False)]
    if not windows and begins:  # of a single step nothing says how long it lasts but its own work
        windows = [StepWindow(begins[0], lasts[0], labels[0])]
    # Else the last one is left out: what follows its forward pass may not have been recorded.
    return tuple(window for window in windows if window.wall_us > 0), sum(idle)


def _last_end(merged: list[tuple[float, float]], starts: list[float], begin_us: float, until_us: float) -> float:
    """When the last work that began before `until_us` ended."""
    index = bisect_right(starts, until_us) - 1
    while index > 0 and starts[index] >= until_us:
        index -= 1
    return max(begin_us, min(merged[index][1], until_us)) if index >= 0 else begin_us


def _clusters(trace: ChromeTrace, device: Sequence[DeviceEvent]) -> Segmentation:
    if device:
        busy = [(event.begin_us, event.end_us) for event in device]
        return Segmentation(_cluster(busy), "a guess: device work between long gaps", None)
    per_thread: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in trace.ops:
        per_thread[span.thread].append(span)
    if not per_thread:
        return Segmentation((), "nothing to segment", None)
    thread = max(per_thread, key=lambda key: sum(end - begin for begin, end in _union(_pairs(per_thread[key]))))
    return Segmentation(
        _cluster(_pairs(per_thread[thread])), "a guess: operators of the busiest thread between long gaps", thread
    )


def _pairs(spans: list[Span]) -> list[tuple[float, float]]:
    return [(span.begin_us, span.end_us) for span in spans]


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _cluster(intervals: list[tuple[float, float]]) -> tuple[StepWindow, ...]:
    """Split where a gap is 20 times the median gap and at least 50 µs; a step reaches to the next one's begin."""
    merged = _union(intervals)
    gaps = sorted(after[0] - before[1] for before, after in pairwise(merged))
    limit = max(_CLUSTER_LEAST_US, _CLUSTER_FACTOR * gaps[len(gaps) // 2]) if gaps else 0.0
    begins = [merged[0][0]]
    begins += [after[0] for before, after in pairwise(merged) if after[0] - before[1] > limit]
    ends = [*begins[1:], merged[-1][1]]
    return tuple(StepWindow(begin, end, "") for begin, end in zip(begins, ends, strict=True) if end > begin)
