"""What a saving of step time became for users: step saving beside the change of goodput, trace class by trace class.

Owns the pairing of the two numbers. It never gates: near its knee an engine turns 2 % of a step into 5 % of its
goodput, far from it into nothing, and a margin is easier to choose for who has seen that.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

from kbench.decide.budget import FAIL_ALPHA
from kbench.decide.cells import standing, timing_cells, workload_cells
from kbench.decide.estimate import Sessions, Unusable, log_interval, paired_segments
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import CellResult, number, percent
from kbench.decide.shapes import Weights, cell_weights
from kbench.decide.timing import estimate_cell, pooled
from kbench.decide.workload import modelled_error
from kbench.stats import saving
from kbench.suite.rule_schema import Regime
from kbench.suite.schema import Suite


@dataclass(frozen=True, slots=True)
class Amplification:
    """Both numbers with their 95 % intervals; NaN where an interval does not exist."""

    trace_class: str
    mode: str
    """`exec` (real) or `virtual` (modelled)."""
    step_saving: tuple[float, float, float]
    """Point, low, high, as a share of time."""
    step_source: str
    goodput_change: tuple[float, float, float]
    """Point, low, high, relative; of a modelled replay widened by the model's error."""

    @property
    def sentence(self) -> str:
        saved, changed = (self._said(values, signed) for values, signed in (
            (self.step_saving, False), (self.goodput_change, True)))  # fmt: skip
        how = "modelled " if self.mode == "virtual" else ""
        return f"{self.trace_class}: a step saving of {saved} became {changed} {how}goodput ({self.step_source})"

    @staticmethod
    def _said(values: tuple[float, float, float], signed: bool) -> str:
        point, low, high = values
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"{percent(point, signed=signed)} (no interval)"
        return f"{percent(point, signed=signed)} ({percent(low, signed=signed)} to {percent(high, signed=signed)})"

    def to_json(self) -> dict[str, Any]:
        def three(values: tuple[float, float, float]) -> dict[str, float | None]:
            return dict(zip(("point", "low", "high"), (number(value) for value in values), strict=True))

        return {
            "trace_class": self.trace_class,
            "mode": self.mode,
            "step_saving": three(self.step_saving),
            "step_source": self.step_source,
            "goodput_change": three(self.goodput_change),
        }


def amplifications(suite: Suite, evidence: Evidence, regime: Regime) -> tuple[Amplification, ...]:
    """One a trace class and mode for which both numbers are on record; none for a regime without either."""
    if suite.workload is None or suite.step is None:
        return ()
    replayed = [
        (cell, change)
        for mode in ("exec", "virtual")
        for cell in workload_cells(suite, regime, mode)
        if (change := _goodput(suite, evidence, cell)) is not None
    ]
    saved = _step(suite, evidence, regime) if replayed else None
    if saved is None:
        return ()
    values, source = saved
    return tuple(Amplification(cell.point, cell.mode, values, source, change) for cell, change in replayed)


def _step(suite: Suite, evidence: Evidence, regime: Regime) -> tuple[tuple[float, float, float], str] | None:
    """The saving over the regime's step cells: weighted by recorded shapes where there are any, else their mean."""
    cells: list[Cell] = []
    sessions: list[Sessions] = []
    for cell in timing_cells(suite, regime, "step"):
        standing_ = standing(suite, evidence, cell)
        found = estimate_cell(suite, evidence, cell, "step_time")
        if standing_.objection is None and not isinstance(found, Unusable):
            cells.append(cell)
            sessions.append(found.without(standing_.void_sessions))
    if not cells:
        return None
    weights = cell_weights(suite, evidence, regime, cells)
    if isinstance(weights, Weights):
        shares, source = weights.shares, f"weighted by recorded shapes, {100 * weights.coverage:.0f} % of their time"
    else:
        shares, source = (1.0 / len(cells),) * len(cells), f"mean of {len(cells)} cell{'s' * (len(cells) > 1)}"
    together = pooled(sessions, shares)
    if len(together) == 0:
        return None
    if len(together) == 1:
        return (saving(float(together.estimate[0])), math.nan, math.nan), source
    point, low, high = log_interval(together)
    return (saving(point), saving(high), saving(low)), source


def _goodput(suite: Suite, evidence: Evidence, cell: Cell) -> tuple[float, float, float] | None:
    arms = (suite.claim.candidate, suite.claim.baseline)
    series = [evidence.series(cell, "goodput", arm, "segment") for arm in arms]
    if not all(len(one) for one in series):
        return None
    seed = zlib.crc32(f"{evidence.plan_hash}/{suite.seed}".encode())
    paired = paired_segments(series[0], series[1], floor=0.0, seed=seed, one_look=cell.mode == "exec")
    if isinstance(paired, Unusable):
        return None
    low, high = paired.bounds(FAIL_ALPHA) if len(paired) > 1 else (math.nan, math.nan)
    if cell.mode == "virtual":
        error = modelled_error(suite, evidence, cell)
        width = math.nan if isinstance(error, CellResult) else error.attainment / paired.baseline
        low, high = low - width, high + width
    return paired.change, low, high
