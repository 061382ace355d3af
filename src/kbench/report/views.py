"""The JSON document of each level, from the runs that measured it.

Owns the keys that programs may rely on. Numbers that do not exist are null, never NaN; times are µs; `low` and `high`
are 95 % limits by t over sessions. Comparisons and waterfalls are `decide`'s; nothing is printed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kbench.catalog import Case
from kbench.catalog.costs import roofline
from kbench.decide import Evidence, comparisons, kernel_summary, waterfalls
from kbench.errors import UsageError
from kbench.protocol import Status
from kbench.record import RunRecord, Trial
from kbench.report.documents import Document, finite, trials_of
from kbench.report.estimates import Estimate, Estimates
from kbench.report.launch_grid import cost_view
from kbench.report.workload_view import workload_view
from kbench.suite.schema import Suite
from kbench.suite.shapes import Recorded

__all__ = ["kernel_view", "step_view", "timeline_view", "workload_view"]

INCOMPLETE = "incomplete"
"""Status of a case that no complete session measured, though no trial of it failed."""
UNUSABLE = "UNUSABLE_SAMPLES"

_BADNESS = (
    Status.CRASHED,
    Status.HUNG,
    Status.OUT_OF_MEMORY,
    Status.FAILED,
    Status.INCORRECT,
    Status.UNSUPPORTED,
    Status.NON_DISCRIMINATING,
)
"""Worst first: one failed session is not hidden by five good ones."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One case on one variant: how its trials ended, and its estimates."""

    case: str
    variant: str
    trials: tuple[Trial, ...]
    estimates: Estimates

    @property
    def parsed(self) -> Case:
        return Case.parse(self.case)

    def status(self, needed: str) -> tuple[str, str]:
        """The worst status with its message; a case without a usable `needed` metric is never ok."""
        for bad in _BADNESS:
            for trial in self.trials:
                if trial.status == bad:
                    return trial.status, trial.message
        foreign = next((trial for trial in self.trials if trial.status != Status.OK), None)
        if foreign is not None:
            return foreign.status, foreign.message
        if self.estimates.value(self.case, self.variant, needed) is None:
            return INCOMPLETE, "no complete session measured it"
        return Status.OK.value, ""

    def value(self, metric: str) -> float | None:
        return self.estimates.value(self.case, self.variant, metric)

    def flags(self) -> list[str]:
        found = set(self.estimates.flags(self.case, self.variant))
        for trial in self.trials:
            found.update(str(flag) for flag in _list(trial.facts.get("flags")))
        if self.estimates.spoiled(self.case, self.variant):
            found.add(UNUSABLE)
        return sorted(found)

    def fact(self, name: str) -> Any:
        """The newest fact of that name; facts are JSON, so NaN is taken out."""
        return next((finite(trial.facts[name]) for trial in reversed(self.trials) if name in trial.facts), None)


def kernel_view(suite: Suite | None, runs: Sequence[RunRecord], recorded: Recorded | None = None) -> Document:
    """`kbench kernel --json`. Without a suite nobody said what is compared with what: no comparisons, no summary.

    `recorded`: how often each shape is called, where files of the suite say so.
    """
    cases = []
    for cell in _cells(runs, "kernel"):
        status, message = cell.status("latency")
        latency = cell.estimates.get(cell.case, cell.variant, "latency")
        none = {"median": None, "low": None, "high": None, "sessions": 0}
        cases.append(
            {
                "case": cell.case,
                "point": cell.parsed.point,
                "op": cell.parsed.op,
                "variant": cell.variant,
                "status": status,
                "message": message,
                "latency_us": none if latency is None else latency.to_json(),
                "samples": 0 if latency is None else latency.samples,
                "flags": cell.flags(),
                "correctness": _correctness(cell.trials),
                "scopes_us": {name: cell.value(name) for name in ("convert", "plan", "first_call")},
                "timer": cell.fact("timer"),
                "cache": cell.fact("cache"),
                "cost": cell.fact("cost"),
                "kernel_us": _kernel_us(cell, latency),
                "roofline": roofline_of(cell.fact("cost"), cell.fact("ceilings"), suite, latency),
                "resources": cell.fact("resources"),
                "tuning": cell.fact("tuning"),
                "selection": cell.fact("selection"),
            }
        )
    if suite is None or not cases:
        return {"cases": cases, "comparisons": [], "summary": None}
    evidence = Evidence.of(runs, void_codes=suite.rule.void_codes)
    summary = kernel_summary(suite, evidence, recorded)
    return {"cases": cases, "comparisons": finite(comparisons(suite, evidence)), "summary": finite(summary)}


