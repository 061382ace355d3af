"""A decision as `selector.json`: what `kbench.selector` reads and an engine obeys.

Owns what an enable is allowed to mean for an engine: which situations were measured, on what, and until when. Where
an enabled regime cannot be told apart, or was not measured at the corners of its range, the entry keeps the baseline
and its note says why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kbench.catalog import PLAIN, Point, parse_shape
from kbench.decide import Decision, RegimeVerdict, Verdict
from kbench.decide.clauses import regime_cells
from kbench.decide.results import number
from kbench.errors import MeasurementError
from kbench.hashing import sha256_of
from kbench.plan import Plan, model_label
from kbench.record import RunRecord
from kbench.report.text import clean
from kbench.selection import selections_of
from kbench.selector import BASELINE, CANDIDATE, SCHEMA, holds, sealed
from kbench.suite.rule_schema import Regime
from kbench.suite.schema import Suite

FILE = "selector.json"
_MEASURED_IN_STEPS = ("kernel", "step")


def selector_document(
    plan: Plan,
    decision: Decision,
    records: Sequence[RunRecord],
    ledger_head: str,
    *,
    now: datetime | None = None,
) -> dict[str, Any]:
    """The selector of a decision over `records`, all runs of `plan` on one machine (none: everything is baseline).

    ledger_head: the hash of the ledger's entry that holds this decision.
    now: when the file is made, by default the present; with a zone.
    """
    suite = plan.loaded.suite
    created = datetime.now(UTC) if now is None else now
    valid_for, doubt = _measured_on(plan, records)
    runs = [record.run_id for record in records]
    declared = plan.declaration["suite"]
    return sealed(
        {
            "schema": SCHEMA,
            "suite": plan.name,
            "plan_hash": plan.plan_hash,
            "ledger_head": ledger_head,
            "lock_hash": plan.lock_hash,
            "rule_sha256": sha256_of({"rule": declared.get("rule", {}), "regime": declared.get("regime", [])}),
            "created": created.isoformat(timespec="seconds"),
            "expires": _expiry(records, created, suite.rule.policy.selector_ttl_days).isoformat(timespec="seconds"),
            "valid_for": valid_for,
            "variants": {BASELINE: plan.baseline.name, CANDIDATE: plan.candidate.name},
            "default": BASELINE,
            "on_mismatch": "fallback",
            "assert_backend": {phase: _measured_backend(plan, records, phase) for phase in ("prefill", "decode")},
            "scope": "deployment" if suite.claim.changes_shared_state else "step",
            "entries": [
                {**entry, "evidence": runs, "est": _estimates(verdict)}
                for regime, verdict in zip(suite.regime, decision.regimes, strict=True)
                for entry in _entries(suite, regime, verdict, doubt if runs else "nothing was measured")
            ],
        }
    )


def _measured_backend(plan: Plan, records: Sequence[RunRecord], phase: str) -> str:
    """Who served the candidate when it was measured; who was asked to, where nothing was. Two are no evidence."""
    op = f"attention.{phase}"
    found = {
        str(record.get("resolved"))
        for run in records
        for trial in run.trials
        if trial.variant == plan.candidate.name
        for role, record in selections_of(trial.facts)
        if record.get("resolved") and str(record.get("op") or f"attention.{role}") == op
    }
    asked: str = getattr(plan.candidate, phase)
    return found.pop() if len(found) == 1 else asked


def write_selector(document: dict[str, Any], path: Path) -> Path:
    """Write it beside `path` and rename: an engine sees the old file or the new one, whole."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise MeasurementError(
            f"cannot write the selector: {error.strerror or error}", where=str(path), remedy="choose another --out"
        ) from error
    return path


def _entries(suite: Suite, regime: Regime, verdict: RegimeVerdict, doubt: str) -> Iterator[dict[str, Any]]:
    """One entry, or for ranges one a phase that was measured."""
    found = {"regime": regime.id, "trace_class": list(regime.trace_class), "verdict": verdict.verdict.value}
    declared = regime.when.model_dump(mode="json", exclude_none=True) if regime.when else {}
    kept = {**found, "when": declared, "use": BASELINE}
    if verdict.verdict is not Verdict.ENABLE:
        yield {**kept, "note": ""}
    elif doubt:
        yield {**kept, "note": clean(doubt)}
    elif not regime.trace_class and (suite.claim.changes_shared_state or not declared):
        wanted = "trace_class" if suite.claim.changes_shared_state else "trace_class or when"
        yield {**kept, "note": f"it has no {wanted} by which an engine could recognise it"}
    elif not declared:
        yield {**found, "when": {}, "use": CANDIDATE, "note": ""}
    else:
        boxes = _boxes(suite, regime)
        for when in boxes:
            yield {**found, "when": when, "use": CANDIDATE, "note": ""}
        if not boxes:
            yield {**kept, "note": "no corners of a range inside `when` were measured in steps"}


