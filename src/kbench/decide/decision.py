"""The rule over the evidence: one verdict a regime.

Owns the order of the verdicts (invalid, disable, missing evidence, inconclusive, enable), the integrity check of what
ran against what was asked for, and the cost ladder. It is pure: no files, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kbench.decide.amplification import amplifications
from kbench.decide.budget import Budget
from kbench.decide.caveats import Caveat, caveats, contaminated
from kbench.decide.cells import standing
from kbench.decide.clauses import judge_clause, judge_regime, regime_cells, slower_cells
from kbench.decide.diagnostics import diagnostics
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import ClauseResult, ClauseStatus, Decision, Looks, RegimeVerdict, Verdict
from kbench.decide.selections import inconsistent, mismatches
from kbench.decide.timing import FUTILE
from kbench.errors import IntegrityError
from kbench.suite.rule_schema import Regime
from kbench.suite.schema import Suite


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
        looks=Looks(
            budget.looks, sum(look <= evidence.sessions for look in budget.looks), budget.spent(evidence.sessions)
        ),
        voids=tuple(f"{void.run} session {void.session + 1}: {', '.join(void.codes)}" for void in evidence.voids),
        lost=evidence.lost,
        forced=evidence.forced,
    )


def explain(decision: Decision, suite: Suite, evidence: Evidence) -> Decision:
    """The same decision with what is shown beside it and decides nothing: diagnostics and amplification."""
    found = diagnostics(suite, evidence)
    by_cell = {one.cell: one for one in found}
    regimes = tuple(
        replace(
            verdict,
            contaminated=contaminated(suite, regime, by_cell),
            amplification=amplifications(suite, evidence, regime),
        )
        for regime, verdict in zip(suite.regime, decision.regimes, strict=True)
    )
    return replace(decision, regimes=regimes, diagnostics=tuple(one.to_json() for one in found))


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


def futile(verdict: RegimeVerdict) -> bool:
    """Whether more sessions would hardly change the verdict: a cell stays open, and none is likely to fail.

    It only ends measuring, so it can make no error of the rule larger; what it costs in power is below `FUTILE`.
    """
    clauses = [clause for clause in verdict.clauses if clause.status is not ClauseStatus.PASS]
    if any(clause.status is ClauseStatus.FAIL for clause in clauses):
        return False
    cells = [cell for clause in clauses for cell in clause.cells if not math.isnan(cell.chance_pass)]
    stuck = any(cell.chance_pass < FUTILE for cell in cells)
    return stuck and all(cell.chance_fail < FUTILE for cell in cells)


def selection_drift(suite: Suite, evidence: Evidence) -> tuple[str, ...]:
    """One sentence for every trial whose resolved or observed implementation is none that was asked for or declared,
    and for every cell in which an arm was two.

    One of them makes the whole decision invalid: a candidate that did not run was not measured anywhere.
    """
    found: dict[str, None] = {}
    for cell in evidence.cells():
        trials = evidence.trials(cell)
        by_variant: dict[str, list[Mapping[str, Any]]] = {}
        for trial in trials:
            by_variant.setdefault(trial.variant, []).append(trial.facts)
            for role, what in mismatches(trial.facts):
                found[f"{_who(cell, trial.variant, role)}: {what}"] = None
        for variant, facts in by_variant.items():
            for role, what in inconsistent(facts):
                found[f"{_who(cell, variant, role)}: {what}"] = None
    return tuple(found)


def _who(cell: Cell, variant: str, role: str) -> str:
    return f"{cell.level} {cell}, {variant}" + (f" {role}" if role else "")


def _step_down(
    suite: Suite, evidence: Evidence, budget: Budget, problems: tuple[str, ...]
) -> tuple[RegimeVerdict, ...]:
    """All verdicts. With a single look, those not enabled are judged again at the error that the enabled ones leave.

    That is Holm's procedure without p values: the regimes enabled at alpha / R are the rejections of its first steps,
    the next step tests at alpha / (R - enabled), until a round enables none.
    """
    diagnosed = {}
    if suite.rule.diagnostics.contaminated == "inconclusive":
        diagnosed = {one.cell: one for one in diagnostics(suite, evidence)}
    # They depend on the evidence alone, not on the error that is left.
    forbidding = {regime.id: caveats(suite, evidence, regime, diagnosed) for regime in suite.regime}

    def judged(regime: Regime, budget: Budget) -> RegimeVerdict:
        return _verdict(suite, evidence, budget, regime, problems, forbidding[regime.id])

    verdicts = {regime.id: judged(regime, budget) for regime in suite.regime}
    waiting = list(suite.regime)
    while budget.steps_down:
        left = [regime for regime in waiting if verdicts[regime.id].verdict is not Verdict.ENABLE]
        if not left or len(left) == len(waiting):
            break
        waiting = left
        budget = Budget.of(suite.rule, len(waiting), evidence.runs.aborted)
        verdicts |= {regime.id: judged(regime, budget) for regime in waiting}
    return tuple(verdicts[regime.id] for regime in suite.regime)


def _verdict(
    suite: Suite,
    evidence: Evidence,
    budget: Budget,
    regime: Regime,
    problems: tuple[str, ...],
    forbidding: tuple[Caveat, ...],
) -> RegimeVerdict:
    clauses = judge_regime(suite, evidence, budget, regime)
    if problems:
        reasons = tuple(f"integrity: {problem}; measure again under a new plan" for problem in problems)
        return RegimeVerdict(regime.id, Verdict.INVALID, clauses, reasons, "measure again under a new plan")
    verdict = _worst_verdict(clauses)
    order = (ClauseStatus.FAIL, ClauseStatus.MISSING, ClauseStatus.INCONCLUSIVE)
    reasons = tuple(clause.sentence for status in order for clause in clauses if clause.status is status)
    why = tuple(caveat.why for caveat in forbidding)
    action = "load selector.json: it says where the candidate may serve"
    if verdict is Verdict.ENABLE and forbidding:
        verdict, action = Verdict.INCONCLUSIVE, forbidding[0].action
        reasons = (*why, *(clause.sentence for clause in clauses))
    elif verdict is Verdict.ENABLE:
        reasons = tuple(clause.sentence for clause in clauses)
    else:
        reasons = (*reasons, *why)
    found = RegimeVerdict(regime.id, verdict, clauses, reasons, action)
    return found if found.decisive is None else replace(found, action=found.decisive.action)


def _worst_verdict(clauses: tuple[ClauseResult, ...]) -> Verdict:
    present = {clause.status for clause in clauses}
    if ClauseStatus.FAIL in present:
        return Verdict.DISABLE
    if ClauseStatus.MISSING in present or not present:
        return Verdict.MISSING
    return Verdict.INCONCLUSIVE if ClauseStatus.INCONCLUSIVE in present else Verdict.ENABLE
