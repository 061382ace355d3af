"""A decision as rows of text: the verdict of each regime, its clauses, and the three boundaries side by side.

Owns how a clause is said in one cell. It decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbench.catalog import Case, parse_point
from kbench.decide.results import ClauseResult, Decision, RegimeVerdict
from kbench.report.grids import Grid
from kbench.report.text import MISSING, clean, count, percent
from kbench.suite.schema import Suite

Document = Mapping[str, Any]
LEVELS = ("kernel", "step", "workload")
_COUNTED = ("output_divergence",)


def verdict_grid(decision: Decision, *, why: bool = True) -> Grid:
    """One row a regime: the verdict, and one sentence for everything that it rests on."""
    rows = []
    for regime in decision.regimes:
        passed = sum(1 for clause in regime.clauses if clause.status == "pass")
        row = (clean(regime.regime), regime.verdict.value, f"{passed} of {len(regime.clauses)}")
        sentences = "; ".join(clean(reason) for reason in regime.reasons) or "no reason was given"
        rows.append((*row, sentences) if why else row)
    note = (
        f"exit code {int(decision.exit_code)}; {count(decision.sessions, 'session')}; "
        f"{count(decision.runs.total, 'run')}, {decision.runs.aborted} aborted, {decision.runs.void} void; "
        f"error per regime {percent(_finite(decision.alpha_per_regime))}; plan {clean(decision.plan_hash)[:16]}"
    )
    columns = ("regime", "verdict", "clauses passed", *(("why",) if why else ()))
    return Grid(f"Verdict: {clean(decision.suite)}", columns, tuple(rows), labels=2, notes=(note,))


def clause_grid(decision: Decision) -> Grid:
    rows = tuple(
        (
            clean(regime.regime),
            f"{clean(clause.level)} {_metric(clause)} {clean(clause.test)}",
            clause.status.value,
            _amount(clause.observed, clause),
            _interval(clause),
            _threshold(clause),
            clean(clause.cell) or MISSING,
        )
        for regime in decision.regimes
        for clause in regime.clauses
    )
    columns = ("regime", "clause", "status", "observed", "95 %", "threshold", "worst cell")
    note = (
        "observed: of time saved for superiority, relative change for the other tests; "
        f"95 %: over {count(decision.sessions, 'session')} (kernel, step) or over segments (workload)"
    )
    return Grid("Clauses", columns, rows, labels=2, notes=(note,))


@dataclass(frozen=True, slots=True)
class Boundaries:
    """What each level measured, for regimes whose rule does not ask about it: the documents of the levels."""

    suite: Suite | None = None
    kernel: Document = field(default_factory=dict)
    step: Document = field(default_factory=dict)
    workload: Document = field(default_factory=dict)


def boundary_grid(decision: Decision, measured: Boundaries | None = None) -> Grid:
    """Kernel, step and workload beside each other: where a gain at one boundary is lost at the next."""
    seen = measured or Boundaries()
    rows = []
    for regime in decision.regimes:
        asked = {level: _asked(regime, level) for level in LEVELS}
        shown = {
            "kernel": _kernel(regime.regime, seen),
            "step": _step(regime.regime, seen),
            "workload": _workload(regime.regime, seen),
        }
        cells = (asked[level] or f"no clause; {shown[level] or 'nothing to show'}" for level in LEVELS)
        rows.append((clean(regime.regime), *cells, regime.verdict.value))
    note = f"n = {count(decision.sessions, 'session')} for kernel and step, segments for workload; 95 % in brackets"
    return Grid("Three boundaries", ("regime", *LEVELS, "verdict"), tuple(rows), notes=(note,))


def _asked(regime: RegimeVerdict, level: str) -> str:
    return "; ".join(
        f"{_metric(clause)} {_amount(clause.observed, clause)} [{_interval(clause)}] {clause.status.value}"
        for clause in regime.clauses
        if clause.level == level and not (clause.implied and math.isnan(clause.observed))
    )


def _kernel(regime: str, seen: Boundaries) -> str:
    points = _points(regime, seen.suite)
    found = [
        item for item in seen.kernel.get("comparisons", ()) if not points or Case.parse(item["case"]).point in points
    ]
    savings = [1 - item["ratio"]["point"] for item in found if item["ratio"]["point"] is not None]
    if not savings:
        return ""
    words = [clean(item["verdict"]) for item in found]
    said = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    return f"latency {_range(savings)} saved; cells: {said}"


def _step(regime: str, seen: Boundaries) -> str:
    points = _points(regime, seen.suite)
    found = [item for item in seen.step.get("waterfalls", ()) if not points or item["point"] in points]
    savings = [item["saving"] for item in found if item["saving"] is not None]
    return f"step_time {_range(savings)} saved in {count(len(savings), 'cell')}" if savings else ""


def _workload(regime: str, seen: Boundaries) -> str:
    variants = seen.workload.get("variants", {})
    names = [seen.suite.claim.baseline, seen.suite.claim.candidate] if seen.suite is not None else list(variants)
    found = [variants.get(name, {}).get("regimes", {}).get(regime, {}).get("goodput") for name in names]
    known = [percent(value) for value in found if value is not None]
    return f"goodput {' to '.join(known)}" if len(known) == len(names) > 0 else ""


def _points(regime: str, suite: Suite | None) -> frozenset[str]:
    """The regime's points in canonical form; empty: all."""
    found = [item for item in suite.regime if item.id == regime] if suite is not None else []
    return frozenset(str(parse_point(text)) for item in found for text in item.points)


def _range(shares: Sequence[float]) -> str:
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low} to {high}"


def _metric(clause: ClauseResult) -> str:
    return clean(clause.metric) + (f" ({clean(clause.mode)})" if clause.mode else "")


def _amount(value: float, clause: ClauseResult) -> str:
    if clause.metric in _COUNTED:
        return percent(_finite(value))
    sign = clause.test != "superiority"
    return percent(_finite(value), signed=sign) + (" saved" if not sign and math.isfinite(value) else "")


def _interval(clause: ClauseResult) -> str:
    if not (math.isfinite(clause.low) or math.isfinite(clause.high)):
        return "no interval"
    low = percent(clause.low, signed=True) if math.isfinite(clause.low) else "unbounded"
    high = percent(clause.high, signed=True) if math.isfinite(clause.high) else "unbounded"
    return f"{low} to {high}"


def _threshold(clause: ClauseResult) -> str:
    word = {"superiority": "more than", "noninferiority": "no worse than", "max_increase": "at most"}.get(
        clause.test, "within ±"
    )
    return f"{word} {percent(_finite(clause.threshold))}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
