"""Who may run, what a run leaves behind, and that a declaration with evidence cannot be edited unnoticed."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from driver import FAKE

from conftest import SUITE as LOOP_SUITE
from kbench.errors import EvidenceError, IntegrityError, KbenchError, MeasurementError
from kbench.ledger import Kind
from kbench.plan import Plan, make_plan
from kbench.record import RunRecord, list_runs, read_run
from kbench.run.execute import execute
from kbench.run.history import History, file_hashes
from kbench.run.loop import Options
from kbench.run.session import Host
from kbench.suite import load_suite

SUITE = LOOP_SUITE.replace("blocks = 3", "blocks = 2").replace('"2*1@64"', '"1*1@7"')


class Seen:
    """Remembers what a run said."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **facts: Any) -> None:
        self.events.append((event, facts))

    def names(self) -> list[str]:
        return [event for event, _ in self.events]


def go(suite: Path, root: Path, **options: Any) -> RunRecord | None:
    chosen = {"levels": ("kernel", "step"), "root": root, "host": Host("cpu", FAKE), **options}
    return execute(plan_of(suite), Options(**chosen))


def plan_of(suite: Path) -> Plan:
    return make_plan(load_suite(suite))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a suite and the results of one whole run of it."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "loop.toml").write_text(SUITE)
    assert go(folder / "loop.toml", folder / "results") is not None
    return folder


@pytest.fixture
def folder(measured: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(measured, tmp_path / "copy"))


def evidence(folder: Path) -> tuple[list[RunRecord], int, int]:
    plan = plan_of(folder / "loop.toml")
    return History.read(folder / "results", plan.name).evidence(plan)


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "loop.toml").read_text()
    assert old in text
    (folder / "loop.toml").write_text(text.replace(old, new))


def test_a_run_is_announced_first_and_ended_last(folder: Path) -> None:
    history = History.read(folder / "results", "loop")
    assert [entry.kind for entry in history.entries] == [Kind.PLAN, Kind.RUN_START, Kind.RUN_END]
    plan = plan_of(folder / "loop.toml")
    assert {entry.body["plan_hash"] for entry in history.entries} == {plan.plan_hash}
    assert history.entries[0].body["declaration"] == plan.declaration
    [record], aborted, void = evidence(folder)
    assert (aborted, void) == (0, 0)
    assert record.closed and record.header["plan_hash"] == plan.plan_hash
    assert set(history.entries[-1].body["files"]) == {"run.json", "samples.parquet"}


def test_windows_are_in_the_order_of_the_plans_coin(folder: Path) -> None:
    from kbench.plan import block_orders

    [record], _, _ = evidence(folder)
    plan = plan_of(folder / "loop.toml")
    for case in plan.at("kernel", "step"):
        for session in record.complete_sessions:
            rows = [row for row in record.samples.rows() if row.case == str(case) and row.session == session]
            windows = sorted((row.block, row.position, row.variant) for row in rows if row.scope == "window")
            orders = block_orders(plan.plan_hash, f"{record.run_id}/{session}", case, 2)
            letters = ["".join("A" if name == "a" else "B" for b, _, name in windows if b == block) for block in (0, 1)]
            assert letters in (orders, ["", ""])
            assert letters == orders or "1*1@7" in str(case)


def test_a_case_that_one_arm_cannot_do_is_recorded_and_costs_no_other(folder: Path) -> None:
    [record], _, _ = evidence(folder)
    statuses = {(trial.case, trial.status) for trial in record.trials if trial.session in record.complete_sessions}
    assert ("step/step/tiny/1*1@7", "unsupported") in statuses
    assert {("kernel/attention.decode/tiny/1*1@127", "ok"), ("step/step/tiny/1*1@127", "ok")} <= statuses
    assert not [row for row in record.samples.rows() if row.case == "step/step/tiny/1*1@7" and row.scope == "window"]


def test_facts_of_preparing_and_finishing_are_one_trial(folder: Path) -> None:
    [record], _, _ = evidence(folder)
    trial = next(trial for trial in record.trials if trial.case == "step/step/tiny/1*1@127" and trial.session == 0)
    assert (trial.facts["op"], trial.facts["seen"] > 0) == ("prepare", True)


