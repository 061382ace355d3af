"""What deciding produces: a result for each cell, clause and regime, and the whole decision as JSON.

Owns the types and which of several results is the worst. It knows neither samples nor statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kbench.errors import ExitCode


class ClauseStatus(StrEnum):
    """What the evidence says about one clause (or one cell of it)."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    MISSING = "missing"


class Verdict(StrEnum):
    """What the rule says about one regime. Anything but `enable` keeps the baseline."""

    ENABLE = "enable"
    DISABLE = "disable"
    INCONCLUSIVE = "inconclusive"
    MISSING = "missing-evidence"
    INVALID = "invalid"


EXIT_CODES: dict[Verdict, ExitCode] = {
    Verdict.ENABLE: ExitCode.DONE,
    Verdict.DISABLE: ExitCode.DISABLE,
    Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    Verdict.MISSING: ExitCode.MISSING,
    Verdict.INVALID: ExitCode.INTEGRITY,
}

_BADNESS = {ClauseStatus.FAIL: 0, ClauseStatus.MISSING: 1, ClauseStatus.INCONCLUSIVE: 2, ClauseStatus.PASS: 3}


@dataclass(frozen=True, slots=True)
class CellResult:
    """One clause in one cell. `observed`, `low` and `high` are NaN where nothing could be estimated."""

    cell: str
    status: ClauseStatus
    text: str
    observed: float = math.nan
    low: float = math.nan
    high: float = math.nan
    slack: float = -math.inf
    """How far the deciding bound is on the right side of the threshold: the worst cell is the one with the least."""


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """One clause of one regime. `observed`, `low` and `high` (95 %) are those of the worst cell, which `cell` names."""

    level: str
    metric: str
    test: str
    mode: str
    """`virtual` or `exec` for a workload clause, empty elsewhere."""
    status: ClauseStatus
    observed: float
    low: float
    high: float
    threshold: float
    detail: str
    cell: str = ""
    implied: bool = False
    """Not written in the suite: a candidate that is wrong, or that the cost ladder stops at an earlier level."""
    cells: tuple[CellResult, ...] = ()

    @property
    def sentence(self) -> str:
        where = f"{self.level} {self.metric}" + (f" ({self.mode})" if self.mode else "")
        return f"{where}, {self.test}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "metric": self.metric,
            "test": self.test,
            "mode": self.mode or None,
            "status": self.status.value,
            "observed": number(self.observed),
            "low": number(self.low),
            "high": number(self.high),
            "threshold": number(self.threshold),
            "cell": self.cell or None,
            "detail": self.detail,
            "implied": self.implied,
        }


@dataclass(frozen=True, slots=True)
class RegimeVerdict:
    """The verdict of one regime, its clauses, and one sentence for everything that kept it from `enable`."""

    regime: str
    verdict: Verdict
    clauses: tuple[ClauseResult, ...]
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "regime": self.regime,
            "verdict": self.verdict.value,
            "clauses": [clause.to_json() for clause in self.clauses],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True)
class RunCount:
    """Runs under one plan hash: all of them, those that never ended, those that count as void."""

    total: int
    aborted: int
    void: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The table that a claim comes down to."""

    suite: str
    plan_hash: str
    regimes: tuple[RegimeVerdict, ...]
    runs: RunCount
    sessions: int
    alpha_per_regime: float

    @property
    def exit_code(self) -> ExitCode:
        """The worst over the regimes; a suite without regimes gates nothing and is done."""
        return ExitCode.worst(EXIT_CODES[regime.verdict] for regime in self.regimes)

    def verdict(self, regime: str) -> Verdict:
        return next(item.verdict for item in self.regimes if item.regime == regime)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready: numbers that do not exist (NaN, infinite limits) are null."""
        return {
            "suite": self.suite,
            "plan_hash": self.plan_hash,
            "exit_code": int(self.exit_code),
            "regimes": [regime.to_json() for regime in self.regimes],
            "runs": {"total": self.runs.total, "aborted": self.runs.aborted, "void": self.runs.void},
            "sessions": self.sessions,
            "alpha_per_regime": number(self.alpha_per_regime),
        }


def worst(cells: Sequence[CellResult]) -> CellResult:
    """The cell that decides: fail before missing before inconclusive before pass, then the least slack, then name."""
    return min(cells, key=lambda cell: (_BADNESS[cell.status], cell.slack, cell.cell))


def number(value: float) -> float | None:
    """`value` for JSON, which has neither NaN nor infinity."""
    return float(value) if math.isfinite(value) else None


def percent(value: float, *, signed: bool = False) -> str:
    """A share for people: `2.80 %`. Limits that do not exist are called unknown."""
    if not math.isfinite(value):
        return "unknown"
    return f"{100.0 * value:+.2f} %" if signed else f"{100.0 * value:.2f} %"
