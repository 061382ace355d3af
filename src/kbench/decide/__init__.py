"""(Suite, Evidence) → Decision: the predeclared rule, evaluated. Pure: no files, no clock, no torch, no pandas.

evidence    which samples and trials count, grouped once
estimate    blocks → sessions, segments → paired changes
budget      alpha per regime, spent over looks
cells       which cells a regime needs, and what their trials object to
timing      kernel and step clauses        workload   clauses over replayed traces
clauses     all clauses of a regime        decision   verdicts, the cost ladder, integrity
quick       the cells of a gate            reading    few sessions, read with a noise card
comparison  kernel ratios                  waterfall  where a step's saving went
summary     a kernel run, weighed by recorded calls
"""

from kbench.decide.comparison import Comparison, compare, comparisons
from kbench.decide.decision import decide, explain, futile, level_passes, needs_workload, selection_drift
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import CellResult, ClauseResult, ClauseStatus, Decision, RegimeVerdict, RunCount, Verdict
from kbench.decide.summary import kernel_summary
from kbench.decide.waterfall import Waterfall, predict, waterfalls

__all__ = [
    "Cell",
    "CellResult",
    "ClauseResult",
    "ClauseStatus",
    "Comparison",
    "Decision",
    "Evidence",
    "RegimeVerdict",
    "RunCount",
    "Verdict",
    "Waterfall",
    "compare",
    "comparisons",
    "decide",
    "explain",
    "futile",
    "kernel_summary",
    "level_passes",
    "needs_workload",
    "predict",
    "selection_drift",
    "waterfalls",
]
