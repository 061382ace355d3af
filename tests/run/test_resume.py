"""A run that is killed anywhere goes on without losing or doubling a sample."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from driver import Zygote

from kbench.ledger import Kind
from kbench.plan import make_plan
from kbench.record import RunRecord
from kbench.run.history import History
from kbench.suite import load_suite

PARENT_POINTS = [
    "run_announced:0",
    "run_started:0",
    "session_started:0",
    "session_opened:0",
    "case_prepared:0",
    "window_recorded:0",
    "window_recorded:11",
    "trial_done:0",
    "trial_done:5",
    "session_done:0",
    "session_started:1",
    "window_recorded:50",
    "session_done:1",
    "journal_closing:0",
    "run_closing:0",
]
WORKER_POINTS = [
    "kill-parent@open:0:b",
    "kill-parent@prepare:1:a",
    "kill-parent@window:7:b",
    "kill-parent@finish:0:a",
    "crash@open:0:a",
    "crash@window:4:b",
    "crash@finish:2:b",
    "torn@window:9:a",
    "hang@window:3:b",
]


def evidence(suite: Path, root: Path) -> tuple[list[RunRecord], int]:
    plan = make_plan(load_suite(suite))
    history = History.read(root, plan.name)
    assert history.ledger.verify() == []
    records, aborted, _ = history.evidence(plan)
    return records, aborted


def require_whole(record: RunRecord, *, blamed: str = "") -> None:
    """Two complete sessions, every window of every case of them exactly once, nothing twice anywhere."""
    assert record.closed
    assert len(record.complete_sessions) == 2
    seen = Counter(
        (row.session, row.case, row.variant, row.block, row.position, row.metric)
        for row in record.samples.rows()
        if row.scope == "window"
    )
    assert set(seen.values()) == {1}
    cases = {trial.case for trial in record.trials} - {blamed, ""}
    for session in record.complete_sessions:
        windows = Counter(case for (number, case, *_), _ in seen.items() if number == session and case != blamed)
        assert windows == dict.fromkeys(cases, 3 * 4)


@pytest.mark.parametrize("point", PARENT_POINTS)
def test_a_killed_parent_resumes(zygote: Zygote, suite: Path, tmp_path: Path, point: str) -> None:
    root = tmp_path / "results"
    assert zygote.drive(suite, root, KBENCH_KILL=point) == -9
    assert zygote.drive(suite, root, resume=True) == 0
    records, aborted = evidence(suite, root)
    [record] = records
    require_whole(record)
    # Announced but not begun: the announcement stands, and counts as a run that somebody broke off.
    assert aborted == (1 if point == "run_announced:0" else 0)


@pytest.mark.parametrize("point", WORKER_POINTS)
def test_a_lost_worker_costs_its_case_and_no_more(zygote: Zygote, suite: Path, tmp_path: Path, point: str) -> None:
    root = tmp_path / "results"
    first = zygote.drive(suite, root, KBENCH_FAKE=f"{point}|{tmp_path / 'marker'}")
    if point.startswith("kill-parent"):
        assert first == -9
        assert zygote.drive(suite, root, resume=True) == 0
    else:
        assert first == 0
    records, aborted = evidence(suite, root)
    [record] = records
    lost = [trial for trial in record.trials if trial.status in ("crashed", "hung")]
    assert len(lost) == (0 if point.startswith("kill-parent") else 1)
    blamed = lost[0].case if lost else ""
    assert aborted == 0
    # A case that ended a worker is measured no further; all the others are whole.
    require_whole(record, blamed=blamed)


def test_a_run_that_is_not_resumed_counts_as_aborted(zygote: Zygote, suite: Path, tmp_path: Path) -> None:
    root = tmp_path / "results"
    assert zygote.drive(suite, root, KBENCH_KILL="window_recorded:5") == -9
    assert zygote.drive(suite, root) == 0
    records, aborted = evidence(suite, root)
    assert aborted == 1
    [record] = records
    require_whole(record)


def test_nothing_is_measured_before_it_is_announced(zygote: Zygote, suite: Path, tmp_path: Path) -> None:
    root = tmp_path / "results"
    assert zygote.drive(suite, root, KBENCH_KILL="session_started:0") == -9
    kinds = [entry.kind for entry in History.read(root, "loop").entries]
    assert kinds == [Kind.PLAN, Kind.RUN_START]


def test_a_second_run_measures_nothing_after_the_last_look(zygote: Zygote, suite: Path, tmp_path: Path) -> None:
    root = tmp_path / "results"
    assert zygote.drive(suite, root) == 0
    assert zygote.drive(suite, root) == 0
    records, aborted = evidence(suite, root)
    assert (len(records), aborted) == (1, 0)


def test_a_worker_that_talks_nonsense_is_lost_and_costs_its_case(zygote: Zygote, suite: Path, tmp_path: Path) -> None:
    root = tmp_path / "results"
    assert zygote.drive(suite, root, KBENCH_FAKE=f"garbage@window:2:b|{tmp_path / 'marker'}") == 0
    [record], aborted = evidence(suite, root)
    [lost] = [trial for trial in record.trials if trial.status == "crashed"]
    assert (lost.variant, aborted) == ("b", 0)
    assert "cannot be read" in lost.message
    require_whole(record, blamed=lost.case)
