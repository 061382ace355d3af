"""Documents of `kbench tune` as tables: what was tried, and what each policy would have cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.report.grids import Grid
from kbench.report.tables import Tables
from kbench.report.text import clean, duration, number, percent

Document = Mapping[str, Any]


def tuning_tables(document: Document) -> Tables:
    if "policies" in document:
        return Tables((_trials(document["implementation"], document["trials"]), _policies(document)))
    return Tables(tuple(_arm(arm, str(document["cache"])) for arm in document["arms"]))


def _arm(arm: Document, cache: str) -> Grid:
    notes = [f"kept in {clean(cache)}"] if arm["rows"] else []
    notes += [clean(arm["note"])] if arm.get("note") else []
    title = f"Tuning of {clean(arm.get('implementation') or arm['variant'])}, {clean(arm['op'])}"
    rows = _rows(arm["rows"]) or (("none", clean(arm.get("note") or ""), "", "", "", ""),)
    return Grid(title, _COLUMNS, rows, notes=tuple(notes))


_COLUMNS = ("bucket", "status", "best", "tuned", "rule of thumb", "trials took")


def _trials(name: str, rows: list[Any]) -> Grid:
    return Grid(f"Trials of {clean(name)}", _COLUMNS, _rows(rows))


def _rows(rows: list[Any]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            clean(row["bucket"]),
            clean(row["status"]),
            ", ".join(f"{clean(key)} {clean(value)}" for key, value in (row.get("best") or {}).items()),
            duration(row.get("best_us")),
            duration(row.get("heuristic_us")),
            duration(row["spent_us"]),
        )
        for row in rows
    )


def _policies(document: Document) -> Grid:
    rows = tuple(
        (
            clean(policy),
            percent(found["miss_rate"]),
            duration(found["kernel_us"]),
            percent(found["saving_over_heuristic"], signed=True),
            duration(found["start_us"]),
            duration(found["waited_us"]),
            number(found["outliers"]),
        )
        for policy, found in document["policies"].items()
    )
    columns = ("policy", "misses", "kernel time", "saved", "at start", "waited while serving", "slow steps")
    notes = (
        f"tuned on the first {document['first_steps']:,} steps ({document['buckets_first']} buckets), replayed "
        f"{document['later_steps']:,} later ones, {document['buckets_new']} of their "
        f"{document['buckets_later']} buckets new; {document['left_out_steps']:,} steps of rare buckets left out",
        "slow step: more than 3 × the rule of thumb's kernel time in it",
    )
    return Grid("The later part under each policy", columns, rows, notes=notes)
