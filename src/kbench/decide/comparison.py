"""Is the candidate's kernel faster, slower or as fast, point by point?

Owns the ratio of times (candidate / baseline) with its 95 % interval over all complete sessions, and the word for it.
It gates nothing by itself: the cost ladder and the kernel report read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from kbench.decide.cells import standing
from kbench.decide.estimate import Unusable, log_interval
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import number
from kbench.decide.timing import equivalence_margin, estimate_cell
from kbench.plan import model_label
from kbench.suite.schema import Suite

Word = Literal["faster", "slower", "equivalent", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidate over baseline time in one cell; NaN with `note` where there is no estimate."""

    cell: Cell
    point: float
    low: float
    high: float
    sessions: int
    verdict: Word
    note: str = ""


def compare(suite: Suite, evidence: Evidence, cell: Cell) -> Comparison:
    """Equivalent: the whole interval within the margin (the A/A floor, at least 1 %). Faster or slower: beyond 1."""
    nothing = (math.nan, math.nan, math.nan, 0)
    standing_ = standing(suite, evidence, cell)
    if standing_.objection is not None:
        return Comparison(cell, *nothing, "inconclusive", standing_.objection.text)
    found = estimate_cell(suite, evidence, cell, "latency" if cell.level == "kernel" else "step_time")
    if isinstance(found, Unusable):
        return Comparison(cell, *nothing, "inconclusive", found.why)
    sessions = found.without(standing_.void_sessions)
    if len(sessions) == 0:
        return Comparison(cell, *nothing, "inconclusive", "no session holds both arms")
    point, low, high = (math.exp(min(side, 700.0)) for side in log_interval(sessions))
    margin = equivalence_margin(0.0, evidence.aa_floor(cell))
    word: Word = "inconclusive"
    if 1.0 - margin <= low and high <= 1.0 + margin:
        word = "equivalent"
    elif high < 1.0:
        word = "faster"
    elif low > 1.0:
        word = "slower"
    if len(sessions) < 2:
        low, high, word = math.nan, math.nan, "inconclusive"
    return Comparison(cell, point, low, high, len(sessions), word)


def comparisons(suite: Suite, evidence: Evidence) -> list[dict[str, Any]]:
    """Every kernel cell on record, as `kbench kernel --json` prints it."""
    found = [compare(suite, evidence, cell) for cell in evidence.cells("kernel")]
    return [
        {
            "case": f"kernel/{item.cell.op}/{model_label(suite.model)}/{item.cell.point}",
            "ratio": {"point": number(item.point), "low": number(item.low), "high": number(item.high)},
            "verdict": item.verdict,
            "sessions": item.sessions,
            "note": item.note or None,
        }
        for item in found
    ]
