"""What users got out of a replay: every request in one class, and the metrics of each segment and of the whole.

Owns classes, segments, percentiles and the summary. It knows neither how the replay was done nor what is compared
with what. Latency counts from the *scheduled* arrival, so a slow engine cannot hide its queue; shares count over
*scheduled* requests, so it cannot shed them either.

Percentiles are nearest-rank: the value at ceil(p × n). With too few values (p99 of fewer than 100) that is the
maximum. A request that never got a first token has a TTFT of infinity, one that did not finish a TPOT of infinity:
failing does not improve a tail. An output of one token has no TPOT and meets that limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kbench.errors import MeasurementError, UsageError
from kbench.protocol import Measurement
from kbench.stats.location import autocorrelation, percentile
from kbench.targets.base import ReplayResult, RequestResult
from kbench.traces.trace import Trace

CLASSES = ("good", "late", "not_sent", "failed", "cancelled", "rejected", "unfinished")
UNITS = {
    "goodput": "ratio",
    "ttft_p50": "us",
    "ttft_p99": "us",
    "tpot_p50": "us",
    "tpot_p99": "us",
    "preemptions_per_1k": "1/1000",
    "recomputed_tokens": "tokens",
    "hit_ratio": "ratio",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What makes a finished request good; infinity where there is no limit."""

    ttft_us: float = math.inf
    tpot_us: float = math.inf


@dataclass(frozen=True, slots=True)
class Segments:
    """Request ids of each segment in order, and those of the warm-up, which no metric counts."""

    members: tuple[tuple[int, ...], ...]
    warmup: tuple[int, ...] = ()

    @property
    def measured(self) -> tuple[int, ...]:
        return tuple(request for members in self.members for request in members)


@dataclass(frozen=True, slots=True)
class Service:
    """Measurements of each segment and of the whole (segment -1), and facts that JSON can hold.

    `facts` has `summary` (name → number, null where there is none), `classes` (name → requests), `scheduled`, `slo`,
    `mode`, `timing` and `extrapolated_fraction`.
    """

    measurements: tuple[Measurement, ...]
    facts: dict[str, Any]


# ---------------------------------------------------------------------------------------- one request


def ttft_us(request: RequestResult) -> float:
    """Scheduled arrival to first token; infinity where there was none."""
    return request.first_token_us - request.scheduled_us if request.output_tokens else math.inf


def tpot_us(request: RequestResult) -> float:
    """Time per output token after the first; infinity where unfinished, NaN (undefined) for one token."""
    if request.status != "finished":
        return math.inf
    if request.output_tokens < 2:
        return math.nan
    return (request.finished_us - request.first_token_us) / (request.output_tokens - 1)


def classify(request: RequestResult, limits: Limits) -> str:
    """The one class of `CLASSES` that a scheduled request ends in."""
    if request.status != "finished":
        return request.status
    # An undefined TPOT compares false, that is: it meets the limit.
    missed = ttft_us(request) > limits.ttft_us or tpot_us(request) > limits.tpot_us
    return "late" if missed else "good"


# ------------------------------------------------------------------------------------------- segments


def segments_of(trace: Trace, segments: int, warmup: float = 0.0, *, at_most: bool = False) -> Segments:
    """Slices of nearly equal numbers of requests by session arrival; no session is split between two.

    It depends on the trace alone, so both arms of a comparison have the same segments. A session arrives with its
    first root. Where the trace has too few sessions it is a UsageError, or with `at_most` there are fewer segments.
    """
    arrival: dict[int, int] = {}
    requests: dict[int, list[int]] = {}
    for request, session in enumerate(trace.session_id.tolist()):
        requests.setdefault(session, []).append(request)
        if trace.arrival_us.known[request]:
            when = int(trace.arrival_us.values[request])
            arrival[session] = min(when, arrival.get(session, when))
    order = sorted(requests, key=lambda session: (arrival.get(session, 0), requests[session][0]))
    warm: list[int] = []
    rest: list[list[int]] = []
    for session in order:
        if not rest and len(warm) + len(requests[session]) <= warmup * len(trace):
            warm += requests[session]
        else:
            rest.append(requests[session])
    if at_most:
        segments = min(segments, len(rest))
    if len(rest) < segments:
        raise UsageError(
            f"{segments} segments of {len(rest)} sessions after the warm-up",
            where=trace.meta.source,
            remedy="use a longer trace or fewer workload.segments",
        )
    return Segments(tuple(tuple(part) for part in _cut(rest, segments)), tuple(warm))


