"""What keeps passing clauses from an enable: too many voids, too many runs, cells that are contaminated.

Owns the limits of `[rule]` on the evidence as a whole. A caveat turns an enable into inconclusive and nothing else: it
excuses no failure and supplies no missing evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kbench.decide.cells import standing
from kbench.decide.clauses import regime_cells
from kbench.decide.diagnostics import Diagnostics
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import percent
from kbench.decide.selections import stand_ins
from kbench.suite.checks import arm_of
from kbench.suite.rule_schema import Regime
from kbench.suite.schema import Suite

Diagnosed = Mapping[Cell, Diagnostics]


@dataclass(frozen=True, slots=True)
class Caveat:
    """Why, and what to do."""

    why: str
    action: str


def caveats(suite: Suite, evidence: Evidence, regime: Regime, diagnosed: Diagnosed) -> tuple[Caveat, ...]:
    """Everything that forbids an enable of this regime, whatever its clauses say."""
    return tuple(_caveats(suite, evidence, regime, diagnosed))


def contaminated(suite: Suite, regime: Regime, diagnosed: Diagnosed) -> tuple[str, ...]:
    """One sentence for every contaminated step cell of the regime."""
    cells = (diagnosed.get(cell) for cell in regime_cells(suite, regime, "step"))
    return tuple(found.sentence for found in cells if found is not None and found.contaminated)


def void_share(suite: Suite, evidence: Evidence, regime: Regime) -> tuple[int, int]:
    """(void, all) sessions: void by a code, lost with a worker, or void in a cell of this regime."""
    in_cells: set[int] = set()
    for level in ("kernel", "step"):
        for cell in regime_cells(suite, regime, level):
            in_cells |= standing(suite, evidence, cell).void_sessions
    out = len(evidence.voids) + evidence.lost
    return out + len(in_cells), out + evidence.sessions


def _caveats(suite: Suite, evidence: Evidence, regime: Regime, diagnosed: Diagnosed) -> Iterator[Caveat]:
    rule = suite.rule
    void, total = void_share(suite, evidence, regime)
    if total and void / total > rule.max_void_fraction:
        yield Caveat(
            f"{void} of {total} sessions are void or lost ({percent(void / total)}), "
            f"more than rule.max_void_fraction {percent(rule.max_void_fraction)}",
            "find what disturbs this machine, then start anew: kbench ledger amend SUITE --reason TEXT",
        )
    if rule.max_runs is not None and evidence.runs.total > rule.max_runs:
        yield Caveat(
            f"{evidence.runs.total} runs of this plan, more than rule.max_runs {rule.max_runs}: "
            "this is no confirmation any longer",
            "the evidence can be a pilot of a new plan: kbench ledger amend SUITE --reason TEXT",
        )
    yield from _stand_ins(suite, evidence, regime)
    if rule.diagnostics.contaminated == "inconclusive":
        for sentence in contaminated(suite, regime, diagnosed):
            yield Caveat(f"contaminated: {sentence}", "measure on a machine that is quiet in both arms")


def _stand_ins(suite: Suite, evidence: Evidence, regime: Regime) -> Iterator[Caveat]:
    """What may serve, or did, in the place of what is claimed, and was not measured as that."""
    declares = any(variant.fallback for variant in suite.variants.values())
    for name in (suite.claim.baseline, suite.claim.candidate) if declares else ():
        arm = arm_of(suite, name, Path())
        for entry in arm.fallback:
            if (entry.op, entry.use) in evidence.benchmarked:
                continue
            wanted = arm.implementation_of(entry.op)
            named = f"{entry.use} may stand in for {wanted} in {name} ({entry.op})"
            if entry.benchmarked:
                why = f"{named}, and no run of plan {entry.benchmarked[:12]} measured it"
            else:
                why = f"{named}, and it is not said which plan measured it"
            yield Caveat(why, f"kbench run SUITE --without {wanted}, then write its plan hash as benchmarked")
    seen: dict[str, None] = {}
    for level in ("kernel", "step"):
        for cell in regime_cells(suite, regime, level):
            for trial in evidence.trials(cell):
                for found in stand_ins(trial.facts):
                    if found.policy == "auto":
                        seen[f"{found.resolved} ran where {found.requested} was named in {trial.variant}"] = None
    for sentence in seen:
        yield Caveat(f"policy auto: {sentence}", "name what ran, or auto, in the suite: the claim is about that")
