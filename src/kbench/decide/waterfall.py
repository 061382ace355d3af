"""Where a step's saving went: baseline step − attention + conversion + metadata + launches + padding ± residual.

Owns the arithmetic of the waterfall and Amdahl's bound f × s beside it. It gates nothing: only the clean step times do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbench.catalog import PLAIN, op_applies, parse_shape
from kbench.decide.cells import standing
from kbench.decide.estimate import Unusable, means_by
from kbench.decide.evidence import Cell, Evidence, Series
from kbench.decide.results import number
from kbench.decide.timing import estimate_cell
from kbench.plan import model_label
from kbench.stats import amdahl_saving_us, saving
from kbench.suite.schema import Suite


@dataclass(frozen=True, slots=True)
class Term:
    """One step of the waterfall: what it adds to the step (negative: saves), NaN where nothing measured it."""

    name: str
    delta_us: float
    source: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The terms add up to the candidate: baseline + Σ delta (those that are known) + residual."""

    baseline_us: float
    candidate_us: float
    terms: tuple[Term, ...]
    residual_us: float
    attention_share: float
    """f: the attention's share of the baseline step."""
    attention_saving: float
    """s: the share of the attention's time that level 1 saves."""
    bound_us: float
    """f × s × baseline step: what the saving could be if nothing else changed."""

    @classmethod
    def of(
        cls,
        baseline_us: float,
        candidate_us: float,
        terms: Sequence[Term],
        *,
        attention_share: float = math.nan,
        attention_saving: float = math.nan,
    ) -> Waterfall:
        known = sum(term.delta_us for term in terms if math.isfinite(term.delta_us))
        bound = math.nan
        if math.isfinite(attention_share) and math.isfinite(attention_saving):
            part = min(attention_share, 1.0) * baseline_us
            bound = amdahl_saving_us(baseline_us, part, attention_saving).bound_us
        return cls(
            baseline_us, candidate_us, tuple(terms), candidate_us - baseline_us - known, attention_share,
            attention_saving, bound,
        )  # fmt: skip

    @property
    def saved_us(self) -> float:
        return self.baseline_us - self.candidate_us

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline_us": number(self.baseline_us),
            "candidate_us": number(self.candidate_us),
            "terms": [
                {"name": term.name, "delta_us": number(term.delta_us), "source": term.source} for term in self.terms
            ],
            "residual_us": number(self.residual_us),
            "saved_us": number(self.saved_us),
            "saving": number(self.saved_us / self.baseline_us),
            "attention_share": number(self.attention_share),
            "attention_saving": number(self.attention_saving),
            "bound_us": number(self.bound_us),
            "bound_saving": number(self.bound_us / self.baseline_us),
        }


def predict(
    step_us: float, attention_us: float, attention_saving: float, conversion_us: float = 0.0, metadata_us: float = 0.0
) -> Waterfall:
    """The waterfall of a step that is not there yet: what a kernel's saving brings once its conversion is paid.

    The reading of "x faster" is the caller's: `stats.faster_readings` gives both as a share of time.
    """
    extra = conversion_us + metadata_us
    expected = amdahl_saving_us(step_us, attention_us, attention_saving, extra)
    terms = (
        Term("attention", -expected.bound_us, "f × s"),
        Term("conversion", conversion_us, "given"),
        Term("metadata", metadata_us, "given"),
    )
    return Waterfall.of(
        step_us,
        step_us - expected.actual_us,
        terms,
        attention_share=attention_us / step_us,
        attention_saving=attention_saving,
    )


def waterfalls(suite: Suite, evidence: Evidence) -> list[dict[str, Any]]:
    """One for every step cell on record that both arms were measured in."""
    found = []
    for cell in evidence.cells("step"):
        waterfall = measured(suite, evidence, cell) if cell.op == "step" else None
        if waterfall is not None:
            case = f"step/step/{model_label(suite.model)}/{cell.point}"
            launches = {
                role: _launches(evidence, cell, arm)
                for role, arm in (("baseline", suite.claim.baseline), ("candidate", suite.claim.candidate))
            }
            found.append({"case": case, "point": cell.point, **waterfall.to_json(), "launches": launches})
    return found


