"""What a plan can see: the smallest true effect that each clause would pass on, from the scatter of earlier sessions.

Owns the smallest detectable effect beside every threshold, and whether `[rule.power]` can be reached. Earlier sessions
may be pilots or those of another candidate: their scatter is the host's, their difference is not used.

The formula is noncentral t at the last look (`stats.minimum_detectable_effect`); sessions scatter more evenly than the
windows that they are made of, but a scatter from six sessions is itself known to a third only.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kbench.decide.budget import Budget
from kbench.decide.cells import standing, timing_cells, workload_cells
from kbench.decide.estimate import Unusable, paired_segments, spread
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import CellResult, number, percent
from kbench.decide.timing import ONCE_A_SESSION, POWER, equivalence_margin, estimate_cell, threshold_of
from kbench.decide.workload import DIVERGENCE, FLOORS, modelled_error
from kbench.stats import minimum_detectable_effect
from kbench.suite.rule_schema import Clause, Regime
from kbench.suite.schema import Suite

_UNKNOWN: Mapping[tuple[Cell, str], float] = MappingProxyType({})
LEAST_SESSIONS = 3
"""Two sessions say next to nothing about a scatter."""


@dataclass(frozen=True, slots=True)
class Sight:
    """One clause in one cell: what it asks for and what the plan can see there."""

    regime: str
    level: str
    metric: str
    test: str
    cell: str
    threshold: float
    sees: float
    """Superiority: the smallest true saving that passes. Others: the smallest margin that no change passes. NaN where
    there are no earlier sessions."""
    power: float
    units: int
    """Sessions or segments, at the last look."""
    sd: float
    wanted: float
    """What it must see: `at_saving` of a superiority where the rule says it, else the margin; NaN for nothing."""
    source: str = ""
    """Whose scatter it goes by: `earlier sessions`, or the `noise card`; empty where there is none."""

    @property
    def reaches(self) -> bool | None:
        """None where there is nothing to go by."""
        if math.isnan(self.sees) or math.isnan(self.wanted):
            return None
        return self.sees <= self.wanted

    @property
    def sentence(self) -> str:
        what = f"{self.regime}, {self.level} {self.metric} at {self.cell}"
        if math.isnan(self.sees):
            why = "unknown without earlier sessions or a noise card (kbench calibrate)"
            return f"{what}: threshold {percent(self.threshold)}; what it can see is {why}"
        by = f" (by the {self.source})" if self.source == "noise card" else ""
        if self.reaches is False:
            return f"{what}: this plan cannot see {percent(self.wanted)}: it sees {percent(self.sees)}{by}"
        noun = "a true saving" if self.test == "superiority" else "no change, within a margin"
        return (
            f"{what}: threshold {percent(self.threshold)}, sees {noun} of {percent(self.sees)} "
            f"with {100 * self.power:.0f} % power{by}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "regime": self.regime,
            "level": self.level,
            "metric": self.metric,
            "test": self.test,
            "cell": self.cell,
            "threshold": number(self.threshold),
            "sees": number(self.sees),
            "wanted": number(self.wanted),
            "reaches": self.reaches,
            "power": self.power,
            "units": self.units,
            "sd": number(self.sd),
            "source": self.source or None,
            "sentence": self.sentence,
        }


def sights(
    suite: Suite, earlier: Sequence[Evidence], *, aborted: int = 0, noise: Mapping[tuple[Cell, str], float] = _UNKNOWN
) -> tuple[Sight, ...]:
    """One for every written clause and cell. `earlier` are the evidences of single plans, the one to prefer first.

    `noise`: cell and metric → how A/A sessions scatter there, by the host's noise card; it speaks where no earlier
    session does.
    """
    budget = Budget.of(suite.rule, len(suite.regime), aborted)
    return tuple(
        sight
        for regime in suite.regime
        for clause in regime.require
        for sight in _of_clause(suite, earlier, budget, regime, clause, noise)
    )


def _of_clause(
    suite: Suite,
    earlier: Sequence[Evidence],
    budget: Budget,
    regime: Regime,
    clause: Clause,
    noise: Mapping[tuple[Cell, str], float],
) -> list[Sight]:
    if clause.metric == DIVERGENCE:  # exact counts, not a scatter: 3/n requests bound it
        return []
    if clause.level == "workload":
        mode = clause.mode or (suite.workload.mode if suite.workload else "exec")
        return [_replayed(suite, earlier, budget, regime, clause, cell) for cell in workload_cells(suite, regime, mode)]
    cells = timing_cells(suite, regime, clause.level)
    card = [noise.get((cell, clause.metric), math.nan) for cell in cells]
    return [_timed(suite, earlier, budget, regime, clause, cell, sd) for cell, sd in zip(cells, card, strict=True)]


def _timed(
    suite: Suite, earlier: Sequence[Evidence], budget: Budget, regime: Regime, clause: Clause, cell: Cell, card: float
) -> Sight:
    target = suite.rule.power.target if suite.rule.power else POWER
    sd, threshold = _session_sd(suite, earlier, cell, clause.metric), threshold_of(clause)
    source = "earlier sessions"
    if math.isnan(sd) and not math.isnan(card):
        sd, source = card, "noise card"
    sessions, alpha = budget.looks[-1], budget.nominal[-1]
    plain = clause.metric in ONCE_A_SESSION
    sees, wanted = math.nan, math.nan
    if clause.test == "superiority":
        wanted = suite.rule.power.at_saving if suite.rule.power else math.nan
        if math.isfinite(sd):
            effect = minimum_detectable_effect(sd, sessions, alpha, target)
            sees = threshold + effect if plain else 1.0 - (1.0 - threshold) * math.exp(-effect)
    else:
        floors = [evidence.aa_floor(cell) for evidence in earlier]
        wanted = equivalence_margin(threshold, max(floors, default=0.0)) if clause.test == "equivalence" else threshold
        if math.isfinite(sd):
            both = (1.0 + target) / 2.0 if clause.test == "equivalence" else target
            effect = minimum_detectable_effect(sd, sessions, alpha, both)
            sees = effect if plain else math.expm1(effect)
    return Sight(
        regime.id, clause.level, clause.metric, clause.test, str(cell), threshold, sees, target, sessions, sd, wanted,
        source if math.isfinite(sees) else "",
    )  # fmt: skip


def _replayed(
    suite: Suite, earlier: Sequence[Evidence], budget: Budget, regime: Regime, clause: Clause, cell: Cell
) -> Sight:
    target = suite.rule.power.target if suite.rule.power else POWER
    segments = suite.workload.segments if suite.workload else 0
    threshold, sd, width = threshold_of(clause), math.nan, 0.0
    for evidence in earlier:
        arms = (suite.claim.candidate, suite.claim.baseline)
        new, old = (evidence.series(cell, clause.metric, arm, "segment") for arm in arms)
        seed = zlib.crc32(f"{evidence.plan_hash}/{suite.seed}".encode())
        paired = paired_segments(
            new, old, floor=FLOORS.get(clause.metric, 0.0), seed=seed, one_look=cell.mode == "exec"
        )
        if not isinstance(paired, Unusable) and len(paired) >= LEAST_SESSIONS:
            sd = float(paired.values.std(ddof=1))
            error = modelled_error(suite, evidence, cell) if cell.mode == "virtual" else None
            if isinstance(error, CellResult):
                width = math.nan
            elif error is not None and paired.baseline > 0.0:
                width = error.attainment / (paired.baseline if clause.metric == "goodput" else error.exec_attainment)
            break
    effect = math.nan
    if math.isfinite(sd) and math.isfinite(width) and segments >= LEAST_SESSIONS:
        effect = minimum_detectable_effect(sd, segments, budget.workload_alpha, target) + width
    superior = clause.test == "superiority"
    return Sight(
        regime.id, "workload", clause.metric, clause.test, str(cell), threshold,
        threshold + effect if superior else effect, target, segments, sd, math.nan if superior else threshold,
        "earlier sessions" if math.isfinite(effect) else "",
    )  # fmt: skip


def _session_sd(suite: Suite, earlier: Sequence[Evidence], cell: Cell, metric: str) -> float:
    """Of the first evidence that has enough sessions of this cell."""
    for evidence in earlier:
        found = estimate_cell(suite, evidence, cell, metric)
        standing_ = standing(suite, evidence, cell)
        if isinstance(found, Unusable):
            continue
        counted = found.without(standing_.void_sessions)
        if len(counted) >= LEAST_SESSIONS:
            return spread(counted)
    return math.nan
