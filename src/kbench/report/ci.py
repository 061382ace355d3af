"""A decision for a CI system: the exit code a gate asks for, GitHub annotations, a step summary.

Owns the escaping of workflow commands, what is worst, and the limits that GitHub sets. `report.junit` writes the XML.
A decision in which all is well is said too: silence must not look like success.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kbench.decide import Decision, RegimeVerdict, Verdict
from kbench.decide.results import EXIT_CODES
from kbench.errors import ExitCode, MeasurementError, Problem, UsageError
from kbench.report.grids import Grid
from kbench.report.markdown import escape
from kbench.report.text import clean, count
from kbench.report.verdicts import verdict_grid
from kbench.suite.lines import key_lines, line_of

FAIL_ON = {"disable": Verdict.DISABLE, "inconclusive": Verdict.INCONCLUSIVE, "missing": Verdict.MISSING}
MOST_ANNOTATIONS = 10
"""GitHub shows no more of a kind and step."""
LARGEST_SUMMARY = 2**20
"""Bytes; GitHub drops a larger summary whole."""

WORST_FIRST = (Verdict.INVALID, Verdict.DISABLE, Verdict.MISSING, Verdict.INCONCLUSIVE, Verdict.ENABLE)
_KINDS = {
    Verdict.INVALID: "error",
    Verdict.DISABLE: "error",
    Verdict.MISSING: "error",
    Verdict.INCONCLUSIVE: "warning",
    Verdict.ENABLE: "notice",
}
_LONGEST_MESSAGE = 2_000
_LONGEST_CELL = 1_000


def parse_fail_on(text: str) -> frozenset[Verdict]:
    """`disable,missing` as verdicts. UsageError on anything else, on an empty list too."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FAIL_ON:
            raise UsageError(f"--fail-on: no kind {name!r}", remedy=f"a comma list of {', '.join(FAIL_ON)}")
    return frozenset(FAIL_ON[name] for name in names)


def softened(decision: Decision, fail_on: frozenset[Verdict] | None = None) -> ExitCode:
    """The exit code where only the verdicts in `fail_on` count, and integrity always; None: every verdict counts."""
    counted = [item.verdict for item in decision.regimes if _counts(item.verdict, fail_on)]
    return ExitCode.worst(EXIT_CODES[verdict] for verdict in counted)


def regime_lines(suite: Path, decision: Decision) -> dict[str, int]:
    """Regime → the line of its header in the suite file; a file that changed meanwhile gives no wrong line."""
    try:
        text = suite.read_text(encoding="utf-8")
        declared = tomllib.loads(text).get("regime", [])
        ids = [str(table.get("id")) for table in declared]
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
    lines = key_lines(text)
    found = {name: line_of(lines, ("regime", index)) for index, name in enumerate(ids)}
    known = {item.regime for item in decision.regimes}
    return {name: line for name, line in found.items() if name in known and line is not None}


def github_annotations(
    decision: Decision, file: str, lines: Mapping[str, int], *, most: int = MOST_ANNOTATIONS
) -> tuple[str, ...]:
    """Workflow commands, one a line, worst verdict first; the last one counts what did not fit.

    file: the suite as GitHub knows it, relative to the repository. lines: `regime_lines`.
    """
    ordered = worst_first(decision)
    if not ordered:
        said = f"{decision.suite} has no regime: nothing was decided"
        return (workflow_command("notice", said, file=file, title="kbench"),)
    shown = ordered if len(ordered) <= most else ordered[: most - 1]
    found = [
        workflow_command(
            _KINDS[item.verdict],
            "; ".join(item.reasons) or "no reason was given",
            file=file,
            line=lines.get(item.regime),
            title=f"kbench {decision.suite}, {item.regime}: {item.verdict.value}",
        )
        for item in shown
    ]
    rest = ordered[len(shown) :]
    if rest:
        tally = ", ".join(f"{sum(item.verdict is v for item in rest)} {v.value}" for v in WORST_FIRST if _has(rest, v))
        said = f"{count(len(rest), 'more regime')} in the step summary: {tally}"
        found.append(workflow_command(_KINDS[rest[0].verdict], said, file=file, title=f"kbench {decision.suite}"))
    return tuple(found)


