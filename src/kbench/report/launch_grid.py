"""How steps were launched, and the cost grids that came of them: the tables of level 2 beside its times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kbench.engine.costs import CostTable
from kbench.errors import KbenchError
from kbench.record import RunRecord
from kbench.report.documents import Document, finite, trials_of
from kbench.report.grids import Grid
from kbench.report.text import clean, duration, number, percent


def cost_view(runs: Sequence[RunRecord]) -> list[Document]:
    """One entry a variant: points of its cost grid and the relative errors at points that the fit had not seen.

    Errors are null where there are too few points to leave any out.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    complete = {run.run_id: set(run.complete_sessions) for run in runs}
    for run in runs:
        for trial in trials_of([run], "step/costs/"):
            if trial.session in complete[run.run_id]:
                rows.setdefault(trial.variant, []).extend(trial.facts.get("rows", ()))
    return [_of_variant(variant, found) for variant, found in rows.items()]


def _of_variant(variant: str, rows: list[Mapping[str, Any]]) -> Document:
    document: Document = {"variant": variant, "points": len({row["point"] for row in rows}), "median_error": None}
    document |= {"worst_error": None, "inside_points": None, "inside_median_error": None, "inside_worst_error": None}
    try:
        error = CostTable.fit(rows).hold_out()
    except KbenchError:
        return document
    errors = {"median_error": error.median, "worst_error": error.worst, "inside_points": error.inside}
    errors |= {"inside_median_error": error.inside_median, "inside_worst_error": error.inside_worst}
    found: Document = finite(document | errors)
    return found


def launch_grid(view: Mapping[str, Any]) -> Grid:
    """How each step was launched, and the same step launched in other ways."""
    rows = tuple(
        (
            clean(case["point"]),
            clean(case["variant"]),
            clean(case["graph"] or "unknown") + (f": {clean(case['graph_reason'])}" if case["graph_reason"] else ""),
            number(case["padded_tokens"]),
            duration(case["wall_us"]),
            duration(case["overlapped_us"]),
            duration(case["eager_us"]),
            duration(case["padding_us"]),
        )
        for case in view["cases"]
        if case["overlapped_us"] is not None
    )
    columns = ("point", "variant", "launched as", "padded rows", "step", "overlapped", "eager", "of it padding")
    notes = (
        "overlapped: time a step where the host begins each before it waits for the one before; "
        "padding: less the same step captured in its own size",
    )
    return Grid("Step, how it was launched", columns, rows, labels=2, notes=notes)


def cost_grid(view: Mapping[str, Any]) -> Grid:
    rows = tuple(
        (
            clean(item["variant"]),
            number(item["points"]),
            percent(item["median_error"]),
            percent(item["worst_error"]),
            number(item["inside_points"]),
            percent(item["inside_median_error"]),
            percent(item["inside_worst_error"]),
        )
        for item in view["costs"]
    )
    columns = ("variant", "points", "median error", "worst", "points inside", "median error inside", "worst inside")
    notes = ("errors at points that the fit had not seen, each left out once; inside: within the range of the others",)
    return Grid("Step, cost grid", columns, rows, labels=1, notes=notes)