def _boxes(suite: Suite, regime: Regime) -> list[dict[str, Any]]:
    """For each phase the range between the measured points inside `when`, if all of its corners are among them.

    A verdict speaks about cells; what lies between them is a reader's inference, and what lies outside them is not.
    """
    boxes = []
    by_phase: dict[str, set[tuple[int, int]]] = {}
    for point in _measured_points(suite, regime):
        by_phase.setdefault(_phase(point), set()).add((point.context, point.batch))
    for phase, points in by_phase.items():
        contexts, batches = [context for context, _ in points], [batch for _, batch in points]
        context, batch = [min(contexts), max(contexts)], [min(batches), max(batches)]
        if {(c, b) for c in context for b in batch} <= points:
            boxes.append({"phase": phase, "context": context, "batch": batch})
    return boxes


def _measured_points(suite: Suite, regime: Regime) -> Iterator[Point]:
    """Points inside `when` at which a clause of this regime was judged."""
    when = regime.when
    for level in {clause.level for clause in regime.require} & set(_MEASURED_IN_STEPS):
        for cell in regime_cells(suite, regime, level):
            shape = parse_shape(cell.point)
            point = shape.point
            if (
                when is not None
                and point is not None
                and shape.attributes == PLAIN  # a dispatcher sees a batch, not how its pages lie
                and _within(point.context, when.context)
                and _within(point.batch, when.batch)
            ):
                yield point


def _within(value: int, bounds: tuple[int, int] | None) -> bool:
    return bounds is None or bounds[0] <= value <= bounds[1]


def _phase(point: Point) -> str:
    if point.is_decode:
        return "decode"
    return "mixed" if any(query == 1 for query, _ in point.sequences) else "prefill"


def _measured_on(plan: Plan, records: Sequence[RunRecord]) -> tuple[dict[str, str], str]:
    """What the engine must be, and what is not certain about it ("" where nothing is)."""
    seen: dict[str, set[str]] = {}
    for record in records:
        for name, value in _identity(record):
            seen.setdefault(name, set()).add(clean(value))
    seen |= {"model": {model_label(plan.loaded.suite.model)}, "dtype": {plan.loaded.suite.model.dtype}}
    doubts = [f"{name} of the measured machine is not known" for name, values in seen.items() if "" in values]
    doubts += [
        f"runs differ in {name}: {', '.join(sorted(values))}" for name, values in seen.items() if len(values) > 1
    ]
    certain = {name: value for name, values in seen.items() if len(values) == 1 for value in values if value}
    for name, allowed in _declared(plan.loaded.suite).items():
        if name in certain and holds(allowed, certain[name]):
            certain[name] = allowed
        elif name in certain:
            doubts.append(f"{name} {certain[name]} was measured, and rule.validity says {allowed}")
    return certain, "; ".join(doubts)


def _declared(suite: Suite) -> dict[str, str]:
    """What `[rule.validity]` widens the measured machine to, by the selector's features."""
    stated = suite.rule.validity
    named = {"gpu": stated.gpu, "driver": stated.driver, "torch": stated.torch}
    named["engine"] = f"kbench@{stated.kbench}" if stated.kbench else None
    return {name: value for name, value in named.items() if value is not None}


def _identity(record: RunRecord) -> Iterable[tuple[str, str]]:
    """Names and values of one run; "" is unknown. A CPU is named instead of a GPU where none was used."""
    environment = record.header.get("environment") or {}
    yield "engine", f"kbench@{record.header['kbench']}" if record.header.get("kbench") else ""
    yield "torch", str(_inside(environment, "python", "packages", "torch"))
    if record.header.get("device") == "cpu":
        yield "gpu", "none"
        yield "driver", "none"
        yield "cpu", str(_inside(environment, "cpu", "model") or _inside(environment, "os", "machine"))
        return
    names = {str(gpu.get("name") or "") for gpu in environment.get("gpus") or ()}
    yield "gpu", names.pop() if len(names) == 1 else ""
    yield "driver", str(environment.get("gpu_driver") or "")


def _inside(table: Any, *path: str) -> Any:
    for name in path:
        table = table.get(name) if isinstance(table, dict) else None
    return table or ""


def _expiry(records: Sequence[RunRecord], created: datetime, days: int) -> datetime:
    """So many days after the newest run ended; a run without a time gives no time at all."""
    if not records:
        return created + timedelta(days=days)
    times = [_time(record.header.get("ended") or record.header.get("started")) for record in records]
    known = [time for time in times if time is not None]
    return max(known) + timedelta(days=days) if known else created


def _time(text: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo else None


def _estimates(verdict: RegimeVerdict) -> list[dict[str, Any]]:
    """What was estimated for each written clause: of time saved for superiority, relative change otherwise."""
    return [
        {
            "level": clause.level,
            "metric": clause.metric,
            "mode": clause.mode,
            "test": clause.test,
            "observed": number(clause.observed),
            "low": number(clause.low),
            "high": number(clause.high),
            "threshold": number(clause.threshold),
        }
        for clause in verdict.clauses
        if not clause.implied
    ]