def error_annotations(problems: Sequence[Problem], file: str, *, most: int = MOST_ANNOTATIONS) -> tuple[str, ...]:
    """What kept kbench from a verdict, as errors: at the line that a problem names in the suite, else at the suite."""
    return tuple(
        workflow_command(
            "error",
            str(problem),
            file=file,
            line=problem.line if Path(problem.file).name == Path(file).name else None,
            title="kbench: no verdict",
        )
        for problem in problems[:most]
    )


def workflow_command(kind: str, message: str, *, file: str = "", line: int | None = None, title: str = "") -> str:
    """`::KIND file=…,line=…,title=…::MESSAGE`, one line whatever the texts hold."""
    properties = {"file": file, "line": "" if line is None else str(line), "title": title}
    told = ",".join(f"{name}={_property(value)}" for name, value in properties.items() if value)
    return f"::{kind} {told}::{_data(_short(clean(message), _LONGEST_MESSAGE))}"


def step_summary(decision: Decision, *, ledger_head: str = "", most_bytes: int = LARGEST_SUMMARY) -> str:
    """Markdown: the verdict table, worst first, as many rows as fit into `most_bytes`; what does not is counted."""
    grid = verdict_grid(decision)
    order = {clean(item.regime): place for place, item in enumerate(worst_first(decision))}
    rows = sorted(grid.rows, key=lambda row: order.get(row[0], len(order)))
    notes = [*grid.notes, f"ledger head {clean(ledger_head)}: keep it as an anchor" if ledger_head else ""]
    head = _head(grid)
    tail = ["", *(line for note in notes if note for line in (escape(note), ""))]
    if not rows:
        head, tail = [f"## {escape(grid.title)}", "", "No regime: nothing was decided.", ""], tail[1:]
    room = most_bytes - _size([*head, *tail]) - 100  # of the line that counts the rest
    shown = []
    for row in rows:
        line = "| " + " | ".join(escape(_short(cell, _LONGEST_CELL)) for cell in row) + " |"
        room -= _size([line])
        if room < 0:
            break
        shown.append(line)
    left = len(rows) - len(shown)
    more = ["", f"{count(left, 'more regime')} in the report."] if left else []
    text = "\n".join([*head, *shown, *more, *tail]) + "\n"
    return text if len(text.encode()) <= most_bytes else ""


def append_summary(decision: Decision, path: Path, *, ledger_head: str = "") -> None:
    """Append `step_summary` to the file that GITHUB_STEP_SUMMARY names, within the limit of the whole file."""
    try:
        taken = path.stat().st_size if path.exists() else 0
        with path.open("a", encoding="utf-8") as file:
            file.write(step_summary(decision, ledger_head=ledger_head, most_bytes=LARGEST_SUMMARY - taken))
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise MeasurementError(
            f"cannot write the step summary: {what}", where=str(path), remedy="check GITHUB_STEP_SUMMARY"
        ) from error


def worst_first(decision: Decision) -> tuple[RegimeVerdict, ...]:
    """The regimes by how bad their verdict is, and as declared where they are equally bad."""
    return tuple(sorted(decision.regimes, key=lambda item: WORST_FIRST.index(item.verdict)))


def _counts(verdict: Verdict, fail_on: frozenset[Verdict] | None) -> bool:
    return fail_on is None or verdict is Verdict.INVALID or verdict in fail_on


def _has(items: Iterable[RegimeVerdict], verdict: Verdict) -> bool:
    return any(item.verdict is verdict for item in items)


def _head(grid: Grid) -> list[str]:
    columns = "| " + " | ".join(escape(column) for column in grid.columns) + " |"
    return [f"## {escape(grid.title)}", "", columns, "| " + " | ".join("---" for _ in grid.columns) + " |"]


def _size(lines: Iterable[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _data(text: str) -> str:
    """As @actions/core escapes a message."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """As @actions/core escapes a property."""
    return _data(clean(text)).replace(":", "%3A").replace(",", "%2C")