def test_what_is_done_is_not_measured_again(folder: Path) -> None:
    seen = Seen()
    assert go(folder / "loop.toml", folder / "results", observe=seen) is None
    assert seen.names() == ["nothing_due"]


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("min_saving = 0.02", "min_saving = 0.01", "min_saving: 0.02 → 0.01"),
        ("looks = [2]", "looks = [3]", "rule.looks[0]: 2 → 3"),
        ('points = ["1*1@127"]\n[step]', 'points = ["1*1@126"]\n[step]', "kernel.points[0]"),
        ('schema = "kbench.suite/1"', 'schema = "kbench.suite/1"\nseed = 5', "seed: 1 → 5"),
    ],
)
def test_an_edit_after_evidence_is_refused_and_shown(folder: Path, old: str, new: str, shown: str) -> None:
    edit(folder, old, new)
    with pytest.raises(IntegrityError, match="changed after evidence") as caught:
        go(folder / "loop.toml", folder / "results")
    assert caught.value.exit_code == 5
    assert shown in str(caught.value)
    assert len(History.read(folder / "results", "loop").entries) == 3


def test_an_edit_before_any_evidence_is_free(tmp_path: Path) -> None:
    suite = tmp_path / "loop.toml"
    suite.write_text(SUITE)
    for saving in ("0.02", "0.03"):
        suite.write_text(SUITE.replace("0.02", saving))
        History.read(tmp_path / "results", "loop").require_unchanged(plan_of(suite))


def test_an_amendment_turns_evidence_into_a_pilot(folder: Path) -> None:
    edit(folder, "min_saving = 0.02", "min_saving = 0.01")
    history = History.read(folder / "results", "loop")
    history.ledger.append(Kind.AMEND, {"reason": "a new margin"})
    assert evidence(folder) == ([], 0, 0)
    assert go(folder / "loop.toml", folder / "results") is not None
    [record], _, _ = evidence(folder)
    assert record.complete_sessions == [0, 1]


def with_plugin(folder: Path, **edits: str) -> None:
    """The suite with a plug-in as its candidate."""
    (folder / "mine.py").write_text("def attend(q, kv, batch, spec):\n    return q\n")
    edit(folder, 'decode = "blocked"', 'decode = "mine.py:attend"')


def test_another_byte_of_a_plugin_is_another_plan_and_its_evidence_is_missing(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").write_text(SUITE)
    with_plugin(tmp_path)
    assert go(tmp_path / "loop.toml", tmp_path / "results") is not None
    before = plan_of(tmp_path / "loop.toml")
    (tmp_path / "mine.py").write_text("def attend(q, kv, batch, spec):\n    return q + 0\n")
    after = plan_of(tmp_path / "loop.toml")
    history = History.read(tmp_path / "results", "loop")
    history.require_unchanged(after)
    assert history.evidence(after) == ([], 0, 0)
    assert [plan["plan_hash"] for plan in history.earlier_plans(after)] == [before.plan_hash]
    assert go(tmp_path / "loop.toml", tmp_path / "results") is not None
    assert len(evidence(tmp_path)[0]) == 1


@pytest.mark.parametrize("name", ["samples.parquet", "run.json"])
def test_evidence_that_was_altered_or_removed_is_refused(folder: Path, name: str) -> None:
    [run] = list_runs(folder / "results" / "loop")
    data = bytearray((run / name).read_bytes())
    data[len(data) // 2] ^= 1
    (run / name).write_bytes(bytes(data))
    with pytest.raises(IntegrityError, match="altered") as caught:
        evidence(folder)
    assert caught.value.exit_code == 5
    (run / name).unlink()
    with pytest.raises(IntegrityError, match="gone"):
        evidence(folder)


def test_evidence_that_was_added_is_refused(folder: Path) -> None:
    [run] = list_runs(folder / "results" / "loop")
    shutil.copy(run / "samples.parquet", run / "requests.parquet")
    with pytest.raises(IntegrityError, match="added"):
        evidence(folder)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_run_that_a_shortened_ledger_does_not_announce_is_refused(folder: Path, kept: int) -> None:
    ledger = folder / "results" / "loop" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:kept]))
    with pytest.raises(IntegrityError, match="does not announce") as caught:
        go(folder / "loop.toml", folder / "results")
    assert caught.value.exit_code == 5


