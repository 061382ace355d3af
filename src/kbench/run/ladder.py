"""What is still worth measuring: the cost ladder of the rule, asked between sessions and before the expensive level.

Owns no statistics: it asks `kbench.decide` about the evidence so far. With `stop = "never"` everything is worth it.
Measuring ends early for success (every clause passes), for failure (one fails), and for futility: where one cell is so
near its threshold that it will hardly pass by the last look, and none is likely to fail by then either.
"""

from __future__ import annotations

from collections.abc import Sequence

from kbench.decide import ClauseStatus, Evidence, decide, futile, needs_workload
from kbench.plan import Plan
from kbench.record import RunRecord


def undecided(plan: Plan, records: Sequence[RunRecord], levels: Sequence[str], *, aborted: int = 0) -> bool:
    """Whether more sessions of `levels` can change a verdict: a clause of theirs is open where none has failed.

    `aborted`: runs of the plan that never ended; they share the error here as they do in the decision.
    """
    suite = plan.loaded.suite
    if suite.rule.policy.stop == "never":
        return True
    evidence = Evidence.of(records, void_codes=suite.rule.void_codes, aborted=aborted)
    decision = decide(suite, evidence, plan_hash=plan.plan_hash)
    return any(
        clause.status is ClauseStatus.INCONCLUSIVE and clause.level in levels
        for regime in decision.regimes
        if not any(other.status is ClauseStatus.FAIL for other in regime.clauses) and not futile(regime)
        for clause in regime.clauses
    )


def futile_regimes(plan: Plan, records: Sequence[RunRecord], *, aborted: int = 0) -> list[str]:
    """Open regimes that further sessions would hardly change."""
    suite = plan.loaded.suite
    evidence = Evidence.of(records, void_codes=suite.rule.void_codes, aborted=aborted)
    return [verdict.regime for verdict in decide(suite, evidence, plan_hash=plan.plan_hash).regimes if futile(verdict)]


def workload_classes(plan: Plan, levels: Sequence[str], records: Sequence[RunRecord], *, aborted: int = 0) -> list[str]:
    """Trace classes to replay: those that have not been, and whose regimes still ask for it.

    Level 3 asked for by name replays everything; inside a whole run it waits for levels 1 and 2, unless the rule says
    that nothing is skipped.
    """
    suite = plan.loaded.suite
    if suite.workload is None or "workload" not in levels:
        return []
    done = {trial.case for record in records for trial in record.trials if trial.case.startswith("workload/setup/")}
    open_classes = [name for name in suite.workload.traces if not any(case.endswith(f"/{name}") for case in done)]
    if suite.rule.policy.stop == "never" or set(levels) == {"workload"}:
        return open_classes
    needed = needs_workload(suite, Evidence.of(records, void_codes=suite.rule.void_codes, aborted=aborted))
    asked = {name for regime in suite.regime if needed.get(regime.id) for name in regime.trace_class}
    return [name for name in open_classes if name in asked]