def _kernel_us(cell: _Cell, latency: Estimate | None) -> float | None:
    """Kernel time, as a profiler means it: a call's time in a graph less the gap to the next node of each kernel.

    Null where the timer was no graph, or the gap of this device or the number of kernels is unknown.
    """
    reached, count = cell.fact("ceilings"), cell.fact("kernels_per_call")
    if latency is None or cell.fact("timer") != "graph" or not isinstance(reached, Mapping) or not count:
        return None
    cache = cell.fact("cache")
    gap = (reached.get("node_gap_us") or {}).get("cold" if cache in ("cold", "serving") else "hot")
    return None if gap is None else latency.median - float(count) * float(gap)


def roofline_of(cost: Any, ceilings: Any, suite: Suite | None, latency: Estimate | None) -> Document | None:
    """Where a case stands against the measured ceilings; null where either is unknown."""
    if not isinstance(cost, Mapping) or not isinstance(ceilings, Mapping) or suite is None:
        return None
    line = roofline(cost, ceilings, suite.model.dtype)
    if line is None:
        return None
    time_us = None if latency is None else latency.median
    return {
        "intensity": line.intensity,
        "crossover": line.crossover,
        "bound": line.bound,
        "floor_us": line.floor_us,
        "headroom": None if time_us is None else line.headroom(time_us),
        "bytes_per_us": line.bytes_per_us,
        "flops_per_us": line.flops_per_us,
    }


def step_view(suite: Suite | None, runs: Sequence[RunRecord]) -> Document:
    """`kbench step --json`. `closure` is null only where `status` is not ok."""
    cases = []
    for cell in _cells(runs, "step"):
        if cell.parsed.op != "step":  # the cost grid is level 2's too, but no case of its table
            continue
        status, message = cell.status("step_time")
        closure = cell.value("closure")
        if closure is None and status == Status.OK:
            status, message = INCOMPLETE, "the phased pass was not measured"
        wall = cell.estimates.get(cell.case, cell.variant, "step_time")
        phases = {
            metric.removeprefix("phase."): cell.value(metric)
            for metric in cell.estimates.metrics(cell.case, cell.variant)
            if metric.startswith("phase.")
        }
        cases.append(
            {
                "case": cell.case,
                "point": cell.parsed.point,
                "variant": cell.variant,
                "status": status,
                "message": message,
                "wall_us": None if wall is None else wall.median,
                "wall_low_us": None if wall is None else wall.low,
                "wall_high_us": None if wall is None else wall.high,
                "sessions": 0 if wall is None else wall.sessions,
                "samples": 0 if wall is None else wall.samples,
                "device_us": cell.value("device_time"),
                "phases": phases,
                "phased_wall_us": cell.value("phased_wall"),
                "closure": closure,
                "conversion_us": cell.value("conversion_time"),
                "metadata_us": cell.value("metadata_time"),
                "graph": cell.fact("graph"),
                "graph_reason": cell.fact("graph_reason"),
                "padded_tokens": cell.fact("padded_tokens"),
                "overlapped_us": cell.value("overlapped_step_time"),
                "eager_us": cell.value("eager_step_time"),
                "padding_us": cell.value("padding_time"),
                "launches": cell.fact("launches"),
                "perturbation": cell.fact("perturbation"),
                "selection": cell.fact("selection"),
                "flags": cell.flags(),
            }
        )
    falls = waterfalls(suite, Evidence.of(runs, void_codes=suite.rule.void_codes)) if suite is not None else []
    return {"cases": cases, "waterfalls": finite(falls), "costs": cost_view(runs)}


def timeline_view(suite: Suite | None, runs: Sequence[RunRecord]) -> Document:
    """`kbench timeline SUITE --json`: the baseline's steps together, and each point. Without a trace all is null."""
    newest: dict[tuple[str, str], Document] = {}
    failures: dict[tuple[str, str], Document] = {}
    for trial in trials_of(runs, "timeline/"):
        key = (trial.case, trial.variant)
        facts = trial.facts.get("analysis", trial.facts)
        if trial.status == Status.OK and isinstance(facts, Mapping) and "classes" in facts:
            newest[key] = dict(finite(facts))
            failures.pop(key, None)
        else:
            failures[key] = {"case": trial.case, "variant": trial.variant, "status": trial.status,
                             "message": trial.message}  # fmt: skip
    documents = list(newest.values())
    return {
        **_together(documents),
        "points": [point for (case, _), document in newest.items() for point in _points(case, document)],
        "top": [item for document in documents for item in _list(document.get("top"))],
        "warnings": [item for document in documents for item in _list(document.get("warnings"))],
        "failures": list(failures.values()),
    }


