"""A run folder keeps every committed unit, forgives a torn last line and nothing else, and closes at any point."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbench.errors import EvidenceError, IntegrityError, KbenchError, MeasurementError
from kbench.record import RunFolder, RunRecord, Sample, SessionMark, Trial, list_runs, read_run
from record.conftest import samples

ONE = Sample("step/step/tiny/1*1@127", "step", "a", "step_time", "us", 1.5)
TRIAL = Trial(0, ONE.case, "a", "ok", facts={"phases": {"forward": 1.0}})


def write(path: Path) -> RunFolder:
    run = RunFolder.create(path, {"plan_hash": "p"}).open()
    try:
        run.session(SessionMark(0, complete=False, levels=("step",), reason="interrupted"))
        for position in range(2):
            run.samples([replace(ONE, position=position, value=float(position))])
        run.trial(TRIAL, [replace(ONE, scope="session", metric="launches")])
        run.session(SessionMark(0, complete=True, levels=("step",)))
    finally:
        run.release()
    return run


def content(record: RunRecord) -> tuple[object, ...]:
    return list(record.samples.rows()), record.trials, record.sessions


def test_a_run_reads_the_same_before_and_after_it_is_closed(tmp_path: Path) -> None:
    run = write(tmp_path / "r")
    before = read_run(tmp_path / "r")
    after = run.close({"ended": "now"})
    assert (before.closed, after.closed) == (False, True)
    assert content(before) == content(after)
    assert after.header["ended"] == "now" and after.header["plan_hash"] == "p"
    assert after.complete_sessions == [0]
    assert not (tmp_path / "r" / "journal.jsonl").exists()
    assert content(RunFolder(tmp_path / "r").close()) == content(after)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(samples, max_size=3), max_size=5))
def test_any_samples_survive_the_journal(tmp_path: Path, units: list[list[Sample]]) -> None:
    path = tmp_path / "r"
    shutil.rmtree(path, ignore_errors=True)
    run = RunFolder.create(path, {}).open()
    for unit in units:
        run.samples(unit)
    expected = [row for unit in units for row in unit]
    assert list(read_run(path).samples.rows()) == expected
    assert list(run.close().samples.rows()) == expected


def test_a_journal_cut_at_every_byte_keeps_every_whole_line(tmp_path: Path) -> None:
    write(tmp_path / "r")
    journal = tmp_path / "r" / "journal.jsonl"
    data = journal.read_bytes()
    lines = data.split(b"\n")[:-1]
    for cut in range(len(data) + 1):
        journal.write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        units = [json.loads(line) for line in lines[:whole]]
        record = read_run(tmp_path / "r")
        assert len(record.samples) == sum(len(unit.get("samples", ())) for unit in units)
        assert len(record.trials) == sum(unit["kind"] == "trial" for unit in units)
    # Going on after a cut drops the torn line, and the next unit stands on a line of its own.
    for cut in range(0, len(data), 7):
        journal.write_bytes(data[:cut])
        before = content(read_run(tmp_path / "r"))
        run = RunFolder(tmp_path / "r").open()
        assert content(read_run(tmp_path / "r")) == before
        run.session(SessionMark(9, complete=True))
        run.release()
        assert read_run(tmp_path / "r").sessions[-1] == SessionMark(9, complete=True)


def test_a_line_inside_that_is_cut_short_is_never_forgiven(tmp_path: Path) -> None:
    write(tmp_path / "r")
    journal = tmp_path / "r" / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines):
        for keep in (0, 1, len(line) // 2, len(line) - 1):
            journal.write_bytes(b"\n".join([*lines[:number], line[:keep], *lines[number + 1 :], b""]))
            with pytest.raises(IntegrityError, match=rf"journal\.jsonl:{number + 1}\b"):
                read_run(tmp_path / "r")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_is_an_error_of_ours_or_no_change_of_shape(tmp_path: Path, data: st.DataObject) -> None:
    """A journal has no hash of its own; but whatever stands in it, reading is never a traceback."""
    path = tmp_path / "r"
    if not path.exists():
        write(path)
        shutil.copy(path / "journal.jsonl", tmp_path / "original")
    whole = bytearray((tmp_path / "original").read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (path / "journal.jsonl").write_bytes(bytes(whole))
    try:
        assert len(read_run(path).samples) in (2, 3)
    except IntegrityError as error:
        assert "journal.jsonl" in str(error)


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"1",
        b"null",
        b"{}",
        b'{"kind":"trial"}',
        b'{"kind":"trial","trial":{"session":0}}',
        b'{"kind":"trial","trial":{"session":0,"case":"","variant":"","status":"","wrong":1}}',
        b'{"kind":"session","session":0}',
        b'{"kind":"samples","samples":[{}]}',
        b'{"kind":"samples","samples":3}',
        b'{"kind":"samples"}',
        b'{"kind":"nonsense"}',
        b"\xff\xfe",
    ],
)
def test_a_line_of_another_shape_names_its_place(tmp_path: Path, line: bytes) -> None:
    write(tmp_path / "r")
    with (tmp_path / "r" / "journal.jsonl").open("ab") as journal:
        journal.write(line + b"\n")
    with pytest.raises(IntegrityError, match=r"journal\.jsonl:6"):
        read_run(tmp_path / "r")


def test_a_later_mark_of_a_session_replaces_the_earlier(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "r", {}).open()
    for number, complete in ((1, False), (0, False), (0, True)):
        run.session(SessionMark(number, complete=complete))
    run.release()
    record = read_run(tmp_path / "r")
    assert [(mark.session, mark.complete) for mark in record.sessions] == [(0, True), (1, False)]
    assert record.complete_sessions == [0]


def test_a_kill_inside_of_closing_is_closed_again(tmp_path: Path) -> None:
    """Between any two of: samples written, header replaced, journal removed."""
    expected = content(write(tmp_path / "whole").close())
    journal = (write(tmp_path / "r").path / "journal.jsonl").read_bytes()
    read_run(tmp_path / "r").samples.write(tmp_path / "r" / "samples.parquet")
    assert content(RunFolder(tmp_path / "r").open().close()) == expected
    (tmp_path / "r" / "journal.jsonl").write_bytes(journal)  # the header says closed, the journal is still there
    assert content(read_run(tmp_path / "r")) == expected
    assert content(RunFolder(tmp_path / "r").close()) == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 99}', '{"schema": 1, "closed": true}'])
def test_a_header_that_is_none(tmp_path: Path, text: str) -> None:
    write(tmp_path / "r").close()
    (tmp_path / "r" / "run.json").write_text(text)
    with pytest.raises(IntegrityError, match="header"):
        read_run(tmp_path / "r")


def test_no_run_is_missing_evidence(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError):
        read_run(tmp_path)
    assert list_runs(tmp_path / "nowhere") == []


def test_runs_are_listed_oldest_first(tmp_path: Path) -> None:
    for name in ("20260102T000000-00", "20260101T000000-01", "20260101T000000-00"):
        RunFolder.create(tmp_path / name, {})
    (tmp_path / "notes").mkdir()
    assert [path.name for path in list_runs(tmp_path)] == [
        "20260101T000000-00",
        "20260101T000000-01",
        "20260102T000000-00",
    ]


def test_a_run_is_created_once(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "r", {})
    with pytest.raises(MeasurementError, match="cannot create the run folder"):
        RunFolder.create(tmp_path / "r", {})


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The operating system refuses to let any file grow beyond `size`, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_disk_that_fills_at_any_byte_costs_only_the_unit_that_did_not_fit(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    full = len((tmp_path / "whole" / "journal.jsonl").read_bytes())
    header = (tmp_path / "whole" / "run.json").stat().st_size
    for size in range(header, full, 97):
        path = tmp_path / str(size)
        with largest_file(size), pytest.raises(MeasurementError, match=r"cannot write.*--resume"):
            write(path)
        kept = len(read_run(path).samples)
        run = RunFolder(path).open()
        run.samples([ONE])
        assert len(run.close().samples) == kept + 1


def test_a_disk_that_fills_while_closing_leaves_the_run_open(tmp_path: Path) -> None:
    run = write(tmp_path / "r")
    with largest_file(100), pytest.raises(MeasurementError, match="cannot write"):
        run.close()
    record = read_run(tmp_path / "r")
    assert not record.closed
    assert content(RunFolder(tmp_path / "r").close()) == content(record)


@pytest.mark.parametrize("blocked", ["journal.jsonl", "run.json.partial"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, blocked: str) -> None:
    run = RunFolder.create(tmp_path / "r", {})
    (tmp_path / "r" / blocked).mkdir()
    with pytest.raises(KbenchError) as caught:
        run.open()
        run.close()
    assert "\n" not in str(caught.value)


def test_writing_needs_an_open_run(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="not open"):
        RunFolder.create(tmp_path / "r", {}).samples([ONE])
