"""Grids on a terminal.

Owns the layout: a table where it fits, one block a row where the terminal is narrow. Every cell is a rich `Text`, so
that nothing in a name is read as markup; colour and width are the console's business. rich is imported when used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kbench.decide.results import Decision
from kbench.report import backends_view, gate_view, grids
from kbench.report.grids import Grid
from kbench.report.launch_grid import cost_grid, launch_grid
from kbench.report.summary_grid import summary_grid
from kbench.report.text import clean
from kbench.report.verdicts import Boundaries, boundary_grid, clause_grid, verdict_grid

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

Document = Mapping[str, Any]

_STYLES = {
    "enable": "bold green",
    "disable": "bold red",
    "invalid": "bold red",
    "inconclusive": "yellow",
    "missing-evidence": "yellow",
    "missing": "yellow",
    "pass": "green",
    "fail": "red",
    "faster": "green",
    "slower": "red",
    "regressed": "bold red",
    "failed": "bold red",
    "void": "bold red",
    "improved": "green",
}
_LEAST_COLUMN = 11
"""Characters that a column needs on average to be read, its margin included."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Something for `console.print`: every grid that has rows, or one line that there is nothing."""

    grids: tuple[Grid, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        shown = [grid for grid in self.grids if grid.rows]
        if not shown:
            yield Text("nothing was measured")
        for grid in shown:
            if options.max_width < _LEAST_COLUMN * len(grid.columns):
                yield from _blocks(grid)
            else:
                yield _table(grid)
            for note in grid.notes:
                yield Text(clean(note), style="dim", overflow="fold")
            yield Text("")


def verdict_table(decision: Decision, measured: Boundaries | None = None) -> Tables:
    """The three boundaries, the clauses, and last, where the eye ends, the verdict of every regime and why."""
    return Tables((boundary_grid(decision, measured), clause_grid(decision), verdict_grid(decision)))


def kernel_table(view: Document) -> Tables:
    return Tables((grids.kernel_grid(view), grids.comparison_grid(view), summary_grid(view)))


def step_table(view: Document) -> Tables:
    own = (grids.step_grid(view), grids.selection_grid(view), grids.phase_grid(view))
    return Tables((*own, launch_grid(view), cost_grid(view), *grids.waterfall_grids(view)))


def gate_table(document: Document) -> Tables:
    """The document of `kernel --gate` or `step --gate`."""
    return Tables((gate_view.component_grid(document), gate_view.gate_grid(document)))


def card_table(document: Document) -> Tables:
    """The document of `kbench calibrate`."""
    return Tables((gate_view.card_grid(document),))


def workload_table(view: Document) -> Tables:
    return Tables(
        (grids.workload_grid(view), grids.request_grid(view), grids.replay_grid(view), grids.calibration_grid(view))
    )


def backends_table(document: Document) -> Tables:
    """The document of `kbench backends`."""
    measured = backends_view.selection_summary_grid(document["measured"])
    return Tables((*backends_view.matrix_grids(document), measured))


def timeline_table(document: Document) -> Tables:
    """A document of `timeline.analyse`, or of `views.timeline_view`."""
    return Tables((grids.timeline_points_grid(document), grids.timeline_grid(document)))


def plan_table(document: Document) -> Tables:
    return Tables((grids.plan_grid(document),))


def _table(grid: Grid) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = Text(clean(grid.title), style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(grid.columns):
        # A word that people and scripts look for is never broken over two lines.
        words = [clean(row[place]) for row in grid.rows if clean(row[place]) in _STYLES]
        table.add_column(Text(clean(column)), overflow="fold", min_width=max(map(len, words), default=None))
    for row in grid.rows:
        table.add_row(*(_cell(text) for text in row))
    return table


def _blocks(grid: Grid) -> Iterator[Text]:
    from rich.text import Text

    yield Text(clean(grid.title), style="bold", overflow="fold")
    for row in grid.rows:
        for index, (column, text) in enumerate(zip(grid.columns, row, strict=True)):
            line = Text(("" if index == 0 else "  ") + f"{clean(column)}: ", overflow="fold")
            yield line.append_text(_cell(text))


def _cell(text: str) -> Text:
    from rich.text import Text

    cleaned = clean(text)
    return Text(cleaned, style=_STYLES.get(cleaned, ""), overflow="fold")
