"""The heads of report and decision: runs, voids, looks, earlier plans with their verdicts, next actions."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kbench.decide import Decision, Evidence, decide, explain
from kbench.decide.amplification import Amplification
from kbench.record import RunRecord
from kbench.report.markdown import report_markdown
from kbench.report.tables import plan_table, verdict_table
from kbench.report.verdicts import earlier_plan, evidence_line, verdict_grid
from kbench.suite.schema import Suite

from .conftest import HOSTILE, full_bench

EARLIER: tuple[dict[str, Any], ...] = (
    {"plan_hash": "1" * 64, "time": "2026-01-02T03:04:05.000Z", "verdicts": {"long": "disable"}, "pilot": True},
    {"plan_hash": "2" * 64, "time": "2026-01-03T03:04:05.000Z", "verdicts": None, "pilot": False},
)


@pytest.fixture
def run() -> RunRecord:
    return full_bench(sessions=7).run()


@pytest.fixture
def decision(suite: Suite, run: RunRecord) -> Decision:
    marks = tuple(
        replace(mark, conditions={"foreign_cpu_share": 0.9}) if mark.session == 6 else mark for mark in run.sessions
    )
    evidence = Evidence.of([replace(run, sessions=marks)], aborted=1, void=1, total=2, void_codes=["host_contention"])
    found = explain(decide(suite, evidence), suite, evidence)
    saved, gained = (0.03, 0.02, 0.04), (0.011, -0.001, 0.023)
    first = replace(found.regimes[0], amplification=(Amplification("long", "exec", saved, "mean of 1 cell", gained),))
    return replace(found, regimes=(first, *found.regimes[1:]), earlier_plans=EARLIER)


def shown(table: object) -> str:
    console = Console(file=StringIO(), width=200, highlight=False)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_line_of_what_it_rests_on(decision: Decision) -> None:
    line = evidence_line(decision)
    for part in ("6 sessions", "2 runs, 1 aborted, 1 void", "1 of 1 look used, α", "1 session void for both arms"):
        assert part in line


def test_a_forced_replay_is_labelled(suite: Suite, run: RunRecord) -> None:
    ladder, forced = (replace(run, header={**run.header, "forced": asked}) for asked in (False, True))
    assert "forced" not in evidence_line(decide(suite, Evidence.of([ladder])))
    found = decide(suite, Evidence.of([forced]))
    assert f"level 3 forced in {run.run_id}" in evidence_line(found)
    assert found.to_json()["forced_runs"] == [run.run_id]


def test_everything_beside_the_verdicts_is_on_the_terminal_and_in_the_report(
    decision: Decision, suite: Suite, run: RunRecord
) -> None:
    text = report_markdown(decision, [run], suite)
    for said in (shown(verdict_table(decision)), text):
        assert "1 aborted" in said and "host_contention" in said
        assert "session 7" in said
        assert "long disable" in said and "never decided" in said and "(pilot)" in said
        assert "next: " in said and "a step saving of 3.00 % (2.00 % to 4.00 %) became +1.10 %" in said
    assert "Rests on: 6 sessions" in text.splitlines()[4]
    for title in ("## Amplification", "## Diagnostics", "## Earlier plans of this candidate"):
        assert title in text


def test_an_earlier_plan_in_one_line() -> None:
    assert earlier_plan(EARLIER[0]) == "111111111111 of 2026-01-02 (pilot): long disable"
    assert earlier_plan(EARLIER[1]) == "222222222222 of 2026-01-03: never decided"


def test_hostile_names_stay_on_their_line(decision: Decision) -> None:
    regime = replace(decision.regimes[0], action=HOSTILE, contaminated=(HOSTILE,))
    grid = verdict_grid(replace(decision, regimes=(regime, *decision.regimes[1:]), voids=(HOSTILE,)))
    for note in grid.notes:
        assert note.isprintable()


def test_a_plan_shows_what_it_sees() -> None:
    document = {
        "suite": "s", "plan_hash": "0" * 64, "arms": {}, "looks": [6], "cases": [], "estimated_s": 1.0,
        "sees": [{"sentence": "r, step step_time at 1*1@127: this plan cannot see 2.00 %: it sees 3.10 %"}],
        "power_reached": False,
    }  # fmt: skip
    said = shown(plan_table(document))
    assert "cannot see 2.00 %: it sees 3.10 %" in said and "not reached" in said


def test_a_verdict_is_never_broken_over_two_lines(suite: Suite) -> None:
    found = decide(suite, Evidence.of([]))
    console = Console(file=StringIO(), width=80, highlight=False)
    console.print(verdict_table(found))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert sum("missing-evidence" in line for line in lines) == 2 * len(found.regimes)
    assert all(len(line) <= 80 for line in lines)
