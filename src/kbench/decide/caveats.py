"""What keeps passing clauses from an enable: too many voids, too many runs, cells that are contaminated.

Owns the limits of `[rule]` on the evidence as a whole. A caveat turns an enable into inconclusive and nothing else: it
excuses no failure and supplies no missing evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kbench.decide.cells import standing
from kbench.decide.clauses import regime_cells
from kbench.decide.diagnostics import Diagnostics
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import percent
from kbench.suite.schema import Regime, Suite

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
    if rule.diagnostics.contaminated == "inconclusive":
        for sentence in contaminated(suite, regime, diagnosed):
            yield Caveat(f"contaminated: {sentence}", "measure on a machine that is quiet in both arms")
