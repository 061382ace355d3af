"""What is still worth measuring, seen from outside: how many sessions, which looks, which replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driver import FAKE

from conftest import SUITE as LOOP_SUITE
from kbench.ledger import Kind
from kbench.plan import make_plan
from kbench.record import RunRecord
from kbench.run import ladder
from kbench.run.execute import execute
from kbench.run.history import History
from kbench.run.loop import Options
from kbench.run.session import Host
from kbench.suite import load_suite

SUITE = LOOP_SUITE.replace("blocks = 3", "blocks = 2").replace('points = ["1*1@127", "2*1@64"]', 'points = ["1*1@127"]')
NEVER = '[rule.policy]\nstop = "never"\n[[regime]]'


def go(suite: Path, **options: Any) -> RunRecord:
    chosen = {"levels": ("step",), "root": suite.parent / "results", "host": Host("cpu", FAKE), **options}
    record = execute(make_plan(load_suite(suite)), Options(**chosen))
    assert record is not None
    return record


def looks(suite: Path) -> list[int]:
    entries = History.read(suite.parent / "results", "loop").entries
    return [entry.body["sessions"] for entry in entries if entry.kind is Kind.LOOK]


@pytest.fixture
def spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that differ by tens of percent."""
    (tmp_path / "spread").mkdir()
    monkeypatch.setenv("KBENCH_FAKE_SPREAD", str(tmp_path / "spread"))


def test_a_failed_clause_ends_the_measurement_at_the_first_look(suite: Path) -> None:
    # The fake's arms are equal: that one saves 40 % is refuted at once.
    suite.write_text(SUITE.replace("looks = [2]", "looks = [2, 4]").replace("0.02", "0.4"))
    assert go(suite).complete_sessions == [0, 1]
    assert looks(suite) == []


def test_an_open_clause_leads_to_the_next_look_which_the_ledger_keeps(suite: Path, spread: None) -> None:
    # What scatters by tens of percent is not settled by so few sessions.
    suite.write_text(SUITE.replace("looks = [2]", "looks = [2, 3, 4]").replace("0.02", "0.0001"))
    assert go(suite).complete_sessions == [0, 1, 2, 3]
    assert looks(suite) == [2, 3]


def test_measuring_ends_for_futility_unless_nothing_may_stop_it(suite: Path, spread: None) -> None:
    """After ten sessions the fake's mean is at the threshold: two more could hardly settle it."""
    text = SUITE.replace("looks = [2]", "looks = [10, 12]").replace("0.02", "0.0001")
    suite.write_text(text)
    said: list[str] = []
    record = go(suite, observe=lambda event, **_: said.append(event))
    assert (len(record.complete_sessions), looks(suite)) == (10, [])
    assert "futile" in said
    plan = make_plan(load_suite(suite))
    assert ladder.futile_regimes(plan, [record]) == ["all"]
    assert execute(plan, Options(levels=("step",), root=suite.parent / "results", host=Host("cpu", FAKE))) is None
    suite.write_text(text.replace("[[regime]]", NEVER))
    assert len(go(suite, root=suite.parent / "other").complete_sessions) == 12


def test_stop_never_goes_to_the_last_look_without_looking(suite: Path) -> None:
    text = SUITE.replace("looks = [2]", "looks = [2, 4]").replace("0.02", "0.4").replace("[[regime]]", NEVER)
    suite.write_text(text)
    assert go(suite).complete_sessions == [0, 1, 2, 3]
    assert looks(suite) == []


def test_aborted_runs_share_the_error_of_a_look_while_measuring_too(
    suite: Path, spread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What three sessions enable by themselves is open where four runs were begun and left: it is measured on."""
    monkeypatch.setenv("KBENCH_FAKE_FACTOR", "b=0.4")
    suite.write_text(SUITE.replace("looks = [2]", "looks = [3, 4]"))
    plan = make_plan(load_suite(suite))
    ledger = History.read(suite.parent / "results", "loop").ledger
    body = {"plan_hash": plan.plan_hash, "lock_hash": plan.lock_hash, "declaration": plan.declaration}
    ledger.append(Kind.PLAN, {**body, "arms": plan.arms})
    for number in range(4):
        ledger.append(Kind.RUN_START, {"run": f"left{number}", "plan_hash": plan.plan_hash, "levels": ["step"]})
    record = go(suite)
    assert ladder.undecided(plan, [record], ["step"]) is False
    assert (record.complete_sessions, looks(suite)) == ([0, 1, 2, 3], [3])


def test_an_exploratory_run_keeps_no_look(suite: Path, spread: None) -> None:
    suite.write_text(SUITE.replace("looks = [2]", "looks = [2, 3]").replace("0.02", "0.0001"))
    assert go(suite, exploratory=True).complete_sessions == [0, 1, 2]
    assert looks(suite) == []


WORKLOAD = """[workload]
traces = { chat = "chat.parquet", burst = "burst.parquet" }
[measure]"""
CLAUSE = """[[regime]]
id = "served"
trace_class = ["chat"]
points = ["1*1@127"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "superiority"
  min_saving = 0.02
  [[regime.require]]
  level = "workload"
  metric = "goodput"
  test = "noninferiority"
  margin = 0.03
"""


@pytest.mark.parametrize(
    ("policy", "levels", "expected"),
    [
        ("", ("kernel", "step"), []),
        ("", ("workload",), ["chat", "burst"]),
        ("", ("kernel", "step", "workload"), []),
        (NEVER, ("kernel", "step", "workload"), ["chat", "burst"]),
    ],
)
def test_replays_wait_for_the_levels_below(
    suite: Path, policy: str, levels: tuple[str, ...], expected: list[str]
) -> None:
    for name in ("chat", "burst"):
        (suite.parent / f"{name}.parquet").touch()
    text = SUITE.replace("[measure]", WORKLOAD) + CLAUSE
    suite.write_text(text.replace("[[regime]]", policy, 1) if policy else text)
    assert ladder.workload_classes(make_plan(load_suite(suite)), levels, []) == expected


def test_a_suite_without_a_workload_replays_nothing(suite: Path) -> None:
    assert ladder.workload_classes(make_plan(load_suite(suite)), ("workload",), []) == []
