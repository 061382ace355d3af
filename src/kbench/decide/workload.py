"""Clauses over replayed traces: paired segments of both arms, every trace class of the regime by itself.

Owns goodput, latency, counter and output clauses, and what a modelled result needs before it may gate: a usable
calibration of both arms on the same trace class, whose error widens the interval.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kbench.decide.budget import FAIL_ALPHA, Budget
from kbench.decide.cells import CALIBRATE, DIVERGED, SLICE, ended, standing, trials_of, workload_cells
from kbench.decide.estimate import Paired, Unusable, paired_segments
from kbench.decide.evidence import Cell, Ended, Evidence
from kbench.decide.results import CellResult, ClauseResult, ClauseStatus, percent, worst
from kbench.decide.timing import KEEP, Region, threshold_of
from kbench.protocol import Status
from kbench.suite.rule_schema import Clause, Regime
from kbench.suite.schema import Suite

LEAST_SEGMENTS = 20
HIGHER_IS_BETTER = frozenset({"goodput", "hit_ratio"})
DIVERGENCE = "output_divergence"
MOST_UNFINISHED = 0.05
"""Share of the requests whose outputs may be unknown because one of the real replays did not finish them."""
FLOORS = {"preemptions_per_1k": 1.0, "recomputed_tokens": 1.0, "hit_ratio": 0.01}
"""Where the baseline's mean is below its floor, a change is judged in units of the floor instead of as a ratio.

A baseline that never preempts has no relative increase. It is judged as if it preempted once in 1,000 requests (or
recomputed one token a segment, or hit 1 % of its tokens): with margin 0.10 the candidate may then add 0.1 preemptions
in 1,000 requests. No increase at all passes; any that matters fails.
"""


@dataclass(frozen=True, slots=True)
class Widening:
    """What a modelled result may be wrong by, as a share of the baseline's attainment."""

    attainment: float
    exec_attainment: float


def judge_workload(suite: Suite, evidence: Evidence, budget: Budget, regime: Regime, clause: Clause) -> ClauseResult:
    """One workload clause in one regime: it holds where it holds for every trace class."""
    mode = clause.mode or (suite.workload.mode if suite.workload else "exec")
    cells = workload_cells(suite, regime, mode)
    results: tuple[CellResult, ...]
    if suite.workload is None or not cells:
        why = "the suite has no trace for this regime; add [workload]"
        results = (CellResult("", ClauseStatus.MISSING, why, action="add [workload] traces"),)
    else:
        results = tuple(_judge_class(suite, evidence, budget, cell, clause) for cell in cells)
    decisive = worst(results)
    return ClauseResult(
        level="workload",
        metric=clause.metric,
        test=clause.test,
        mode=mode,
        status=decisive.status,
        observed=decisive.observed,
        low=decisive.low,
        high=decisive.high,
        threshold=threshold_of(clause),
        detail=decisive.text,
        cell=decisive.cell,
        cells=results,
        bound=decisive.bound,
        action=decisive.action,
    )


def _judge_class(suite: Suite, evidence: Evidence, budget: Budget, cell: Cell, clause: Clause) -> CellResult:
    def missing(why: str, action: str = "") -> CellResult:
        said = action or f"no evidence of {clause.metric} for {cell}: kbench workload SUITE replays it"
        return CellResult(str(cell), ClauseStatus.MISSING, f"{cell}: {why}", action=said)

    divergence = clause.metric == DIVERGENCE
    slices = (Cell("workload", SLICE, cell.point), Cell("workload", DIVERGED, cell.point)) if divergence else ()
    standing_ = standing(suite, evidence, cell, also=slices)
    if standing_.objection is not None:
        return standing_.objection
    threshold = threshold_of(clause)
    if math.isnan(threshold):
        return missing("the clause states no threshold")
    widening = Widening(0.0, 1.0)
    if cell.mode == "virtual":
        modelled = modelled_error(suite, evidence, cell)
        if isinstance(modelled, CellResult):
            return modelled
        widening = modelled
    paired = paired_segments(
        evidence.series(cell, clause.metric, suite.claim.candidate, "segment"),
        evidence.series(cell, clause.metric, suite.claim.baseline, "segment"),
        floor=FLOORS.get(clause.metric, 0.0),
        seed=zlib.crc32(f"{evidence.plan_hash}/{suite.seed}".encode()),
        absolute=divergence,
        most_alone=MOST_UNFINISHED if divergence else 0.0,
        one_look=cell.mode == "exec",
    )
    if isinstance(paired, Unusable):
        return missing(paired.why)
    unit = "requests" if divergence else "segments"
    if len(paired) < LEAST_SEGMENTS:
        more = f"lengthen the replay by {LEAST_SEGMENTS - len(paired)} {unit}"
        return missing(f"needs {LEAST_SEGMENTS} {unit} of both arms, has {len(paired)}; lengthen the replay", more)
    return _judge(str(cell), paired, budget, clause, threshold, widening, cell.mode)


