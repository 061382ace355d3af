"""Every clause of a regime, and the ones that no suite needs to write.

Owns the dispatch by level and the implied clauses: a candidate that is wrong or breaks anywhere in the regime fails it,
and where the suite stops early, so does one that the cost ladder turned away at level 1.
"""

from __future__ import annotations

from kbench.decide.budget import Budget
from kbench.decide.cells import CORRECT, FAILED, SLICE, ended, timing_cells, trials_of, workload_cells
from kbench.decide.comparison import compare
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import CellResult, ClauseResult, ClauseStatus, percent, worst
from kbench.decide.timing import KEEP, equivalence_margin, judge_timing
from kbench.decide.workload import judge_workload
from kbench.suite.rule_schema import Clause, Regime
from kbench.suite.schema import Suite

LEVELS = ("kernel", "step", "workload")
COSTS = Cell("step", "costs", "grid")
"""The cost grid: a candidate that breaks there breaks on a batch that its workload may ask for."""


def judge_clause(suite: Suite, evidence: Evidence, budget: Budget, regime: Regime, clause: Clause) -> ClauseResult:
    """One clause that the suite wrote."""
    judge = judge_workload if clause.level == "workload" else judge_timing
    return judge(suite, evidence, budget, regime, clause)


def judge_regime(suite: Suite, evidence: Evidence, budget: Budget, regime: Regime) -> tuple[ClauseResult, ...]:
    """The written clauses in their order, then the implied ones that fail."""
    written = tuple(judge_clause(suite, evidence, budget, regime, clause) for clause in regime.require)
    failed_levels = {clause.level for clause in written if clause.status is ClauseStatus.FAIL}
    implied = [found for found in (_correctness(suite, evidence, regime, level) for level in LEVELS) if found]
    slower = slower_cells(suite, evidence, regime)
    if slower and suite.rule.policy.stop == "when-decided":
        implied.append(_ladder(suite, evidence, regime, slower))
    return written + tuple(clause for clause in implied if clause.level not in failed_levels)


def regime_cells(suite: Suite, regime: Regime, level: str) -> tuple[Cell, ...]:
    """Every cell of a level in which the candidate must be right: for workloads
    the real replays, and the cost grid under the modelled ones."""
    if level != "workload":
        declared = suite.kernel if level == "kernel" else suite.step
        return timing_cells(suite, regime, level) if declared else ()
    replays = workload_cells(suite, regime, "exec")
    grids = (COSTS,) if replays else ()
    return (*replays, *grids, *(Cell("workload", SLICE, cell.point) for cell in replays))


def slower_cells(suite: Suite, evidence: Evidence, regime: Regime) -> tuple[CellResult, ...]:
    """The kernel cells of a regime in which the candidate is significantly slower."""
    found = []
    for cell in regime_cells(suite, regime, "kernel"):
        ratio = compare(suite, evidence, cell)
        if ratio.verdict == "slower":
            text = (
                f"{cell}: the candidate takes {percent(ratio.point - 1.0, signed=True)} time (95 % interval "
                f"{percent(ratio.low - 1.0, signed=True)} to {percent(ratio.high - 1.0, signed=True)}); "
                "level 1 stops here, level 3 is not due"
            )
            change, low, high = ratio.point - 1.0, ratio.low - 1.0, ratio.high - 1.0
            found.append(
                CellResult(str(cell), ClauseStatus.FAIL, text, change, low, high, -low, bound=low, action=KEEP)
            )
    return tuple(found)


def _correctness(suite: Suite, evidence: Evidence, regime: Regime, level: str) -> ClauseResult | None:
    broken = [
        CellResult(str(cell), ClauseStatus.FAIL, f"{cell}: the candidate's trial {ended(trial)}", action=CORRECT)
        for cell in regime_cells(suite, regime, level)
        for trial in trials_of(evidence, cell, suite.claim.candidate)
        if trial.status in FAILED
    ]
    if not broken:
        return None
    return _implied(level, "correctness", "equivalence", tuple(broken), float("nan"))


def _ladder(suite: Suite, evidence: Evidence, regime: Regime, slower: tuple[CellResult, ...]) -> ClauseResult:
    named = {str(cell): cell for cell in regime_cells(suite, regime, "kernel")}
    margin = equivalence_margin(0.0, evidence.aa_floor(named[worst(slower).cell]))
    return _implied("kernel", "latency", "noninferiority", slower, margin)


def _implied(level: str, metric: str, test: str, cells: tuple[CellResult, ...], threshold: float) -> ClauseResult:
    decisive = worst(cells)
    return ClauseResult(
        level=level,
        metric=metric,
        test=test,
        mode="",
        status=decisive.status,
        observed=decisive.observed,
        low=decisive.low,
        high=decisive.high,
        threshold=threshold,
        detail=decisive.text,
        cell=decisive.cell,
        implied=True,
        cells=cells,
        bound=decisive.bound,
        action=decisive.action,
    )
