"""What deciding produces: a result for each cell, clause and regime, and the whole decision as JSON.

Owns the types and which of several results is the worst. It knows neither samples nor statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

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
    bound: float = math.nan
    """The bound that was compared with the threshold, on the scale of `observed`."""
    action: str = ""
    """What to do next; empty where it passes."""
    chance_pass: float = math.nan
    """Of an open cell before the last look: how likely it passes there, by what has been seen; else NaN."""
    chance_fail: float = math.nan


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
    bound: float = math.nan
    action: str = ""

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
            "bound": number(self.bound),
            "threshold": number(self.threshold),
            "cell": self.cell or None,
            "detail": self.detail,
            "action": self.action or None,
            "implied": self.implied,
        }


class Amplified(Protocol):
    """`decide.amplification.Amplification`, as far as it is shown."""

    @property
    def sentence(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class RegimeVerdict:
    """The verdict of one regime, its clauses, and one sentence for everything that kept it from `enable`."""

    regime: str
    verdict: Verdict
    clauses: tuple[ClauseResult, ...]
    reasons: tuple[str, ...]
    action: str = ""
    """What to do next."""
    contaminated: tuple[str, ...] = ()
    """One sentence for every cell whose control phases moved."""
    amplification: tuple[Amplified, ...] = ()
    """What the step saving became for users, a trace class and mode each; gates nothing."""

    @property
    def decisive(self) -> ClauseResult | None:
        """The clause that keeps it from `enable`: a fail before a missing one before an open one. None: no clause."""
        order = (ClauseStatus.FAIL, ClauseStatus.MISSING, ClauseStatus.INCONCLUSIVE)
        found = (clause for status in order for clause in self.clauses if clause.status is status)
        return next(found, None)

    def to_json(self) -> dict[str, Any]:
        decisive = self.decisive
        return {
            "regime": self.regime,
            "verdict": self.verdict.value,
            "action": self.action or None,
            "decisive": None if decisive is None else decisive.to_json(),
            "clauses": [clause.to_json() for clause in self.clauses],
            "reasons": list(self.reasons),
            "contaminated": list(self.contaminated),
            "amplification": [item.to_json() for item in self.amplification],
        }


@dataclass(frozen=True, slots=True)
class RunCount:
    """Runs under one plan hash: all of them, those that never ended, those that count as void."""

    total: int
    aborted: int
    void: int


@dataclass(frozen=True, slots=True)
class Looks:
    """How far a group-sequential rule has come."""

    at: tuple[int, ...]
    """Numbers of sessions at which the rule looks."""
    used: int
    spent: float
    """Error of one regime that these looks have spent."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The table that a claim comes down to."""

    suite: str
    plan_hash: str
    regimes: tuple[RegimeVerdict, ...]
    runs: RunCount
    sessions: int
    alpha_per_regime: float
    looks: Looks = Looks((), 0, 0.0)
    voids: tuple[str, ...] = ()
    """One line for every void session: its run, number and codes."""
    lost: int = 0
    """Sessions that ended with a worker, of either arm."""
    forced: tuple[str, ...] = ()
    """Runs in which level 3 was asked for by name: no cost ladder led to it."""
    earlier_plans: tuple[Mapping[str, Any], ...] = ()
    """Other plans of this candidate in the ledger: `plan_hash`, `time`, `verdicts` (or None), `pilot`."""
    diagnostics: tuple[Mapping[str, Any], ...] = ()
    """Order, drift and controls of every cell, as JSON."""

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
            "looks": {
                "at": list(self.looks.at),
                "used": self.looks.used,
                "alpha_spent_per_regime": number(self.looks.spent),
            },
            "void_sessions": list(self.voids),
            "lost_sessions": self.lost,
            "forced_runs": list(self.forced),
            "earlier_plans": [dict(plan) for plan in self.earlier_plans],
            "diagnostics": [dict(cell) for cell in self.diagnostics],
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