def measured(suite: Suite, evidence: Evidence, cell: Cell) -> Waterfall | None:
    """The waterfall of one step cell, or None where an arm's step time is missing or the cell is not in order.

    Steps are from the clean pass, phases from the phased one; what the two disagree about is in the residual. A launch
    has no time of its own here: its cost is within the phases that launch, so that term is unknown unless the engine
    stamps it. Padding exists only where captured graphs round a batch up.
    """
    if standing(suite, evidence, cell).objection is not None:
        return None
    arms = (suite.claim.baseline, suite.claim.candidate)
    steps = [_centre(evidence.series(cell, "step_time", arm)) for arm in arms]
    if not all(math.isfinite(step) and step > 0.0 for step in steps):
        return None

    def delta(*metrics: str) -> float:
        for metric in metrics:
            values = [_centre(evidence.series(cell, metric, arm, "session")) for arm in arms]
            if all(math.isfinite(value) for value in values):
                return values[1] - values[0]
        return math.nan

    share = _attention_share(suite, evidence, cell)
    kernel_saving = _kernel_saving(suite, evidence, cell)
    attention, source = delta("phase.attention"), "phases"
    if not math.isfinite(attention) and math.isfinite(share) and math.isfinite(kernel_saving):
        attention, source = -share * kernel_saving * steps[0], "f × s"
    terms = (
        Term("attention", attention, source),
        Term("conversion", delta("phase.convert", "conversion_time"), "phases"),
        Term("metadata", delta("phase.metadata", "metadata_time"), "phases"),
        Term("launches", delta("launch_time"), "engine"),
        Term("padding", 0.0 if suite.engine.graph == "eager" else delta("padding_time"), "engine"),
    )
    return Waterfall.of(steps[0], steps[1], terms, attention_share=share, attention_saving=kernel_saving)


def _launches(evidence: Evidence, cell: Cell, variant: str) -> int | None:
    """How many launches the traced pass counted in a step of `variant`; None where it was not traced."""
    counts = [trial.facts["launches"] for trial in evidence.trials(cell, variant) if "launches" in trial.facts]
    return int(counts[-1]) if counts else None


def _attention_share(suite: Suite, evidence: Evidence, cell: Cell) -> float:
    """f from level 0 where a timeline of this very step exists, else from the baseline's phases."""
    for place in (cell.point, "all") if parse_shape(cell.point).attributes == PLAIN else ():
        for trial in evidence.trials(Cell("timeline", "step", place), suite.claim.baseline):
            share = _traced_share(trial.facts, cell.point)
            if 0.0 <= share <= 1.0:
                return share
    phase = _centre(evidence.series(cell, "phase.attention", suite.claim.baseline, "session"))
    wall = _centre(evidence.series(cell, "phased_wall", suite.claim.baseline, "session"))
    return min(phase / wall, 1.0) if math.isfinite(phase) and math.isfinite(wall) and wall > 0.0 else math.nan


def _traced_share(facts: Mapping[str, Any], point: str) -> float:
    """Attention's share of one point's steps in a timeline: of that point alone, or of all points by name."""
    document = facts.get("analysis", facts)
    if not isinstance(document, Mapping):
        return math.nan
    named = [item for item in document.get("points") or () if isinstance(item, Mapping) and item.get("point") == point]
    classes = (named[0] if named else document).get("classes")
    if not named and "analysis" in facts:
        return math.nan
    attention = classes.get("attention") if isinstance(classes, Mapping) else None
    share = attention.get("share") if isinstance(attention, Mapping) else None
    return float(share) if isinstance(share, int | float) else math.nan


def _kernel_saving(suite: Suite, evidence: Evidence, cell: Cell) -> float:
    """s from level 1 at the same batch; NaN where attention was not measured as the step computes it."""
    shape = parse_shape(cell.point)
    batch = str(shape.point.bare) if shape.point is not None and shape.attributes.keeps_attention else ""
    for kernel in evidence.cells("kernel"):
        if (
            kernel.point != batch
            or not kernel.op.startswith("attention.")
            or not op_applies(kernel.op, parse_shape(kernel.point))
        ):
            continue
        found = estimate_cell(suite, evidence, kernel, "latency")
        if standing(suite, evidence, kernel).objection is None and not isinstance(found, Unusable) and len(found):
            return saving(float(found.estimate.mean()))
    return math.nan


def _centre(series: Series) -> float:
    """The mean over sessions of the session's mean: means add up, as the terms of a waterfall must. NaN for nothing."""
    if len(series) == 0 or not np.all(np.isfinite(series.value)):
        return math.nan
    return float(np.mean(means_by(series.session, series.value)[1]))
