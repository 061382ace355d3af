"""A decision as rows of text: the verdict of each regime, its clauses, and the three boundaries side by side.

Owns how a clause is said in one cell. It decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbench.catalog import Case, parse_shape
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
    head = f"exit code {int(decision.exit_code)}; {evidence_line(decision)}; plan {clean(decision.plan_hash)[:16]}"
    columns = ("regime", "verdict", "clauses passed", *(("why",) if why else ()))
    return Grid(f"Verdict: {clean(decision.suite)}", columns, tuple(rows), labels=2, notes=(head, *_beside(decision)))


def evidence_line(decision: Decision) -> str:
    """What the verdicts rest on: sessions, runs, voids, and the error that the looks have spent."""
    runs, looks = decision.runs, decision.looks
    parts = [
        count(decision.sessions, "session"),
        f"{count(runs.total, 'run')}, {runs.aborted} aborted, {runs.void} void",
        f"error per regime {percent(_finite(decision.alpha_per_regime))}",
    ]
    if looks.at:
        said = f"{looks.used} of {count(len(looks.at), 'look')} used"
        parts.append(f"{said}, α {looks.spent:.2g} of {decision.alpha_per_regime:.2g} spent" if looks.used else said)
    if decision.voids or decision.lost:
        parts.append(f"{count(len(decision.voids), 'session')} void for both arms, {decision.lost} lost")
    if decision.forced:
        parts.append(f"level 3 forced in {', '.join(clean(run) for run in decision.forced)}")
    return "; ".join(parts)


def _beside(decision: Decision) -> tuple[str, ...]:
    """What is said under the verdicts and decides nothing."""
    lines = [f"{item.regime}: next: {item.action}" for item in decision.regimes if item.action]
    lines += [f"{item.regime}: {found.sentence}" for item in decision.regimes for found in item.amplification]
    lines += [f"{item.regime}: contaminated: {text}" for item in decision.regimes for text in item.contaminated]
    lines += [f"void: {text}" for text in decision.voids]
    plans = decision.earlier_plans
    if plans:
        lines.append(f"{count(len(plans), 'earlier plan')} of this candidate: " + "; ".join(map(earlier_plan, plans)))
    return tuple(clean(line) for line in lines)


def earlier_plan(plan: Mapping[str, Any]) -> str:
    """`3f2a… of 2026-01-02 (pilot): long disable, chat enable`."""
    verdicts = plan.get("verdicts")
    said = ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items()) if verdicts else "never decided"
    pilot = " (pilot)" if plan.get("pilot") else ""
    return clean(f"{str(plan['plan_hash'])[:12]} of {str(plan['time'])[:10]}{pilot}: {said}")


def earlier_grid(decision: Decision) -> Grid:
    """Every other plan of this candidate: how often it was tried, and what became of it."""
    rows = tuple(
        (
            clean(str(plan["plan_hash"])[:16]),
            clean(str(plan["time"])[:19]),
            "pilot" if plan.get("pilot") else "earlier arms",
            clean(", ".join(f"{name} {verdict}" for name, verdict in (plan.get("verdicts") or {}).items())) or MISSING,
        )
        for plan in decision.earlier_plans
    )
    return Grid("Earlier plans of this candidate", ("plan", "made", "kind", "last verdicts"), rows)


def diagnostic_grid(decision: Decision) -> Grid:
    """Order, drift and controls of every cell; a control that moved is named contaminated."""
    rows = tuple(
        (
            clean(f"{cell['level']} {cell['cell']}"),
            *(_shift(cell[name]) for name in ("carry_over", "order", "drift", "control")),
            "contaminated" if cell["contaminated"] else "",
        )
        for cell in decision.diagnostics
    )
    note = (
        "carry-over: what the arm before a window does to it, in favour of one arm; order: what standing second in a "
        "pair costs (it cancels); drift: first to last block of a session; control: phases that run none of the "
        "candidate's code; 95 % by t over sessions in brackets"
    )
    columns = ("cell", "carry-over", "order", "drift", "control", "")
    return Grid("Diagnostics", columns, rows, notes=(note,))


def amplification_grid(decision: Decision) -> Grid:
    rows = tuple(
        (clean(item.regime), clean(found.sentence)) for item in decision.regimes for found in item.amplification
    )
    note = "from a saving of step time to goodput; it gates nothing"
    return Grid("Amplification", ("regime", "what a step saving became"), rows, notes=(note,))


def _shift(shift: Mapping[str, Any]) -> str:
    if shift["point"] is None:
        return MISSING
    low, high = (percent(shift[side], signed=True) for side in ("low", "high"))
    return f"{percent(shift['point'], signed=True)} [{low} to {high}]"


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
    """The regime's points, which are shapes at level 1, in canonical form; empty: all."""
    found = [item for item in suite.regime if item.id == regime] if suite is not None else []
    return frozenset(str(parse_shape(text)) for item in found for text in item.points)


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