def test_a_copy_of_a_run_under_another_name_is_no_run(folder: Path) -> None:
    [run] = list_runs(folder / "results" / "loop")
    shutil.copytree(run, run.with_name("backup"))
    (run.parent / "broken").mkdir()
    (run.parent / "broken" / "run.json").write_text("{")
    assert go(folder / "loop.toml", folder / "results") is None
    assert len(evidence(folder)[0]) == 1


def test_a_ledger_that_was_edited_is_refused(folder: Path) -> None:
    ledger = folder / "results" / "loop" / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"n":2', '"n":3'))
    with pytest.raises(IntegrityError):
        go(folder / "loop.toml", folder / "results")


def test_an_exploratory_run_locks_nothing_and_is_no_evidence(tmp_path: Path) -> None:
    suite = tmp_path / "loop.toml"
    suite.write_text(SUITE)
    for options in ({"exploratory": True}, {"only": "kernel/"}):
        record = go(suite, tmp_path / "results", **options)
        assert record is not None and record.header["exploratory"]
        assert record.complete_sessions == [0, 1]
    assert {row.level for row in record.samples.rows()} == {"kernel"}
    assert not (tmp_path / "results" / "loop" / "ledger.jsonl").exists()
    assert evidence(tmp_path) == ([], 0, 0)
    suite.write_text(SUITE.replace("0.02", "0.05"))
    assert go(suite, tmp_path / "results", exploratory=True) is not None


def test_runs_of_two_machines_are_not_pooled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(folder, "looks = [2]", "looks = [2, 3]")
    shutil.rmtree(folder / "results")
    plan = plan_of(folder / "loop.toml")
    assert go(folder / "loop.toml", folder / "results", levels=("kernel",)) is not None
    monkeypatch.setattr("kbench.run.execute.machine", lambda snapshot, device: "cuda/another/torch-1")
    with pytest.raises(IntegrityError, match="cuda/another/torch-1"):
        go(folder / "loop.toml", folder / "results", levels=("step",))
    # Nor where the check at the start was passed by: another checkout, a copied folder.
    history = History.read(folder / "results", "loop")
    [run] = list_runs(folder / "results" / "loop")
    other = Path(shutil.copytree(run, run.with_name("20990101T000000-00")))
    header = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**header, "run": other.name, "machine": "cuda/another/torch-1"}))
    history.ledger.append(Kind.RUN_START, {"run": other.name, "plan_hash": plan.plan_hash, "levels": ["kernel"]})
    history.ledger.append(Kind.RUN_END, {"run": other.name, "plan_hash": plan.plan_hash, "files": file_hashes(other)})
    with pytest.raises(IntegrityError, match="several machines"):
        evidence(folder)


def test_levels_of_two_runs_are_one_evidence(tmp_path: Path) -> None:
    suite = tmp_path / "loop.toml"
    suite.write_text(SUITE)
    for level in ("kernel", "step"):
        assert go(suite, tmp_path / "results", levels=(level,)) is not None
    records, aborted, _ = evidence(tmp_path)
    assert aborted == 0
    assert [{row.level for row in record.samples.rows()} for record in records] == [{"kernel"}, {"step"}]
    assert go(suite, tmp_path / "results") is None


def test_a_spent_budget_starts_no_further_session(tmp_path: Path) -> None:
    suite = tmp_path / "loop.toml"
    suite.write_text(SUITE.replace("looks = [2]", "looks = [50]"))
    seen = Seen()
    record = go(suite, tmp_path / "results", budget_s=0.01, observe=seen)
    assert record is not None and record.closed
    assert record.complete_sessions == [0]
    assert "budget_spent" in seen.names()
    # The next run goes on from there.
    assert go(suite, tmp_path / "results", budget_s=0.01) is not None
    assert sum(len(found.complete_sessions) for found in evidence(tmp_path)[0]) == 2


def test_two_runs_of_a_suite_at_once_are_refused(folder: Path) -> None:
    edit(folder, "looks = [2]", "looks = [9]")
    shutil.rmtree(folder / "results")

    class Second:
        error: KbenchError | None = None

        def __call__(self, event: str, **facts: Any) -> None:
            if event == "session_opened" and self.error is None:
                with pytest.raises(MeasurementError, match="another kbench") as caught:
                    go(folder / "loop.toml", folder / "results")
                self.error = caught.value

    second = Second()
    assert go(folder / "loop.toml", folder / "results", budget_s=0.01, observe=second) is not None
    assert second.error is not None and second.error.exit_code == 6
    kinds = [entry.kind for entry in History.read(folder / "results", "loop").entries]
    assert kinds.count(Kind.RUN_START) == 1


