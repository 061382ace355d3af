"""Which rows count, and how they are found again."""

from __future__ import annotations

import numpy as np
import pytest
from decide_lab import LONG, Lab, shuffled

from kbench.decide import Cell, Evidence
from kbench.errors import IntegrityError

STEP_CELL = Cell("step", "step", LONG)


def test_samples_of_partial_sessions_are_left_out() -> None:
    whole = Evidence.of([Lab(sessions=6).timing("step", LONG, 0.05).run()])
    partial = Evidence.of([Lab(sessions=6, partial=(1, 4)).timing("step", LONG, 0.05).run()])
    assert (whole.sessions, partial.sessions) == (6, 4)
    assert len(whole.series(STEP_CELL, "step_time", "new")) == 6 * 6 * 2
    assert np.unique(partial.series(STEP_CELL, "step_time", "new").session).tolist() == [0, 1, 2, 3]


def test_sessions_of_different_runs_are_different_sessions_in_the_order_of_the_runs() -> None:
    first = Lab(sessions=2, name="2026-01-01").timing("step", LONG, 0.05, base_us=1000).run()
    second = Lab(sessions=3, name="2026-01-02", partial=(0,)).timing("step", LONG, 0.05, base_us=9000).run()
    evidence = Evidence.of([second, first], aborted=1, void=2)
    series = evidence.series(STEP_CELL, "step_time", "old")
    assert np.unique(series.session).tolist() == [0, 1, 2, 3]
    assert series.value[series.session < 2].max() < 2000 < 8000 < series.value[series.session >= 2].min()
    assert (evidence.runs.total, evidence.runs.aborted, evidence.runs.void) == (2, 1, 2)


def test_segments_count_whatever_session_they_name() -> None:
    lab = Lab(sessions=1, partial=(0,)).workload("long", "goodput", 0.9, 0.0)
    evidence = Evidence.of([lab.run()])
    assert len(evidence.series(Cell("workload", "replay", "long", "exec"), "goodput", "new", "segment")) == 24


def test_equal_points_are_one_cell_however_they_are_written() -> None:
    lab = Lab().timing("step", "1@127", 0.05)
    assert len(Evidence.of([lab.run()]).series(Cell("step", "step", "1*1@127"), "step_time", "new")) == 72


def test_row_order_does_not_matter() -> None:
    record = Lab().timing("step", LONG, 0.05).run()
    one = Evidence.of([record]).series(STEP_CELL, "step_time", "new")
    other = Evidence.of([shuffled(record, 3)]).series(STEP_CELL, "step_time", "new")
    assert one.value.tolist() == other.value.tolist()


def test_an_impossible_value_is_no_number() -> None:
    lab = Lab(sessions=1)
    lab.add(f"step/step/tiny/{LONG}", "step", "new", "step_time", 1.0, flags=("THROTTLED", "IMPOSSIBLE"))
    assert np.isnan(Evidence.of([lab.run()]).series(STEP_CELL, "step_time", "new").value).all()


def test_a_worker_lost_before_its_first_case_is_nobodys_evidence() -> None:
    assert Evidence.of([Lab().trial("", "new", status="crashed").run()]).cells() == ()


def test_runs_of_two_plans_are_refused() -> None:
    with pytest.raises(IntegrityError, match="2 different plans"):
        Evidence.of([Lab(plan_hash="a").run(), Lab(plan_hash="b").run()])


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(IntegrityError, match="unknown case"):
        Evidence.of([Lab().trial("nonsense", "new").run()])


def test_nothing_is_found_where_nothing_is() -> None:
    evidence = Evidence.of([])
    assert len(evidence.series(STEP_CELL, "step_time", "new")) == 0
    assert evidence.trials(STEP_CELL) == ()
