"""Clauses over kernel and step cells: t over sessions, at the look that the number of sessions reaches.

Owns how a threshold becomes a region of the log ratio and how a cell is judged against it. Which cells there are, and
what the trials object to, is `decide.cells`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kbench.decide.budget import FAIL_ALPHA, Budget, Looked
from kbench.decide.cells import standing, timing_cells, where
from kbench.decide.estimate import (
    Sessions,
    Unusable,
    log_interval,
    session_changes,
    session_log_ratios,
    spread,
)
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import CellResult, ClauseResult, ClauseStatus, percent, worst
from kbench.decide.shapes import cell_weights
from kbench.stats import lower_bound, saving, sessions_needed, t_cdf, t_quantile, upper_bound
from kbench.suite.rule_schema import Clause, Regime
from kbench.suite.schema import Suite

SAMPLE_METRIC = {"step_time_p99": "step_time_max"}
"""A window is too short for a 99th percentile of its own: its slowest step stands for it."""
ONCE_A_SESSION = {"conversion_time": 1.0, "metadata_time": 1.0}
"""Metrics taken once a session, and the floor in µs below which a change is judged in units of that floor."""
KEEP = "keep the baseline here; a changed candidate is a new plan"
LEAST_EQUIVALENCE = 0.01
POWER = 0.9
FUTILE = 0.02
"""A chance below which it is not worth measuring up to the last look."""


@dataclass(frozen=True, slots=True)
class Region:
    """Where the estimate must lie, bounds excluded, on the scale of the estimate."""

    low: float
    high: float


def threshold_of(clause: Clause) -> float:
    """What the suite wrote: min_saving of a superiority, margin of the others; NaN where it wrote neither."""
    value = clause.min_saving if clause.test == "superiority" else clause.margin
    return math.nan if value is None else value


def equivalence_margin(margin: float, aa_floor: float) -> float:
    """The largest of the suite's margin, the host's A/A floor and 1 %."""
    return max(margin, aa_floor, LEAST_EQUIVALENCE)


def aa_floor(sd: float, sessions: int) -> float:
    """Half-width of the 95 % interval of `sessions` sessions of two equal variants that scatter by `sd`, relative."""
    if sessions < 2 or not math.isfinite(sd) or sd <= 0.0:
        return 0.0
    return math.expm1(t_quantile(0.975, sessions - 1) * sd / math.sqrt(sessions))


def judge_timing(suite: Suite, evidence: Evidence, budget: Budget, regime: Regime, clause: Clause) -> ClauseResult:
    """One kernel or step clause in one regime."""
    cells = timing_cells(suite, regime, clause.level)
    threshold = threshold_of(clause)
    results: tuple[CellResult, ...]
    if not cells:
        why = f"the regime has no {clause.level} cell; name points that the suite's [{clause.level}] measures"
        results = (CellResult("", ClauseStatus.MISSING, why, action="name points that the suite measures"),)
    elif clause.across == "weighted":
        results = (_weighted(suite, evidence, budget, regime, cells, clause),)
    else:
        results = tuple(_judge_cell(suite, evidence, budget, cell, clause) for cell in cells)
    decisive = worst(results)
    return ClauseResult(
        level=clause.level,
        metric=clause.metric,
        test=clause.test,
        mode="",
        status=decisive.status,
        observed=decisive.observed,
        low=decisive.low,
        high=decisive.high,
        threshold=threshold,
        detail=decisive.text,
        cell=decisive.cell,
        cells=results,
        bound=decisive.bound,
        action=decisive.action,
    )


def estimate_cell(suite: Suite, evidence: Evidence, cell: Cell, metric: str) -> Sessions | Unusable:
    """The sessions' estimates of a cell: log ratios, or relative changes of what is taken once a session."""
    name = SAMPLE_METRIC.get(metric, metric)
    scope = "session" if metric in ONCE_A_SESSION else "window"
    candidate = evidence.series(cell, name, suite.claim.candidate, scope)
    baseline = evidence.series(cell, name, suite.claim.baseline, scope)
    if metric in ONCE_A_SESSION:
        return session_changes(candidate, baseline, ONCE_A_SESSION[metric])
    return session_log_ratios(candidate, baseline)


def _judge_cell(suite: Suite, evidence: Evidence, budget: Budget, cell: Cell, clause: Clause) -> CellResult:
    standing_ = standing(suite, evidence, cell)
    if standing_.objection is not None:
        return standing_.objection
    found = estimate_cell(suite, evidence, cell, clause.metric)
    if isinstance(found, Unusable):
        return _unusable(cell, found)
    counted, floor = found.without(standing_.void_sessions), evidence.aa_floor(cell)
    return _judge(str(cell), counted, budget, clause, floor, standing_.voids)


