"""Selections as Prometheus metrics, in a text file that node_exporter's textfile collector reads.

Owns names and labels of the metrics. The exposition format is prometheus_client's, imported when used.

    kbench_backend_info{engine,suite,run,variant,role,phase,layer_kind,requested,resolved,observed,policy,reason} 1
    kbench_backend_drift{engine,suite,run,variant,role,phase,layer_kind} 0 or 1
    kbench_backend_fallback{engine,suite,run,variant,role,phase,layer_kind} 0 or 1
    kbench_backend_last_run_timestamp_seconds{engine,suite} UNIX time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kbench.errors import MeasurementError
from kbench.record import RunRecord
from kbench.report.backends_view import selections

FILE = "backends.prom"
WHERE = ("engine", "suite", "run", "variant", "role", "phase", "layer_kind")
WHO = ("requested", "resolved", "observed", "policy", "reason")
ENGINE = "kbench-embedded"
_LONGEST_REASON = 500


def exposition(suite: str, runs: Sequence[RunRecord], engine: str = ENGINE) -> bytes:
    """The metrics of the newest run that selected something; of none, the names alone."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    info = Gauge("kbench_backend_info", "Who computed what: asked for, resolved, seen.", WHERE + WHO, registry=registry)
    drift = Gauge("kbench_backend_drift", "1 where something ran that nobody had declared.", WHERE, registry=registry)
    stood_in = Gauge("kbench_backend_fallback", "1 where a declared stand-in served.", WHERE, registry=registry)
    when = Gauge(
        "kbench_backend_last_run_timestamp_seconds", "When the newest run began.", ("engine", "suite"),
        registry=registry,
    )  # fmt: skip
    newest = next((run for run in reversed(runs) if selections([run])), None)
    if newest is not None:
        drifted: dict[tuple[str, ...], tuple[bool, bool]] = {}
        for row in selections([newest]):
            where = tuple({"engine": engine, "suite": suite, "run": newest.run_id, **_where(row)}[key] for key in WHERE)
            info.labels(*where, *(_who(row)[key] for key in WHO)).set(1)
            before = drifted.get(where, (False, False))
            replaced = bool(row["resolved"]) and row["requested"] not in ("auto", row["resolved"])
            drifted[where] = before[0] or bool(row["drift"]), before[1] or replaced
        for where, (has, replaced) in drifted.items():
            drift.labels(*where).set(int(has))
            stood_in.labels(*where).set(int(replaced))
        when.labels(engine, suite).set(_began(newest))
    return bytes(generate_latest(registry))


def write(suite: str, runs: Sequence[RunRecord], path: Path) -> None:
    """Beside `path`, then renamed: a collector reads the whole file or none."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(exposition(suite, runs))
        partial.replace(path)
    except OSError as error:
        raise MeasurementError(f"cannot write: {error.strerror or error}", where=str(path)) from error


def _where(row: Mapping[str, Any]) -> dict[str, str]:
    """`attention.decode` is a phase of attention; other operations are named whole."""
    phase = str(row["op"]).removeprefix("attention.")
    return {"variant": row["variant"], "role": row["role"], "phase": phase, "layer_kind": row["layers"]}


def _who(row: Mapping[str, Any]) -> dict[str, str]:
    reasons = [
        f"{one['name']}: " + "; ".join(f"{r['field']} wants {r['want']} has {r['have']}" for r in one["reasons"])
        for one in row["candidates"]
        if one["reasons"]
    ]
    reasons += [f"{m['field']} changed from {m['before']} to {m['after']}" for m in row["mutations"]]
    names = {key: str(row[key]) for key in ("requested", "resolved", "observed", "policy")}
    return {**names, "reason": " | ".join(reasons)[:_LONGEST_REASON]}


def _began(run: RunRecord) -> float:
    try:
        return datetime.fromisoformat(str(run.header["started"])).timestamp()
    except (KeyError, ValueError):
        return 0.0
