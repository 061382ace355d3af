"""A kernel run's summary as rows of text: one an operation, and one of all where there are several.

Owns columns and notes; the numbers are `decide.summary`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.report.grids import Grid
from kbench.report.text import MISSING, clean, joined, number, percent

COLUMNS = ("operation", "cases", "speed-up by calls × time", "95 %", "covered", "worst regression")
WORDS = {"wins": "faster", "losses": "slower", "ties": "as fast", "inconclusive": "inconclusive", "failed": "failed"}


def summary_grid(view: Mapping[str, Any]) -> Grid:
    summary = view.get("summary")
    if not summary or not summary["cases"]:
        return Grid("Kernel, summary", COLUMNS, ())
    rows = [_row(clean(op), found) for op, found in summary["ops"].items()]
    if len(rows) > 1:
        rows.append(_row("all", summary))
    notes: tuple[str, ...]
    if summary["weights"] is None:
        notes = ("no speed-up of the whole: nobody recorded how often each shape is called (see recorded, shapes)",)
    else:
        notes = (
            f"calls: {clean(summary['weights'])}; time: the baseline's, as measured here",
            "covered: share of the recorded calls × time near a measured shape; the speed-up speaks of it alone",
        )
    return Grid("Kernel, summary", COLUMNS, tuple(rows), notes=notes)


def _row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    counts = joined(f"{found[key]} {word}" for key, word in WORDS.items() if found[key])
    low, high = found["low"], found["high"]
    limits = MISSING if low is None or high is None else f"{number(low)} to {number(high)}"
    return (name, counts, number(found["speedup"]), limits, percent(found["shape_coverage"]), _worst(found))


def _worst(found: Mapping[str, Any]) -> str:
    worst = found["worst_regression"]
    if worst is None:
        return "none"
    return (
        f"{clean(worst['case'].rpartition('/')[2])} {percent(worst['ratio'] - 1.0, signed=True)} ({worst['verdict']})"
    )