def _weighted(
    suite: Suite, evidence: Evidence, budget: Budget, regime: Regime, cells: tuple[Cell, ...], clause: Clause
) -> CellResult:
    """All cells as one: each session's ratio of the weighted times, weights being shares of the recorded time.

    Evidence is needed in every cell, also in one of weight 0: recorded shapes say what matters, not what exists.
    """
    name = "recorded shapes"
    per_cell: list[Sessions] = []
    for cell in cells:
        standing_ = standing(suite, evidence, cell)
        if standing_.objection is not None:
            return standing_.objection
        found = estimate_cell(suite, evidence, cell, clause.metric)
        if isinstance(found, Unusable):
            return _unusable(cell, found)
        per_cell.append(found.without(standing_.void_sessions))
    if clause.metric in ONCE_A_SESSION:
        why = f"{clause.metric} is taken once a session and cannot be weighed; judge every cell"
        return CellResult(name, ClauseStatus.MISSING, f"{name}: {why}", action='across = "every-cell"')
    weights = cell_weights(suite, evidence, regime, cells)
    if isinstance(weights, str):
        return CellResult(name, ClauseStatus.MISSING, f"{name}: {weights}", action=weights)
    said = f"; {len(cells)} cells, {100 * weights.coverage:.0f} % of the recorded time ({weights.source})"
    return _judge(name, pooled(per_cell, weights.shares), budget, clause, evidence.aa_floor(*cells), said)


def _unusable(cell: Cell, found: Unusable) -> CellResult:
    action = f"no evidence at {where(cell)}: kbench run SUITE measures it"
    return CellResult(str(cell), ClauseStatus.MISSING, f"{cell}: {found.why}", action=action)


def pooled(per_cell: Sequence[Sessions], shares: Sequence[float]) -> Sessions:
    """The sessions that all cells have, each with the log of its weighted mean ratio of times.

    Weights are shares of the baseline's time, so that the mean is the ratio of the two weighted sums of times.
    """
    common = per_cell[0].session
    for sessions in per_cell[1:]:
        common = np.intersect1d(common, sessions.session)
    ratios = np.stack([np.exp(item.estimate[np.isin(item.session, common)]) for item in per_cell])
    return Sessions(common, np.log(np.asarray(shares) @ ratios))


def _judge(cell: str, sessions: Sessions, budget: Budget, clause: Clause, aa_floor: float, voids: str) -> CellResult:
    look = budget.at(len(sessions))
    if look is None:
        why = f"{cell}: needs {budget.looks[0]} sessions, has {len(sessions)}{voids}; kbench run --resume adds them"
        action = f"{budget.looks[0] - len(sessions)} more sessions: kbench run SUITE"
        return CellResult(cell, ClauseStatus.MISSING, why, action=action)
    threshold = threshold_of(clause)
    if math.isnan(threshold):
        why = "the clause states no threshold"
        return CellResult(cell, ClauseStatus.MISSING, f"{cell}: {why}", action="write min_saving or margin")
    region = _region(clause, threshold, aa_floor)
    counted = sessions.first(look.sessions)
    low, high = lower_bound(counted.estimate, look.alpha), upper_bound(counted.estimate, look.alpha)
    fail_low, fail_high = lower_bound(counted.estimate, FAIL_ALPHA), upper_bound(counted.estimate, FAIL_ALPHA)
    passes = (region.low == -math.inf or low > region.low) and (region.high == math.inf or high < region.high)
    if passes:
        status = ClauseStatus.PASS
    elif fail_low > region.high or fail_high < region.low:
        status = ClauseStatus.FAIL
    else:
        status = ClauseStatus.INCONCLUSIVE
    slack = min(region.high - high, low - region.low)
    point, shown_low, shown_high = log_interval(counted)
    observed, left, right = _shown(clause, point, shown_low, shown_high)
    text = f"{cell}: {_words(clause, observed, left, right, look)}; {_bound_words(clause, status, region, low, high)}"
    action, chances = KEEP if status is ClauseStatus.FAIL else "", (math.nan, math.nan)
    if status is ClauseStatus.INCONCLUSIVE:
        chances = last_look_chances(counted, region, budget)
        action = _next_action(sessions, counted, region, budget)
        if all(chance < FUTILE for chance in chances):
            action = f"futile: it would hardly be settled by the rule's last look at {budget.looks[-1]}; {action}"
        text += "; " + action
    sides = (fail_low, fail_high) if status is ClauseStatus.FAIL else (low, high)
    bound = _shown(clause, *[_deciding(status, region, *sides)] * 3)[0]
    return CellResult(cell, status, text + voids, observed, left, right, slack, bound, action, *chances)


