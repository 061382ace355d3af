"""Workers that die, leave children behind or talk nonsense, and runs that could measure nothing."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from kbench.cli import common
from kbench.decide.cells import standing
from kbench.decide.evidence import Cell, Evidence
from kbench.decide.results import ClauseStatus
from kbench.errors import ExitCode, IntegrityError, UsageError
from kbench.plan import make_plan
from kbench.protocol import Status
from kbench.record import RunRecord, SampleTable, SessionMark, Trial
from kbench.run.execute import execute
from kbench.run.history import History
from kbench.run.loop import Options
from kbench.run.session import Host, job_timeout_s
from kbench.run.workers import Worker, WorkerLost
from kbench.suite import load_suite

FAKE = (sys.executable, str(Path(__file__).parents[1] / "run" / "fake_worker.py"))
READ = "import os, sys; argv = sys.argv; os.read(int(argv[argv.index('--read-fd') + 1]), 9); "


def worker(tmp_path: Path, code: str) -> Worker:
    return Worker("a", tmp_path / "worker.log", (sys.executable, "-c", code))


def test_the_last_words_of_a_segfault_say_what_and_where(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost) as lost:
        worker(tmp_path, "import ctypes, numpy; ctypes.string_at(0)").answer(30)
    assert lost.value.status is Status.CRASHED
    assert "SIGSEGV: Segmentation fault" in lost.value.message and "string_at" in lost.value.message
    assert "Extension modules" not in lost.value.message


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    """The child holds a named pipe open: its end is the end of the file here."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    child = (
        f"import os\nif os.fork() == 0:\n    f = os.open({str(fifo)!r}, os.O_WRONLY)\n    os.read(os.pipe()[0], 1)\n"
    )
    started = worker(tmp_path, child + "os.read(os.pipe()[0], 1)")
    reader = os.open(fifo, os.O_RDONLY)
    try:
        started.kill()
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_a_malformed_answer_loses_the_worker_by_name(tmp_path: Path) -> None:
    code = READ + "os.write(int(argv[argv.index('--write-fd') + 1]), b'{\"seq\": 1}\\n'); os.read(os.pipe()[0], 1)"
    with pytest.raises(WorkerLost, match=r"cannot be read: .*malformed") as lost:
        worker(tmp_path, code).ask("open", {}, 30)
    assert lost.value.variant == "a"


def options(root: Path, **given: object) -> Options:
    return Options(levels=("kernel", "step"), root=root, host=Host("cpu", FAKE), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"budget_s": -5.0}, {"budget_s": float("nan")}, {"only": "nosuchcase"}])
def test_a_run_that_can_measure_nothing_is_not_announced(
    write: Callable[..., Path], tmp_path: Path, given: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        execute(make_plan(load_suite(write())), options(tmp_path / "out", **given))
    assert History.read(tmp_path / "out", "hostile").entries == ()


def test_a_header_without_its_machine_is_damage(write: Callable[..., Path], tmp_path: Path) -> None:
    plan = make_plan(load_suite(write()))

    def interrupt(event: str, **_: object) -> None:
        if event == "session_started":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(plan, options(tmp_path / "out", observe=interrupt))
    [header] = (tmp_path / "out" / "hostile").glob("*/run.json")
    header.write_text('{"schema": 1}')
    with pytest.raises(IntegrityError, match=r"lacks .*machine"):
        execute(plan, options(tmp_path / "out", resume=True))


def test_a_job_is_given_up_after_the_suites_patience(write: Callable[..., Path]) -> None:
    plan = make_plan(load_suite(write()))
    assert job_timeout_s(plan, 2) == 16.0
    assert job_timeout_s(plan, 1_000) == 300.0


def test_a_baseline_that_crashed_before_the_candidate_came_is_void(write: Callable[..., Path], tmp_path: Path) -> None:
    crashed = Trial(0, "step/step/nano/1*1@127", "a", "crashed", "worker killed by SIGSEGV")
    mark = SessionMark(0, complete=False)
    run = RunRecord(tmp_path, {"run": "r", "plan_hash": "p"}, SampleTable.of([]), (crashed,), (mark,), closed=True)
    found = standing(load_suite(write()).suite, Evidence.of([run]), Cell("step", "step", "1*1@127")).objection
    assert found is not None and found.status is ClauseStatus.MISSING
    assert "void, the baseline's trial crashed: worker killed by SIGSEGV" in found.text


def test_a_full_disk_is_one_line_wherever_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    @common.one_line_errors
    def command() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "some\x1b[31mwhere")

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 6
    assert capsys.readouterr().err == "kbench: some?[31mwhere: cannot read or write: No space left on device\n"


def test_the_exit_code_is_told_where_nothing_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(typer, "echo", full)
    with pytest.raises(typer.Exit) as ended:
        common.fail(["a line"], ExitCode.INTEGRITY, as_json=True)
    assert ended.value.exit_code == 5


def test_an_impatient_second_interrupt_does_not_cut_off_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    @common.one_line_errors
    def command() -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(typer.Exit) as ended:
            command()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.exit_code == 6
    assert capsys.readouterr().err.count("--resume") == 1