def _cut(sessions: Sequence[list[int]], parts: int) -> list[list[int]]:
    """`parts` runs of whole sessions, none empty, each ending as near to its share of the requests as it can."""
    total = sum(len(session) for session in sessions)
    found: list[list[int]] = [[]]
    done = 0
    for index, session in enumerate(sessions):
        left, open_parts = len(sessions) - index, parts - len(found)
        boundary = total * len(found) / parts
        full = done + len(session) / 2 > boundary
        if found[-1] and open_parts and (full or left <= open_parts):
            found.append([])
        found[-1] += session
        done += len(session)
    return found


def not_due(requests: Sequence[RequestResult]) -> frozenset[int]:
    """Requests that a real replay did not come to, because its time was up before they were due.

    They were not scheduled, so they belong to no class. A request that was not sent because one before it in its
    session did not finish is not among them: that is a failure of the engine.
    """
    broken = {each.session_id for each in requests if each.status not in ("finished", "not_sent")}
    return frozenset(
        each.request_id for each in requests if each.status == "not_sent" and each.session_id not in broken
    )


def without(segments: Segments, requests: frozenset[int]) -> Segments:
    """The same segments, under the same numbers, without these requests; one may be left with none."""
    members = tuple(tuple(each for each in part if each not in requests) for part in segments.members)
    return Segments(members, tuple(each for each in segments.warmup if each not in requests))


# -------------------------------------------------------------------------------------------- metrics