def last_look_chances(counted: Sessions, region: Region, budget: Budget) -> tuple[float, float]:
    """How likely an open cell passes, and fails, at the rule's last look; NaN where this is the last or the first two.

    The predictive distribution of the mean of N sessions after n: Student's t with n - 1 degrees of freedom around the
    mean so far, scale s·√(1/n - 1/N); the scatter s is taken to stay (Spiegelhalter, Freedman & Blackburn, Controlled
    Clinical Trials 7 (1986) 8–17). It decides nothing: it only says whether to go on.
    """
    n, last = len(counted), budget.looks[-1]
    sd = spread(counted)
    if n >= last or not math.isfinite(sd) or sd <= 0.0:
        return math.nan, math.nan
    mean, scale = float(counted.estimate.mean()), sd * math.sqrt(1.0 / n - 1.0 / last)
    half = t_quantile(1.0 - budget.nominal[-1], last - 1) * sd / math.sqrt(last)
    fail_half = t_quantile(1.0 - FAIL_ALPHA, last - 1) * sd / math.sqrt(last)

    def below(limit: float) -> float:
        return t_cdf((limit - mean) / scale, n - 1)

    passes = max(0.0, below(region.high - half) - below(region.low + half))
    return passes, 1.0 - below(region.high + fail_half) + below(region.low - fail_half)


def _deciding(status: ClauseStatus, region: Region, low: float, high: float) -> float:
    """The bound that the status rests on: of a fail the near side of what is wholly outside, else the worse side."""
    if status is ClauseStatus.FAIL:
        return low if low > region.high else high
    return high if region.high - high <= low - region.low else low


def _region(clause: Clause, threshold: float, aa_floor: float) -> Region:
    """The threshold on the estimate's scale: log ratios, but plain changes for what is taken once a session."""

    def scaled(change: float) -> float:
        if clause.metric in ONCE_A_SESSION:
            return change
        return math.log1p(change) if change > -1.0 else -math.inf

    if clause.test == "superiority":
        return Region(-math.inf, scaled(-threshold))
    if clause.test == "equivalence":
        margin = equivalence_margin(threshold, aa_floor)
        return Region(scaled(-margin), scaled(margin))
    return Region(-math.inf, scaled(threshold))


def _shown(clause: Clause, point: float, low: float, high: float) -> tuple[float, float, float]:
    """Savings for a superiority, relative changes for the rest."""
    if clause.metric in ONCE_A_SESSION:
        return (-point, -high, -low) if clause.test == "superiority" else (point, low, high)
    if clause.test == "superiority":
        return saving(point), saving(high), saving(low)
    return -saving(point), -saving(low), -saving(high)


def _words(clause: Clause, observed: float, low: float, high: float, look: Looked) -> str:
    noun, signed = ("saving", False) if clause.test == "superiority" else ("change", True)
    interval = f"{percent(low, signed=signed)} to {percent(high, signed=signed)}"
    return (
        f"{noun} {percent(observed, signed=signed)} (95 % interval {interval}, {look.sessions} sessions, "
        f"look {look.number} of {look.of} at one-sided {look.alpha:.2g})"
    )


def _bound_words(clause: Clause, status: ClauseStatus, region: Region, low: float, high: float) -> str:
    passed = status is ClauseStatus.PASS
    if clause.test == "equivalence":
        sides = [_shown(clause, side, side, side)[0] for side in (low, high, region.low, region.high)]
        bounds = f"{percent(sides[0], signed=True)} to {percent(sides[1], signed=True)}"
        verb = "lie within" if passed else "lie outside" if status is ClauseStatus.FAIL else "do not lie within"
        return f"its bounds {bounds} {verb} {percent(sides[2], signed=True)} to {percent(sides[3], signed=True)}"
    bound, limit = (_shown(clause, side, side, side)[0] for side in (high, region.high))
    if clause.test == "superiority":
        if status is ClauseStatus.FAIL:
            return f"even its upper bound is below the required {percent(limit)}"
        return f"its lower bound {percent(bound)} {'exceeds' if passed else 'does not exceed'} {percent(limit)}"
    if status is ClauseStatus.FAIL:
        return f"even its lower bound is beyond the margin of {percent(limit, signed=True)}"
    verb = "is within" if passed else "is not within"
    return f"its upper bound {percent(bound, signed=True)} {verb} the margin of {percent(limit, signed=True)}"


def _next_action(sessions: Sessions, counted: Sessions, region: Region, budget: Budget) -> str:
    """How many sessions would settle it, from the scatter of those that there are."""
    point, sd = float(counted.estimate.mean()), spread(counted)
    distance = min(abs(point - limit) for limit in (region.low, region.high) if math.isfinite(limit))
    last, alpha = budget.looks[-1], budget.nominal[-1]
    if distance <= 0.0 or not math.isfinite(sd):
        return "it lies at the threshold: more sessions will not settle it"
    if sd <= 0.0:
        return "the sessions do not scatter at all: check the clock's resolution"
    needed = sessions_needed(distance, sd, min(alpha, FAIL_ALPHA), POWER)
    if needed is None:
        return "it lies at the threshold: not even 1,000 sessions would settle it"
    following = next((look for look in budget.looks if look >= max(needed, len(sessions) + 1)), None)
    if following is not None:
        return f"about {following - len(sessions)} more sessions would settle it"
    more = max(needed, len(sessions) + 1) - len(sessions)
    return f"about {more} more sessions would settle it, but the rule's last look is at {last}: plan more looks"