# ------------------------------------------------------------------------------------------------


def _cells(runs: Sequence[RunRecord], level: str) -> list[_Cell]:
    estimates = Estimates.of(runs, level)
    trials: dict[tuple[str, str], list[Trial]] = {key: [] for key in estimates.keys()}  # noqa: SIM118
    for trial in trials_of(runs, f"{level}/"):
        trials.setdefault((trial.case, trial.variant), []).append(trial)
    cells = [_Cell(case, variant, tuple(found), estimates) for (case, variant), found in trials.items()]
    return sorted(cells, key=_order)


def _order(cell: _Cell) -> tuple[str, int, int, str, str]:
    """By operation, then the size of the batch, then names: the order in which people read a table."""
    case = cell.parsed
    try:
        point = case.parsed
    except UsageError:
        return (case.op, 0, 0, cell.case, cell.variant)
    return (case.op, point.batch, point.context, cell.case, cell.variant)


def _correctness(trials: Sequence[Trial]) -> Document | None:
    """The worst of the sessions: largest error in terms of its limit, fewest null models killed."""
    found = [trial.facts["correctness"] for trial in trials if isinstance(trial.facts.get("correctness"), Mapping)]
    if not found:
        return None
    worst = max(found, key=_excess)
    killed = [item["null_models_killed"] for item in found if isinstance(item.get("null_models_killed"), int)]
    return {
        **finite(worst),
        "rel_l2": finite(worst.get("rel_l2")),
        "limit": finite(worst.get("limit")),
        "null_models_killed": min(killed) if killed else finite(worst.get("null_models_killed")),
    }


def _excess(correctness: Mapping[str, Any]) -> float:
    error, limit = correctness.get("rel_l2"), correctness.get("limit")
    if not isinstance(error, int | float) or not isinstance(limit, int | float) or not math.isfinite(error):
        return math.inf
    return error / limit if limit > 0 else math.inf


def _together(documents: Sequence[Mapping[str, Any]]) -> Document:
    """Several level-0 documents as one: means weighted by steps, shares of the summed time."""
    if not documents:
        return {"classes": {}, "gaps": {}, "limit": None, "largest_saving_us": None, "closure": None, "steps": 0,
                "step_us": None, "busy_us": None}  # fmt: skip
    steps = sum(int(document["steps"]) for document in documents)

    def mean(pick: Any) -> float:
        return float(sum(document["steps"] * pick(document) for document in documents) / steps)

    step_us = mean(lambda document: document["step_us"])
    names = dict.fromkeys(name for document in documents for name in document["classes"])
    class_us = {name: mean(lambda d, n=name: d["classes"].get(n, {}).get("us", 0.0)) for name in names}
    causes = dict.fromkeys(cause for document in documents for cause in document["gaps"])
    limits = {name: mean(lambda d, n=name: d.get("limits", {}).get(n, 0.0)) for name in documents[0].get("limits", {})}
    claimed = all(document.get("largest_saving_us") is not None for document in documents)
    return {
        "classes": {name: {"us": us, "share": us / step_us} for name, us in class_us.items()},
        "gaps": {cause: mean(lambda d, c=cause: d["gaps"].get(c, 0.0)) for cause in causes},
        "limit": max(limits, key=lambda name: limits[name]) if limits else documents[0].get("limit"),
        "limits": limits,
        "limit_basis": documents[0].get("limit_basis"),
        "largest_saving_us": mean(lambda d: d["largest_saving_us"]) if claimed else None,
        "expected_saving": documents[0].get("expected_saving"),
        "saved_class": documents[0].get("saved_class"),
        "closure": mean(lambda d: d["closure"] * d["step_us"]) / step_us,
        "centre": documents[0].get("centre"),
        "steps": steps,
        "step_us": step_us,
        "busy_us": mean(lambda d: d["busy_us"]),
    }


def _points(case: str, document: Document) -> list[Document]:
    """The points of one trace; a trace of one unnamed point is named by its case."""
    points = _list(document.get("points")) or [document]
    name = Case.parse(case).point
    return [{**point, "point": point.get("point") or name} for point in points]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
