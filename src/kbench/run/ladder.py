"""What is still worth measuring: the cost ladder of the rule, asked between sessions and before the expensive level.

Owns no statistics: it asks `kbench.decide` about the evidence so far. With `stop = "never"` everything is worth it.
Measuring ends early for success (every clause passes), for failure (one fails), and for futility: where one cell is so
near its threshold that it will hardly pass by the last look, and none is likely to fail by then either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kbench.decide import Cell, ClauseStatus, Evidence, decide, futile, needs_workload
from kbench.plan import Plan
from kbench.record import RunRecord


@dataclass(frozen=True, slots=True)
class Prior:
    """What a decision goes by besides the runs themselves, so that measuring and deciding see the same."""

    aborted: int = 0
    """Other runs of the plan that never ended; they share the error."""
    aa_floors: Mapping[Cell, float] = field(default_factory=dict)

    def evidence(self, plan: Plan, records: Sequence[RunRecord]) -> Evidence:
        codes = plan.loaded.suite.rule.void_codes
        return Evidence.of(records, void_codes=codes, aborted=self.aborted, aa_floors=self.aa_floors)


NOTHING = Prior()


def undecided(plan: Plan, records: Sequence[RunRecord], levels: Sequence[str], prior: Prior = NOTHING) -> bool:
    """Whether more sessions of `levels` can change a verdict: a clause of theirs is open where none has failed."""
    suite = plan.loaded.suite
    if suite.rule.policy.stop == "never":
        return True
    decision = decide(suite, prior.evidence(plan, records), plan_hash=plan.plan_hash)
    return any(
        clause.status is ClauseStatus.INCONCLUSIVE and clause.level in levels
        for regime in decision.regimes
        if not any(other.status is ClauseStatus.FAIL for other in regime.clauses) and not futile(regime)
        for clause in regime.clauses
    )


def futile_regimes(plan: Plan, records: Sequence[RunRecord], prior: Prior = NOTHING) -> list[str]:
    """Open regimes that further sessions would hardly change."""
    decision = decide(plan.loaded.suite, prior.evidence(plan, records), plan_hash=plan.plan_hash)
    return [verdict.regime for verdict in decision.regimes if futile(verdict)]


def workload_classes(
    plan: Plan, levels: Sequence[str], records: Sequence[RunRecord], prior: Prior = NOTHING
) -> list[str]:
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
    needed = needs_workload(suite, prior.evidence(plan, records))
    asked = {name for regime in suite.regime if needed.get(regime.id) for name in regime.trace_class}
    return [name for name in open_classes if name in asked]
