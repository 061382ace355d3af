"""The gate of a pull request: few sessions, judged with the scatter that a noise card holds. Pure.

Owns the cells of a gate, the Holm step over them, and the words of each verdict. With a card one session can speak;
without one the sessions speak for themselves, by t (`decide.reading`). It is no part of the rule: nothing is enabled
here, and no gate is evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from kbench.decide.cells import standing
from kbench.decide.estimate import (
    Sessions,
    Unusable,
    block_log_ratios,
    session_changes,
    session_log_ratios,
)
from kbench.decide.evidence import Cell, Evidence, Series
from kbench.decide.reading import Reading, alone, estimate_variance, plug_in
from kbench.decide.results import ClauseStatus, percent
from kbench.errors import ExitCode
from kbench.noise import CaseNoise, Scatter
from kbench.protocol import Status
from kbench.stats import Interval, holm
from kbench.suite.schema import Suite

ALPHA = 0.05
"""Two-sided, over all cells of a gate."""
TOTAL = {"kernel": "latency", "step": "step_time"}
"""The metric of a level that a gate judges."""
COMPONENT_FLOOR_US = 1.0
"""A component below it changes in units of it: a conversion that the baseline does not need takes no time at all."""


class GateVerdict(StrEnum):
    """What a gate says about one cell."""

    REGRESSED = "regressed"
    IMPROVED = "improved"
    PASS = "pass"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    """The candidate crashed or was wrong."""
    MISSING = "missing"
    """The candidate does not support the cell, or the case cannot tell right from wrong."""
    VOID = "void"
    """The baseline failed, or nothing was measured."""


GATE_CODES: dict[GateVerdict, ExitCode] = {
    GateVerdict.REGRESSED: ExitCode.DISABLE,
    GateVerdict.IMPROVED: ExitCode.DONE,
    GateVerdict.PASS: ExitCode.DONE,
    GateVerdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    GateVerdict.FAILED: ExitCode.DISABLE,
    GateVerdict.MISSING: ExitCode.MISSING,
    GateVerdict.VOID: ExitCode.MEASUREMENT,
}


@dataclass(frozen=True, slots=True)
class Change:
    """A relative change of time, above 0 slower, with its limits; a limit that the sessions cannot give is infinite."""

    metric: str
    point: float
    low: float
    high: float
    sessions: int


@dataclass(frozen=True, slots=True)
class GateCell:
    """One cell of a gate."""

    case: str
    metric: str
    verdict: GateVerdict
    reason: str
    change: Change | None = None
    p: float = math.nan
    p_adjusted: float = math.nan
    """By Holm, over the cells of the gate: significant at or below `ALPHA`."""
    components: tuple[Change, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "metric": self.metric,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "change": None if self.change is None else _change_json(self.change),
            "p": _finite(self.p),
            "p_adjusted": _finite(self.p_adjusted),
            "components": [{"metric": item.metric, **_change_json(item)} for item in self.components],
        }


@dataclass(frozen=True, slots=True)
class Observed:
    """The sessions' estimates of a metric, and the variance of each as its own blocks show it (if it has blocks)."""

    sessions: Sessions
    within: tuple[float, ...] = field(default=())


# ------------------------------------------------------------------------------------------- from samples


def observe(
    evidence: Evidence, cell: Cell, metric: str, candidate: str, baseline: str, void: frozenset[int] = frozenset()
) -> Observed | Unusable:
    """The sessions' estimates of a window metric, each with its own variance."""
    ours, theirs = (evidence.series(cell, metric, variant, "window") for variant in (candidate, baseline))
    blocks, sessions = block_log_ratios(ours, theirs), session_log_ratios(ours, theirs)
    if isinstance(sessions, Unusable) or isinstance(blocks, Unusable):
        return sessions if isinstance(sessions, Unusable) else Unusable("no blocks")
    kept = sessions.without(void)
    if len(kept) == 0:
        return Unusable("no session in which the baseline ran")
    return Observed(
        kept,
        tuple(estimate_variance(blocks.ratio[blocks.session == number].tolist()) for number in kept.session.tolist()),
    )


def observe_components(
    evidence: Evidence, cell: Cell, candidate: str, baseline: str, void: frozenset[int] = frozenset()
) -> dict[str, Observed]:
    """What a step takes once a session: its phases, conversion and metadata, where either arm spends time on them."""
    found: dict[str, Observed] = {}
    for metric in evidence.metrics(cell, candidate, "session"):
        if not (metric.startswith("phase.") or metric in ("conversion_time", "metadata_time")):
            continue
        ours, theirs = (evidence.series(cell, metric, variant, "session") for variant in (candidate, baseline))
        if not (_any(ours) or _any(theirs)):
            continue
        sessions = session_changes(ours, theirs, COMPONENT_FLOOR_US)
        if isinstance(sessions, Sessions) and len(kept := sessions.without(void)):
            found[metric] = Observed(kept)
    return found


def scatter_of(
    evidence: Evidence, cell: Cell, metric: str, candidate: str, baseline: str, sessions: int
) -> CaseNoise | Unusable:
    """What an A/A calibration of `sessions` sessions says about a cell: the judged metric and its components."""
    total = observe(evidence, cell, metric, candidate, baseline)
    if isinstance(total, Unusable):
        return total
    if len(total.sessions) < sessions:
        return Unusable(f"{len(total.sessions)} of {sessions} sessions measured it")
    metrics = {metric: Scatter.of(total.sessions.estimate.tolist(), total.within)}
    for name, item in observe_components(evidence, cell, candidate, baseline).items():
        if len(item.sessions) == sessions:
            metrics[name] = Scatter.of(item.sessions.estimate.tolist())
    return CaseNoise(metrics=metrics)


