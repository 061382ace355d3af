"""The rule over the evidence: one verdict a regime.

Owns the order of the verdicts (invalid, disable, missing evidence, inconclusive, enable), the integrity check of what
ran against what was asked for, and the cost ladder. It is pure: no files, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kbench.decide.budget import Budget
from kbench.decide.cells import standing
from kbench.decide.clauses import judge_clause, judge_regime, regime_cells, slower_cells
from kbench.decide.evidence import Evidence
from kbench.decide.results import ClauseResult, ClauseStatus, Decision, RegimeVerdict, Verdict
from kbench.errors import IntegrityError
from kbench.suite.schema import Regime, Suite


def decide(suite: Suite, evidence: Evidence, *, plan_hash: str | None = None) -> Decision:
    """Judge every regime of `suite`. The same suite and evidence give the same decision, whatever the rows' order.

    `plan_hash` is that of the plan being decided: IntegrityError where the evidence belongs to another one.
    """
    if plan_hash and evidence.plan_hash and plan_hash != evidence.plan_hash:
        raise IntegrityError(
            f"evidence of plan {evidence.plan_hash[:12]}, not of {plan_hash[:12]}",
            remedy="decide over the runs of one plan hash",
        )
    budget = Budget.of(suite.rule, len(suite.regime), evidence.runs.aborted)
    problems = (*evidence.integrity, *selection_drift(suite, evidence))
    regimes = _step_down(suite, evidence, budget, problems)
    return Decision(
        suite=suite.claim.name,
        plan_hash=plan_hash or evidence.plan_hash,
        regimes=regimes,
        runs=evidence.runs,
        sessions=evidence.sessions,
        alpha_per_regime=budget.regime_alpha,
    )


def level_passes(suite: Suite, evidence: Evidence, level: str, regime: Regime) -> bool:
    """Whether level 1 (`kernel`) or 2 (`step`) lets the regime go on to the next level.

    Measured and correct in every cell of the regime, every clause of the level passes, and at level 1 the candidate is
    significantly slower nowhere. A level that the suite does not measure stops nothing, unless a clause needs it.
    """
    if any(standing(suite, evidence, cell).objection for cell in regime_cells(suite, regime, level)):
        return False
    if level == "kernel" and slower_cells(suite, evidence, regime):
        return False
    budget = Budget.of(suite.rule, len(suite.regime), evidence.runs.aborted)
    clauses = (clause for clause in regime.require if clause.level == level)
    return all(judge_clause(suite, evidence, budget, regime, clause).status is ClauseStatus.PASS for clause in clauses)


def needs_workload(suite: Suite, evidence: Evidence) -> dict[str, bool]:
    """Regime → whether level 3 is due: it has a workload clause, and levels 1 and 2 pass or nothing may stop it."""
    due = {}
    for regime in suite.regime:
        asked = any(clause.level == "workload" for clause in regime.require)
        due[regime.id] = asked and (
            suite.rule.policy.stop == "never"
            or (level_passes(suite, evidence, "kernel", regime) and level_passes(suite, evidence, "step", regime))
        )
    return due


def selection_drift(suite: Suite, evidence: Evidence) -> tuple[str, ...]:
    """One sentence for every trial whose resolved or observed implementation is not the one that was asked for.

    One of them makes the whole decision invalid: a candidate that did not run was not measured anywhere.
    """
    found: dict[str, None] = {}
    for cell in evidence.cells():
        for trial in evidence.trials(cell):
            for role, record in _selections(trial.facts.get("selection")):
                requested, resolved, observed = (
                    _text(record.get(key)) for key in ("requested", "resolved", "observed")
                )
                name = f"{cell.level} {cell}, {trial.variant}" + (f" {role}" if role else "")
                if requested and resolved and requested != resolved:
                    found[f"{name}: asked for {requested}, resolved to {resolved}"] = None
                if observed and resolved and observed != resolved:
                    found[f"{name}: resolved to {resolved}, but {observed} ran"] = None
    return tuple(found)


def _step_down(
    suite: Suite, evidence: Evidence, budget: Budget, problems: tuple[str, ...]
) -> tuple[RegimeVerdict, ...]:
    """All verdicts. With a single look, those not enabled are judged again at the error that the enabled ones leave.

    That is Holm's procedure without p values: the regimes enabled at alpha / R are the rejections of its first steps,
    the next step tests at alpha / (R - enabled), until a round enables none.
    """
    verdicts = {regime.id: _verdict(suite, evidence, budget, regime, problems) for regime in suite.regime}
    waiting = list(suite.regime)
    while budget.steps_down:
        left = [regime for regime in waiting if verdicts[regime.id].verdict is not Verdict.ENABLE]
        if not left or len(left) == len(waiting):
            break
        waiting = left
        budget = Budget.of(suite.rule, len(waiting), evidence.runs.aborted)
        verdicts |= {regime.id: _verdict(suite, evidence, budget, regime, problems) for regime in waiting}
    return tuple(verdicts[regime.id] for regime in suite.regime)


def _verdict(
    suite: Suite, evidence: Evidence, budget: Budget, regime: Regime, problems: tuple[str, ...]
) -> RegimeVerdict:
    clauses = judge_regime(suite, evidence, budget, regime)
    if problems:
        reasons = tuple(f"integrity: {problem}; measure again under a new plan" for problem in problems)
        return RegimeVerdict(regime.id, Verdict.INVALID, clauses, reasons)
    verdict = _worst_verdict(clauses)
    order = (ClauseStatus.FAIL, ClauseStatus.MISSING, ClauseStatus.INCONCLUSIVE)
    reasons = tuple(clause.sentence for status in order for clause in clauses if clause.status is status)
    if verdict is Verdict.ENABLE:
        reasons = tuple(clause.sentence for clause in clauses)
    return RegimeVerdict(regime.id, verdict, clauses, reasons)


def _worst_verdict(clauses: tuple[ClauseResult, ...]) -> Verdict:
    present = {clause.status for clause in clauses}
    if ClauseStatus.FAIL in present:
        return Verdict.DISABLE
    if ClauseStatus.MISSING in present or not present:
        return Verdict.MISSING
    return Verdict.INCONCLUSIVE if ClauseStatus.INCONCLUSIVE in present else Verdict.ENABLE


def _selections(facts: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A kernel trial has one selection; a step or workload trial has one a phase."""
    if not isinstance(facts, Mapping):
        return
    if "resolved" in facts or "requested" in facts:
        yield "", facts
        return
    for role, record in sorted(facts.items()):
        if isinstance(record, Mapping):
            yield str(role), record


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