def metrics_of(requests: Sequence[RequestResult], limits: Limits) -> dict[str, float]:
    """The metrics of `UNITS` over these requests; one that no request defines is left out, never zero."""
    count = len(requests)
    times = [ttft_us(request) for request in requests]
    paces = [pace for request in requests if not math.isnan(pace := tpot_us(request))]
    looked_up = sum(request.input_tokens for request in requests if request.output_tokens)
    hits = [request.hit_tokens for request in requests if request.output_tokens]
    found = {
        "goodput": sum(classify(request, limits) == "good" for request in requests) / count if count else math.nan,
        "ttft_p50": percentile(times, 0.50),
        "ttft_p99": percentile(times, 0.99),
        "tpot_p50": percentile(paces, 0.50),
        "tpot_p99": percentile(paces, 0.99),
        "preemptions_per_1k": 1_000 * _known(request.preemptions for request in requests) / count
        if count
        else math.nan,
        "recomputed_tokens": _known(request.recomputed_tokens for request in requests),
        "hit_ratio": _known(hits) / looked_up if looked_up else math.nan,
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _known(counts: Iterable[int | None]) -> float:
    """Their sum; NaN where one of them is unknown."""
    return float(sum(math.nan if value is None else value for value in counts))


def evaluate(result: ReplayResult, limits: Limits, segments: Segments) -> Service:
    """Metrics of each segment and of all measured requests. An infinite value carries the flag `censored`."""
    clock = "virtual" if result.mode == "virtual" else "wall"
    measurements: list[Measurement] = []
    series: list[float] = []
    found = {request.request_id: request for request in result.requests}
    lost = [request for request in segments.measured if request not in found]
    if lost:
        raise MeasurementError(f"the replay says nothing of {len(lost)} requests, the first is {lost[0]}")
    for index, members in enumerate(segments.members):
        if not members:
            continue
        metrics = metrics_of([found[request] for request in members], limits)
        series.append(metrics["goodput"])
        measurements += _measurements(metrics, clock, index)
    measured = [found[request] for request in segments.measured]
    total = metrics_of(measured, limits)
    measurements += _measurements(total, clock, -1)
    return Service(tuple(measurements), _facts(result, limits, measured, total, series))


def _measurements(metrics: dict[str, float], clock: str, segment: int) -> list[Measurement]:
    return [
        Measurement(name, UNITS[name], value, clock, () if math.isfinite(value) else ("censored",), segment)
        for name, value in metrics.items()
    ]


def _facts(
    result: ReplayResult,
    limits: Limits,
    measured: Sequence[RequestResult],
    total: dict[str, float],
    series: list[float],
) -> dict[str, Any]:
    counts = Counter(classify(request, limits) for request in measured)
    inputs = sum(request.input_tokens for request in measured)
    first = min((request.scheduled_us for request in measured if request.status != "not_sent"), default=0.0)
    last = max((request.finished_us for request in measured), default=0.0)
    summary: dict[str, float] = {
        **total,
        **_latencies(measured),
        **_occupancy(result, first),
        "goodput_per_s": counts["good"] / (last - first) * 1e6 if last > first else math.nan,
        "planned_hit_ratio": sum(request.planned_hit_tokens for request in measured) / inputs if inputs else math.nan,
        "preempted_requests": _known(
            None if request.preemptions is None else int(request.preemptions > 0) for request in measured
        ),
        "recompute_tax": _ratio(result.counters.get("recomputed_tokens"), result.counters.get("computed_tokens")),
        "evictions": result.counters.get("evictions", math.nan),
        "autocorrelation": _lag1(series),
        "dispatch_lag_p99_us": percentile(result.dispatch_lag_us, 0.99),
    }
    return {
        "summary": {name: _plain(value) for name, value in summary.items()},
        "classes": {name: counts[name] for name in CLASSES},
        "scheduled": len(measured),
        "slo": {"ttft_us": _plain(limits.ttft_us), "tpot_us": _plain(limits.tpot_us)},
        "mode": result.mode,
        "timing": "modeled" if result.mode == "virtual" else "measured",
        "extrapolated_fraction": result.extrapolated_fraction,
    }


def _latencies(measured: Sequence[RequestResult]) -> dict[str, float]:
    def spread(name: str, value: Callable[[RequestResult], float]) -> dict[str, float]:
        values = [value(request) for request in measured]
        return {f"{name}_p50_us": percentile(values, 0.5), f"{name}_p99_us": percentile(values, 0.99)}

    def queued(request: RequestResult) -> float:
        # A request that computed nothing may never have begun; its start is not known to be zero.
        return request.started_us - request.scheduled_us if request.output_tokens else math.inf

    def whole(request: RequestResult) -> float:
        return request.finished_us - request.scheduled_us if request.status == "finished" else math.inf

    return spread("queue", queued) | spread("e2e", whole)


def _occupancy(result: ReplayResult, since_us: float) -> dict[str, float]:
    """Shares of the pool weighted by step time, from the first measured arrival on; idle time does not count."""
    steps = result.steps
    kept = [index for index, start in enumerate(steps["start_us"]) if start >= since_us]
    weight = sum(steps["duration_us"][index] for index in kept)
    if not kept or weight <= 0:
        return {}

    def mean(column: str) -> float:
        return sum(steps[column][index] * steps["duration_us"][index] for index in kept) / weight

    in_use, used = mean("in_use_pages"), mean("used_tokens")
    return {
        "in_use": in_use / result.pages,
        "evictable": mean("evictable_pages") / result.pages,
        "blank": mean("blank_pages") / result.pages,
        "in_use_max": max(steps["in_use_pages"][index] for index in kept) / result.pages,
        "tail_waste": 1.0 - used / (in_use * result.page_size) if in_use else math.nan,
        "steps": float(len(kept)),
    }


def _lag1(series: list[float]) -> float:
    """Autocorrelation of neighbouring segments; NaN where it is not defined (a constant or short series)."""
    if len(series) < 3 or max(series) == min(series):
        return math.nan
    return float(autocorrelation(series))


def _ratio(part: float | None, whole: float | None) -> float:
    return part / whole if part is not None and whole else math.nan


def _plain(value: float) -> float | None:
    """JSON has no infinity and no NaN: null says that there is no such number."""
    return value if math.isfinite(value) else None
