"""Level 3 in a worker: find the load and the limits, replay a trace in virtual time or for real, write the tables.

Owns the jobs; each returns an `Outcome`. It imports no torch: `exec_job` asks the embedded target for a real replay
when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kbench.engine.core import EngineConfig
from kbench.errors import MeasurementError
from kbench.measure.calibration import calibration, divergence, near_knee
from kbench.measure.load import (
    backlog_capacity,
    head,
    limits_from,
    limits_of,
    load_costs,
    multiple_of,
    plain_limits,
    recorded_rate,
    service_capacity,
    unloaded_medians,
)
from kbench.measure.load import cost_scale as measured_scale
from kbench.measure.service import Limits, Segments, evaluate, not_due, segments_of, without
from kbench.measure.shapes import histogram
from kbench.measure.tables import read_requests, write_parts
from kbench.protocol import Measurement, Outcome
from kbench.selection import SelectionRefused
from kbench.suite.schema import Arm, Slo
from kbench.targets.base import ReplayResult
from kbench.targets.virtual import replay_virtual
from kbench.traces.schema import read_trace

_LEAST_SLICE = 24
"""Fewest requests of a real slice; fewer than 20 pairs of outputs are no evidence of their equivalence."""


def setup_job(
    trace_path: Path | str,
    arm: Arm,
    costs_path: Path | str,
    *,
    rate: str | None = None,
    requests_per_s: float | None = None,
    slo: Slo | Mapping[str, Any] | None = None,
    exec_s: float = 4.0,
    cost_scale: float = 1.0,
) -> Outcome:
    """Load and limits of one trace class from the baseline `arm`; both arms are then replayed with them.

    Facts: `backlog_requests_per_s` (finished per second when all of it is queued at once), with a `rate` also
    `capacity_requests_per_s` (the highest rate at which 90 % are good; the backlog's where the trace cannot be
    overloaded: `overloadable`), `unloaded` medians of a request that has the engine and a cold cache to itself,
    `rate_scale` (so that the trace asks for `rate` × capacity, or `requests_per_s`; as recorded without both), `slo` in
    microseconds (null: no limit), and `slice_requests` (about `exec_s` seconds of work) for the real slice. Steps are
    taken `cost_scale` times as long as the grid says; `exec_job` measures it.
    """
    trace = read_trace(Path(trace_path))
    config, costs = EngineConfig.from_arm(arm), load_costs(costs_path, arm, cost_scale)
    backlog = backlog_capacity(trace, config, costs)
    recorded = recorded_rate(trace)
    unloaded = unloaded_medians(trace, config, costs)
    limits = limits_of(slo if isinstance(slo, Slo) else Slo.model_validate(slo or {}, strict=False), unloaded)
    load: dict[str, Any] = {"backlog_requests_per_s": backlog}
    if rate is not None:
        served = service_capacity(trace, config, costs, limits, backlog=backlog)
        capacity = backlog if served is None else served
        load |= {"capacity_requests_per_s": capacity, "overloadable": served is not None}
        wanted = multiple_of(rate) * capacity
    else:
        wanted = recorded if requests_per_s is None else requests_per_s
    facts: dict[str, Any] = {
        **load,
        "recorded_requests_per_s": recorded,
        "requests_per_s": wanted,
        "rate_scale": wanted / recorded,
        "unloaded": {"ttft_us": unloaded.ttft_us, "tpot_us": unloaded.tpot_us},
        "slo": plain_limits(limits),
        "slice_requests": min(len(trace), max(_LEAST_SLICE, round(backlog * exec_s))),
        "cost_scale": cost_scale,
        "costs": {"points": costs.points, "hold_out": asdict(costs.hold_out())},
        "timing": "modeled",
    }
    return Outcome(facts=facts)


def virtual_job(
    trace_path: Path | str,
    arm: Arm,
    costs_path: Path | str,
    *,
    rate_scale: float,
    slo: Mapping[str, float | None],
    segments: int,
    warmup: float = 0.0,
    max_requests: int | None = None,
    cost_scale: float = 1.0,
    paths: Mapping[str, str] | None = None,
    trace_class: str = "",
) -> Outcome:
    """Replay in virtual time. `max_requests` keeps the beginning of the trace only (the slice of a calibration)."""
    trace = read_trace(Path(trace_path))
    part = trace if max_requests is None else head(trace, max_requests)
    costs = load_costs(costs_path, arm, cost_scale)
    result = replay_virtual(part, EngineConfig.from_arm(arm), costs, rate_scale=rate_scale)
    cut = segments_of(part, segments, warmup, at_most=max_requests is not None)
    return _report(result, limits_from(slo), cut, arm, trace_class, rate_scale, paths)


def exec_job(
    trace_path: Path | str,
    arm: Arm,
    device: str,
    *,
    rate_scale: float,
    slo: Mapping[str, float | None],
    max_seconds: float,
    max_requests: int | None = None,
    segments: int = 20,
    warmup: float = 0.0,
    seed: int | None = None,
    costs_path: Path | str | None = None,
    paths: Mapping[str, str] | None = None,
    trace_class: str = "",
) -> Outcome:
    """Replay the beginning of the trace for real, on `device` and the wall clock; outputs are in the requests' table.

    There may be fewer segments than asked for: a slice of few sessions has no more. Requests that were not due when
    `max_seconds` were over belong to none (`not_due` in the facts counts them). With `costs_path` the facts have
    `cost_scale`, real over modelled time of these steps, for the other jobs.
    """
    from kbench.engine.runner import Engine
    from kbench.measure.refused import refused
    from kbench.targets.embedded import replay_exec

    trace = read_trace(Path(trace_path))
    part = trace if max_requests is None else head(trace, max_requests)
    try:
        engine = Engine(arm, device)
    except SelectionRefused as error:
        return refused(error)
    result: ReplayResult = replay_exec(
        part,
        arm,
        device,
        rate_scale=rate_scale,
        max_seconds=max_seconds,
        seed=arm.seed if seed is None else seed,
        engine=engine,
    )
    late = not_due(result.requests)
    cut = without(segments_of(part, segments, warmup, at_most=True), late)
    if not cut.measured:
        raise MeasurementError(
            f"no request after the warm-up was due within {max_seconds:g} s", remedy="raise workload.exec_s"
        )
    outcome = _report(result, limits_from(slo), cut, arm, trace_class, rate_scale, paths)
    selection = {phase: record.to_json() for phase, record in engine.runner.selection.items()}
    outcome = replace(outcome, facts={**outcome.facts, "not_due": len(late), "selection": selection})
    if costs_path is None:
        return outcome
    scale = measured_scale(result.steps, load_costs(costs_path, arm))
    return replace(outcome, facts={**outcome.facts, "cost_scale": _plain(scale)})


def _report(
    result: ReplayResult,
    limits: Limits,
    cut: Segments,
    arm: Arm,
    trace_class: str,
    rate_scale: float,
    paths: Mapping[str, str] | None,
) -> Outcome:
    service = evaluate(result, limits, cut)
    labels = {"variant": arm.name, "mode": result.mode, "trace": trace_class}
    write_parts(result, limits, cut, labels, paths or {})
    facts = {
        **service.facts,
        "segments": len(cut.members),
        "warmup_requests": len(cut.warmup),
        "rate_scale": rate_scale,
        "page_size": result.page_size,
        "pages": result.pages,
        "counters": dict(result.counters),
        "shapes": histogram(result.steps),
    }
    return Outcome(measurements=service.measurements, facts=facts)


# ---------------------------------------------------------------------------------- comparing replays


def calibrate_job(
    trace_path: Path | str,
    arm: Arm,
    costs_path: Path | str,
    *,
    exec_requests: Path | str,
    baseline_requests: Path | str,
    rate_scale: float,
    slo: Mapping[str, float | None],
    max_requests: int,
    candidate: bool = False,
    cost_scale: float = 1.0,
    paths: Mapping[str, str] | None = None,
    trace_class: str = "",
) -> Outcome:
    """Replay in virtual time the slice that `exec_job` replayed for real, and compare the two.

    They are compared under the limits at which the *baseline's* real slice is near its knee (`near_knee`). Facts are
    those of `Calibration` (NaN as null), with the settings of the slice.
    """
    part = head(read_trace(Path(trace_path)), max_requests)
    limits, slo_scale = near_knee(read_requests(baseline_requests), limits_from(slo))
    costs = load_costs(costs_path, arm, cost_scale)
    result = replay_virtual(part, EngineConfig.from_arm(arm), costs, rate_scale=rate_scale)
    compared = calibration(read_requests(exec_requests), result.requests, limits, candidate=candidate)
    cut = segments_of(part, 1)
    write_parts(result, limits, cut, {"variant": arm.name, "mode": "virtual", "trace": trace_class}, paths or {})
    facts = {name: _plain(value) for name, value in asdict(compared).items()}
    more = {
        "rate_scale": rate_scale,
        "cost_scale": cost_scale,
        "extrapolated_fraction": result.extrapolated_fraction,
        "slo": plain_limits(limits),
        "slo_scale": slo_scale,
    }
    return Outcome(facts={**facts, **more})


def divergence_job(requests_a: Path | str, requests_b: Path | str) -> Outcome:
    """`output_divergence` of two real replays of the same slice, one value a request (its id is the segment)."""
    a, b = (
        {request.request_id: request.output for request in read_requests(path) if request.status == "finished"}
        for path in (requests_a, requests_b)
    )
    found = divergence(a, b)
    measurements = tuple(
        Measurement("output_divergence", "ratio", value, "count", (), request) for request, value in found.items()
    )
    mean = sum(found.values()) / len(found) if found else math.nan
    same = sum(value == 0.0 for value in found.values())
    return Outcome(measurements=measurements, facts={"requests": len(found), "mean": _plain(mean), "identical": same})


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