def test_a_results_root_that_cannot_be_made_is_one_line(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(MeasurementError) as caught:
        go(folder / "loop.toml", folder / "file")
    assert "\n" not in str(caught.value) and caught.value.problems[0].remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_results_root_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").write_text(SUITE)
    (tmp_path / "results").mkdir(mode=0o500)
    with pytest.raises(MeasurementError) as caught:
        go(tmp_path / "loop.toml", tmp_path / "results")
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_is_one_line_and_costs_no_evidence(tmp_path: Path) -> None:
    """The operating system lets no file grow beyond a limit, as a full disk would; later there is space again."""
    suite = tmp_path / "loop.toml"
    suite.write_text(SUITE)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, old[1]))
        with pytest.raises(MeasurementError, match="cannot") as caught:
            go(suite, tmp_path / "results")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "\n" not in str(caught.value) and caught.value.problems[0].remedy
    assert go(suite, tmp_path / "results", resume=True) is not None
    [record], aborted, _ = evidence(tmp_path)
    assert aborted == 0
    assert len(record.complete_sessions) == 2


def test_a_run_resumes_only_on_its_machine_and_with_its_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = tmp_path / "loop.toml"
    suite.write_text(SUITE)

    def stop(event: str, **facts: Any) -> None:
        if event == "session_done":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(suite, tmp_path / "results", levels=("kernel",), observe=stop)
    with monkeypatch.context() as patch:
        patch.setattr("kbench.run.execute.machine", lambda snapshot, device: "elsewhere")
        with pytest.raises(IntegrityError, match="elsewhere"):
            go(suite, tmp_path / "results", resume=True)
    record = go(suite, tmp_path / "results", resume=True)
    assert record is not None
    assert len(list_runs(tmp_path / "results" / "loop")) == 1
    assert record.complete_sessions == [0, 1]
    assert {row.level for row in record.samples.rows()} == {"kernel"}


@pytest.mark.parametrize("variant", ["a", "b"])
def test_a_baseline_that_crashes_is_void_and_a_candidate_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    suite = tmp_path / "loop.toml"
    suite.write_text(SUITE)
    monkeypatch.setenv("KBENCH_FAKE", f"crash@window:1:{variant}|{tmp_path / 'marker'}")
    assert go(suite, tmp_path / "results") is not None
    [record], aborted, void = evidence(tmp_path)
    assert (aborted, void) == (0, 1 if variant == "a" else 0)
    [lost] = [trial for trial in record.trials if trial.status == "crashed"]
    assert (lost.variant, lost.case) == (variant, "kernel/attention.decode/tiny/1*1@127")
    assert "SIGSEGV" in lost.message
    partial = [mark for mark in record.sessions if not mark.complete]
    assert len(partial) == 1 and len(record.complete_sessions) == 2
    assert [row for row in record.samples.rows() if row.session == partial[0].session]


def test_workers_that_never_start_are_a_measurement_failure(tmp_path: Path) -> None:
    suite = tmp_path / "loop.toml"
    suite.write_text(SUITE)
    broken = (FAKE[0], "-c", "import sys; sys.exit('no such library')")
    with pytest.raises(MeasurementError, match=r"3 sessions in a row.*no such library") as caught:
        go(suite, tmp_path / "results", host=Host("cpu", broken))
    assert caught.value.exit_code == 6
    with pytest.raises(MeasurementError, match="cannot start a worker"):
        go(suite, tmp_path / "other", host=Host("cpu", ("/nonexistent/python",)))


def test_a_run_folder_that_vanished_is_an_integrity_error(folder: Path) -> None:
    [run] = list_runs(folder / "results" / "loop")
    shutil.rmtree(run)
    with pytest.raises(IntegrityError, match="gone"):
        evidence(folder)
    with pytest.raises(EvidenceError):
        read_run(run)


def test_every_named_event_is_told_in_order(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").write_text(SUITE)
    seen = Seen()
    assert go(tmp_path / "loop.toml", tmp_path / "results", observe=seen) is not None
    once = ["run_announced", "run_started", "session_started", "session_opened", "case_prepared", "window_recorded"]
    once += ["trial_done", "session_done", "journal_closing", "run_closing", "run_ended"]
    places = [seen.names().index(name) for name in once]
    assert places == sorted(places)
