"""report.md: the whole claim on one page that any Markdown reader shows.

Owns the escaping of names for Markdown and HTML, and the order of the page: verdict first, then why, then the
evidence, then where it came from and how to repeat it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kbench.decide.results import Decision
from kbench.record import RunRecord
from kbench.report.backends_view import selection_summary_grid, selections
from kbench.report.grids import (
    Grid,
    calibration_grid,
    comparison_grid,
    kernel_grid,
    phase_grid,
    replay_grid,
    request_grid,
    selection_grid,
    step_grid,
    timeline_grid,
    timeline_points_grid,
    waterfall_grids,
    workload_grid,
)
from kbench.report.launch_grid import cost_grid, launch_grid
from kbench.report.text import MISSING, clean, count, joined, number
from kbench.report.verdicts import (
    Boundaries,
    amplification_grid,
    boundary_grid,
    clause_grid,
    diagnostic_grid,
    earlier_grid,
    evidence_line,
    verdict_grid,
)
from kbench.report.views import kernel_view, step_view, timeline_view, workload_view
from kbench.suite.schema import Suite

_SPECIAL = re.compile(r"([\\`*\[\]|~#!{}$])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_SCHEME = re.compile(r"(?i)\b(https?|ftp|mailto|javascript|data)(:)|\b(www)(\.)")


def report_markdown(
    decision: Decision | None,
    runs: Sequence[RunRecord],
    suite: Suite | None = None,
    *,
    command: Sequence[str] = (),
) -> str:
    """The report of the runs of one plan.

    decision: None for runs that no rule was asked about.
    command: the arguments that repeat the measurement, e.g. `("kbench", "run", "suites/practice.toml")`.
    """
    kernel, step = kernel_view(suite, runs), step_view(suite, runs)
    timeline, workload = timeline_view(suite, runs), workload_view(suite, runs)
    lines = [f"# kbench report: {escape(_name(decision, suite, runs))}", ""]
    lines += _claim(suite)
    if decision is not None:
        lines += [escape(f"Rests on: {evidence_line(decision)}."), ""]
        lines += _grid(verdict_grid(decision, why=False)) + _reasons(decision)
        measured = Boundaries(suite, kernel, step, workload)
        lines += _grid(boundary_grid(decision, measured)) + _grid(clause_grid(decision))
        lines += _grid(amplification_grid(decision)) + _grid(diagnostic_grid(decision)) + _grid(earlier_grid(decision))
    for grid in (
        selection_summary_grid(selections(runs)),
        timeline_points_grid(timeline),
        timeline_grid(timeline),
        kernel_grid(kernel),
        comparison_grid(kernel),
        step_grid(step),
        selection_grid(step),
        phase_grid(step),
        launch_grid(step),
        cost_grid(step),
        *waterfall_grids(step),
        workload_grid(workload),
        request_grid(workload),
        replay_grid(workload),
        calibration_grid(workload),
    ):
        lines += _grid(grid)
    lines += _runs(decision, runs) + _environment(runs) + _reproduce(decision, suite, command)
    return "\n".join(lines).rstrip() + "\n"


def escape(text: object) -> str:
    """`text` as Markdown that shows exactly these characters: no markup, no HTML, no link, no new table cell."""
    plain = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = _SPECIAL.sub(lambda match: "\\" + match.group(0), plain)
    # GitHub turns bare addresses into links; a character reference in them shows the same and links nothing.
    return _SCHEME.sub(lambda m: f"{m[1]}&#58;" if m[1] else f"{m[3]}&#46;", escaped)


def _grid(grid: Grid, level: int = 2) -> list[str]:
    if not grid.rows:
        return []
    lines = ["#" * level + " " + escape(grid.title), "", _row(grid.columns)]
    lines.append("| " + " | ".join("---" for _ in grid.columns) + " |")
    lines += [_row(row) for row in grid.rows]
    lines.append("")
    for note in grid.notes:
        lines += [escape(note), ""]
    return lines


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"


def _name(decision: Decision | None, suite: Suite | None, runs: Sequence[RunRecord]) -> str:
    if suite is not None:
        return suite.claim.name
    if decision is not None:
        return decision.suite
    return ", ".join(run.run_id for run in runs) or "no runs"


def _claim(suite: Suite | None) -> list[str]:
    if suite is None:
        return []
    claim = suite.claim
    scope = "the whole deployment" if claim.changes_shared_state else "each step"
    text = f"Candidate {escape(claim.candidate)} against baseline {escape(claim.baseline)}; decided for {scope}."
    if claim.expected_saving is not None:
        text += f" Claimed: {100 * claim.expected_saving:.1f} % of the operation's time."
    return [text, ""]


def _reasons(decision: Decision) -> list[str]:
    lines = ["## Reasons", ""]
    for regime in decision.regimes:
        lines.append(f"- **{escape(regime.regime)}**: {regime.verdict.value}")
        lines += [f"  - {escape(reason)}" for reason in regime.reasons]
        if regime.action:
            lines.append(f"  - Next: {escape(regime.action)}")
    return [*lines, ""]


def _runs(decision: Decision | None, runs: Sequence[RunRecord]) -> list[str]:
    rows = []
    for run in sorted(runs, key=lambda run: run.run_id):
        bad = sum(1 for trial in run.trials if trial.status != "ok")
        rows.append(
            (
                clean(run.run_id),
                joined(clean(level) for level in run.header.get("levels", ())),
                clean(run.header.get("plan_hash", MISSING))[:16],
                f"{len(run.complete_sessions)} of {len(run.sessions)}",
                number(len(run.samples)),
                f"{bad} of {len(run.trials)}",
                "closed" if run.closed else "interrupted",
            )
        )
    columns = ("run", "levels", "plan", "sessions complete", "samples", "trials not ok", "state")
    notes: tuple[str, ...] = ()
    if decision is not None:
        notes = (
            f"Ledger: {count(decision.runs.total, 'run')} in total, "
            f"{decision.runs.aborted} aborted, {decision.runs.void} void. "
            f"Plan hash {clean(decision.plan_hash)}.",
            *(f"Void for both arms: {text}." for text in decision.voids),
        )
    return _grid(Grid("Runs and ledger", columns, tuple(rows), notes=notes))


def _environment(runs: Sequence[RunRecord]) -> list[str]:
    """The newest run's; a difference between runs is shown, not merged away."""
    found: dict[str, dict[str, None]] = {}
    for run in sorted(runs, key=lambda run: run.run_id):
        for name, value in _flat(run.header.get("environment", {})):
            found.setdefault(name, {})[value] = None
    rows = tuple((clean(name), " / ".join(values)) for name, values in found.items())
    return _grid(Grid("Environment", ("what", "value"), rows))


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        yield prefix, ", ".join(clean(item) for item in value) or MISSING
    elif prefix:
        yield prefix, clean(value)


def _reproduce(decision: Decision | None, suite: Suite | None, command: Sequence[str]) -> list[str]:
    lines = ["## How to repeat", ""]
    # An indented block cannot be closed by anything inside it, unlike a fence.
    lines += ["    " + clean(shlex.join(command) if command else "kbench run SUITE"), ""]
    if decision is not None:
        lines += [f"It counts as the same evidence when kbench plan prints {escape(decision.plan_hash)}.", ""]
    if suite is not None:
        lines += [f"Seed {suite.seed}; looks at {', '.join(str(look) for look in suite.rule.looks)} sessions.", ""]
    return lines