def _judge(
    cell: str, paired: Paired, budget: Budget, clause: Clause, threshold: float, widening: Widening, mode: str
) -> CellResult:
    divergence = clause.metric == DIVERGENCE
    alpha = budget.equivalence_alpha if divergence else budget.workload_alpha
    region = _region(clause, threshold)
    reference = paired.baseline if clause.metric == "goodput" else widening.exec_attainment
    width = widening.attainment / reference if widening.attainment > 0.0 else 0.0
    inner = paired.bounds(FAIL_ALPHA)
    low, high = paired.share_bounds(alpha) if divergence else paired.passing_bounds(alpha)
    low, high, inner_low, inner_high = low - width, high + width, inner[0] - width, inner[1] + width
    # What is shown holds the bound that decides: an interval narrower than its own verdict would mislead.
    shown_low, shown_high = min(low, inner_low), max(high, inner_high)
    passes = (region.low == -math.inf or low > region.low) and (region.high == math.inf or high < region.high)
    family = budget.workload_family_error(len(paired)) if passes and not divergence else 0.0
    refused = family > 2.0 * budget.family_alpha
    if passes:
        status = ClauseStatus.INCONCLUSIVE if refused else ClauseStatus.PASS
    elif inner_low > region.high or inner_high < region.low:
        status = ClauseStatus.FAIL
    else:
        status = ClauseStatus.INCONCLUSIVE
    slack = min(region.high - high, low - region.low)
    observed = paired.change
    if clause.test == "superiority" and clause.metric not in HIGHER_IS_BETTER:
        observed, shown_low, shown_high = -observed, -shown_high, -shown_low
    noun = "difference" if divergence else "saving" if observed != paired.change else "change"
    text = (
        f"{cell}: {noun} {percent(observed, signed=True)} (95 % interval {percent(shown_low, signed=True)} to "
        f"{percent(shown_high, signed=True)}, {len(paired)} {'requests' if divergence else 'segments'}"
    )
    text += f", modelled: widened by {percent(width)} for the model's error)" if mode == "virtual" else ")"
    if paired.scale != paired.baseline and not divergence:
        text += f", in units of {paired.scale:g} because the baseline has {paired.baseline:.3g}"
    text += "; " + _bound_words(status, region, low, high, alpha)
    action = KEEP if status is ClauseStatus.FAIL else ""
    if refused:
        action = "replay more segments, or fewer regimes"
        text += (
            f"; but {len(paired)} segments cannot carry the error of {budget.regimes} regimes: simulated, one of them "
            f"would pass at its margin in {percent(family)} of decisions; replay more segments"
        )
    elif status is ClauseStatus.INCONCLUSIVE:
        action = _next_action(paired, region, width, low, high, divergence)
        text += "; " + action
    if status is ClauseStatus.FAIL:
        bound = inner_low if inner_low > region.high else inner_high
    else:
        bound = high if region.high - high <= low - region.low else low
    if observed != paired.change:
        bound = -bound
    return CellResult(cell, status, text, observed, shown_low, shown_high, slack, bound, action)


def _region(clause: Clause, threshold: float) -> Region:
    """Where the relative change must lie."""
    better_is_more = clause.metric in HIGHER_IS_BETTER
    if clause.test == "equivalence":
        return Region(-threshold, threshold)
    if clause.test == "superiority":
        return Region(threshold, math.inf) if better_is_more else Region(-math.inf, -threshold)
    if clause.test == "noninferiority" and better_is_more:
        return Region(-threshold, math.inf)
    return Region(-math.inf, threshold)


