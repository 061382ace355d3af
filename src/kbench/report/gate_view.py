"""A gate and a noise card as rows of text.

Owns their columns. The documents are made by `run.gate` and the calibrate command; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.report.grids import Grid
from kbench.report.text import MISSING, clean, count, percent

Document = Mapping[str, Any]


def gate_grid(document: Document) -> Grid:
    """One row a cell, the verdict last."""
    rows = tuple(
        (clean(cell["case"]), _change(cell["change"]), _limits(cell["change"]), clean(cell["verdict"]))
        for cell in document["cells"]
    )
    if not rows:
        rows = (("all", MISSING, MISSING, clean(document["verdict"])),)
    notes = [clean(reason) for reason in document["reasons"]]
    card = document["card"]
    sessions = count(document["sessions"], "session")
    basis = f"noise card {card['file']}" if card else f"no quick tier: {document['no_card']}"
    notes.append(f"{sessions}; {clean(basis)}")
    if document["earlier_gates"]:
        notes.append(f"{count(len(document['earlier_gates']), 'gate')} of this plan came before")
    return Grid("Gate", ("case", "change", "95 %", "verdict"), rows, notes=tuple(notes))


def component_grid(document: Document) -> Grid:
    """What a step's total is made of; shown, not judged."""
    rows = tuple(
        (clean(cell["case"]), clean(item["metric"]), _change(item), _limits(item))
        for cell in document["cells"]
        for item in cell["components"]
    )
    notes = ("taken once a session in the phased pass; changes relative to the baseline's, not judged",)
    return Grid("Components", ("case", "component", "change", "95 %"), rows, labels=2, notes=notes)


def card_grid(document: Document) -> Grid:
    rows = tuple(
        (clean(case["case"]), str(case["sessions"]), percent(case["sd"]), percent(case["within_sd"]))
        for case in document["cases"]
    )
    notes = [f"{clean(document['file'])}, valid until {clean(document['expires'])}"]
    notes += [f"left out: {clean(case)}: {clean(why)}" for case, why in document["left_out"].items()]
    title = f"A/A on {clean(document['host'])}"
    return Grid(title, ("case", "sessions", "sd of a session", "of it within"), rows, notes=tuple(notes))


def _change(change: Document | None) -> str:
    return MISSING if change is None else percent(change["point"], signed=True)


def _limits(change: Document | None) -> str:
    if change is None or change["low"] is None or change["high"] is None:
        return "no interval"
    return f"{percent(change['low'], signed=True)} to {percent(change['high'], signed=True)}"