def _any(series: Series) -> bool:
    return bool(len(series)) and bool(np.isfinite(series.value).all()) and bool((series.value > 0.0).any())


# ------------------------------------------------------------------------------------------- the verdicts


def judge_gate(
    suite: Suite, evidence: Evidence, cases: Mapping[str, Cell], noise: Mapping[str, CaseNoise]
) -> tuple[GateCell, ...]:
    """All cells (case id → cell) of a gate. `noise`: the card's cases; empty without a card."""
    baseline, candidate = suite.claim.baseline, suite.claim.candidate
    judged: dict[str, GateCell] = {}
    readings: dict[str, Reading] = {}
    for case, cell in cases.items():
        metric = TOTAL[cell.level]
        standing_ = standing(suite, evidence, cell)
        if standing_.objection is not None:
            judged[case] = _objected(case, metric, evidence, cell, suite, standing_.objection.text)
            continue
        found = observe(evidence, cell, metric, candidate, baseline, standing_.void_sessions)
        if isinstance(found, Unusable):
            judged[case] = GateCell(case, metric, GateVerdict.VOID, f"{cell}: {found.why}")
            continue
        readings[case] = _read(found, noise.get(case), metric)
        components = observe_components(evidence, cell, candidate, baseline, standing_.void_sessions)
        judged[case] = GateCell(
            case,
            metric,
            GateVerdict.INCONCLUSIVE,
            "",
            components=tuple(
                _plain(name, _read(item, noise.get(case), name).interval(ALPHA)) for name, item in components.items()
            ),
        )
    for case, cell_verdict in _family(readings, judged, suite.gate.margin).items():
        judged[case] = cell_verdict
    return tuple(judged.values())


def _read(found: Observed, noise: CaseNoise | None, metric: str) -> Reading:
    estimates = found.sessions.estimate.tolist()
    scatter = None if noise is None else noise.metrics.get(metric)
    return alone(estimates) if scatter is None else plug_in(estimates, found.within, scatter)


def _family(readings: Mapping[str, Reading], judged: Mapping[str, GateCell], margin: float) -> dict[str, GateCell]:
    """Holm over the cells. A cell's interval has the error of its step, so that what is shown is what decided."""
    if not readings:
        return {}
    p_values = {case: reading.p for case, reading in readings.items()}
    steps = holm(list(p_values.values()), ALPHA)
    adjusted = dict(zip(p_values, steps.adjusted, strict=True))
    rejected = [case for case, hit in zip(p_values, steps.rejected, strict=True) if hit]
    rank = {case: place for place, case in enumerate(sorted(rejected, key=lambda case: p_values[case]))}
    found = {}
    for case, reading in readings.items():
        interval = reading.interval(ALPHA / (len(readings) - rank.get(case, len(rejected))))
        verdict = _verdict(interval, case in rank, math.log1p(margin))
        change = Change(
            judged[case].metric,
            _relative(interval.point),
            _relative(interval.low),
            _relative(interval.high),
            interval.n,
        )
        reason = _reason(verdict, change, margin, reading)
        found[case] = GateCell(
            case,
            judged[case].metric,
            verdict,
            reason,
            change,
            p_values[case],
            adjusted[case],
            judged[case].components,
        )
    return found


def _verdict(interval: Interval, significant: bool, most: float) -> GateVerdict:
    if significant and interval.point != 0.0:
        return GateVerdict.REGRESSED if interval.point > 0.0 else GateVerdict.IMPROVED
    return GateVerdict.PASS if interval.high <= most else GateVerdict.INCONCLUSIVE


def _reason(verdict: GateVerdict, change: Change, margin: float, reading: Reading) -> str:
    interval = f"{percent(change.low, signed=True)} to {percent(change.high, signed=True)}"
    text = f"change {percent(change.point, signed=True)} ({interval}, {reading.sessions} sessions)"
    ends = {
        GateVerdict.REGRESSED: "slower",
        GateVerdict.IMPROVED: "faster",
        GateVerdict.PASS: f"no slow-down beyond the margin of {percent(margin)} is left possible",
        GateVerdict.INCONCLUSIVE: f"a slow-down beyond the margin of {percent(margin)} is still possible",
    }
    return "; ".join(part for part in (text, ends[verdict], reading.noise) if part)


def _objected(case: str, metric: str, evidence: Evidence, cell: Cell, suite: Suite, why: str) -> GateCell:
    """A cell that its trials object to: the candidate's fault, the baseline's, or nobody's."""
    found = standing(suite, evidence, cell).objection
    if found is not None and found.status is ClauseStatus.FAIL:
        return GateCell(case, metric, GateVerdict.FAILED, why)
    cannot = (Status.UNSUPPORTED, Status.NON_DISCRIMINATING)
    if any(trial.status in cannot for trial in evidence.trials(cell)):
        return GateCell(case, metric, GateVerdict.MISSING, why)
    return GateCell(case, metric, GateVerdict.VOID, why)


def _plain(metric: str, interval: Interval) -> Change:
    return Change(metric, interval.point, interval.low, interval.high, interval.n)


def _relative(log_ratio: float) -> float:
    return math.inf if log_ratio > 700.0 else math.expm1(log_ratio)


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "point": _finite(change.point),
        "low": _finite(change.low),
        "high": _finite(change.high),
        "sessions": change.sessions,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