def _bound_words(status: ClauseStatus, region: Region, low: float, high: float, alpha: float) -> str:
    wanted = []
    if region.low != -math.inf:
        wanted.append(f"above {percent(region.low, signed=True)} (bound {percent(low, signed=True)})")
    if region.high != math.inf:
        wanted.append(f"below {percent(region.high, signed=True)} (bound {percent(high, signed=True)})")
    head = {ClauseStatus.PASS: "is", ClauseStatus.FAIL: "is not, even at the bound on the other side,"}
    return f"the change {head.get(status, 'is not shown to be')} {' and '.join(wanted)} at one-sided {alpha:.2g}"


def _next_action(paired: Paired, region: Region, width: float, low: float, high: float, divergence: bool) -> str:
    """Segments shrink the sampling error with their square root; the model's error they do not touch.

    The exact bound of a rare difference shrinks with the number of requests itself.
    """
    limits = [limit for limit in (region.low, region.high) if math.isfinite(limit)]
    distance = min(abs(paired.change - limit) for limit in limits)
    if width >= distance:
        return f"the model's error ({percent(width)}) hides it: calibrate with a longer exec slice, or gate from exec"
    half = max(high - paired.change, paired.change - low) - width
    if half == math.inf:
        return f"{len(paired)} segments cannot carry an error that small: more segments, or fewer regimes"
    if half <= 0.0:
        return "it lies at the threshold: more segments will not settle it"
    growth = half / (distance - width)
    needed = math.ceil(len(paired) * (growth if divergence else growth**2))
    more = max(needed - len(paired), 1)
    if divergence:
        return f"about {more} more requests (a longer workload.exec_s) would settle it"
    return f"about {more} more segments (a longer trace) would settle it"


def modelled_error(suite: Suite, evidence: Evidence, cell: Cell) -> Widening | CellResult:
    """What a virtual replay needs: few extrapolated steps, and both arms calibrated against a real replay.

    The comparison may be wrong by the difference of the two biases plus the half-width of that difference, and it is
    never taken to be better than the worse arm by itself. Of several calibrations of an arm the widest counts.
    """
    name = str(cell)

    def missing(why: str) -> CellResult:
        action = "calibrate: kbench workload SUITE replays a real slice; or gate from exec"
        return CellResult(name, ClauseStatus.MISSING, f"{name}: modelled, {why}", action=action)

    limit = suite.workload.max_extrapolated if suite.workload else 0.0
    biases, halves, attainments = [], [], []
    for variant in (suite.claim.baseline, suite.claim.candidate):
        for trial in trials_of(evidence, cell, variant):
            share = _number(trial.facts.get("extrapolated_fraction"))
            if trial.status == Status.OK and not share <= limit:
                found = "an unknown share" if math.isnan(share) else percent(share)
                return missing(f"{found} of {variant}'s steps lie outside the cost grid, at most {percent(limit)} may")
        trials = evidence.trials(Cell("workload", CALIBRATE, cell.point), variant)
        usable = [facts for trial in trials if trial.status == Status.OK and (facts := _calibration(trial.facts))]
        if not usable:
            return missing(f"no usable calibration of {variant}: {_why_not(trials)}")
        bias, half, attainment = max(usable, key=lambda facts: abs(facts[0]) + facts[1])
        biases.append(bias)
        halves.append(half)
        attainments.append(attainment)
    between = abs(biases[1] - biases[0]) + math.hypot(*halves)
    alone = max(abs(bias) + half for bias, half in zip(biases, halves, strict=True))
    return Widening(max(between, alone), attainments[0])


def _calibration(facts: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Bias, half-width and exec attainment of a usable calibration."""
    bias, half, attainment = (_number(facts.get(name)) for name in ("bias", "half_width", "exec_attainment"))
    good = facts.get("usable") is True and math.isfinite(bias) and math.isfinite(half) and half >= 0.0
    return (bias, half, attainment) if good and 0.0 < attainment <= 1.0 else None


def _why_not(trials: Sequence[Ended]) -> str:
    if not trials:
        return "none was measured"
    trial = trials[-1]
    if trial.status != Status.OK:
        return ended(trial)
    attainment = _number(trial.facts.get("exec_attainment"))
    if math.isfinite(attainment) and not 0.60 <= attainment <= 0.95:
        return f"the exec slice attained {percent(attainment)}, not 60 to 95 %; change the rate or the SLO"
    return "its bias or its half-width is unknown; lengthen workload.exec_s"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
