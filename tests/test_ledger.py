"""The chain against every edit of a line, and the file against crashes, concurrency and full disks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbench.errors import ExitCode, IntegrityError, MeasurementError, UsageError
from kbench.ledger import GENESIS, Entry, Kind, Ledger

NOON = datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=UTC)
BODIES = [
    (Kind.PLAN, {"plan_hash": "aa", "rule": {"alpha": 0.05, "looks": [6, 8, 12]}}),
    (Kind.RUN_START, {"run": "r1", "plan_hash": "aa"}),
    (Kind.RUN_END, {"run": "r1", "sessions": 6}),
    (Kind.VOID, {"run": "r1", "code": "gpu_lost", "note": "μs\u2028 \udc80"}),
    (Kind.DECIDE, {"regimes": {}, "head": None, "done": True}),
]


def written(folder: Path) -> Ledger:
    ledger = Ledger(folder / "ledger.jsonl", now=lambda: NOON)
    for kind, body in BODIES:
        ledger.append(kind, body)
    return ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return written(tmp_path)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return written(tmp_path_factory.mktemp("lines")).path.read_bytes().splitlines(keepends=True)


def test_entries_come_back_in_order(ledger: Ledger) -> None:
    entries = ledger.read()
    assert [(entry.kind, entry.body) for entry in entries] == BODIES
    assert [entry.n for entry in entries] == [1, 2, 3, 4, 5]
    assert {entry.time for entry in entries} == {"2026-01-02T12:00:00.123Z"}
    assert ledger.head == entries[-1].hash
    assert ledger.verify() == []


def test_append_returns_what_a_reader_sees(ledger: Ledger) -> None:
    entry = ledger.append("look", {"sessions": (6, 8)})
    assert entry == ledger.read()[-1]
    assert entry.body == {"sessions": [6, 8]}


def test_the_chain_is_plain_sha256_over_sorted_json(ledger: Ledger) -> None:
    """Computed here with nothing but hashlib and json, as an auditor would."""
    previous = "0" * 64
    for line in ledger.path.read_text().splitlines():
        entry = json.loads(line)
        claimed = entry.pop("hash")
        spelled = json.dumps(entry, sort_keys=True, separators=(",", ":"))
        assert entry["previous"] == previous
        previous = hashlib.sha256((previous + spelled).encode()).hexdigest()
        assert previous == claimed


def test_a_ledger_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "none" / "ledger.jsonl")
    assert (ledger.read(), ledger.verify(), ledger.head) == ([], [], GENESIS)
    assert ledger.verify(GENESIS) == []
    assert list(tmp_path.iterdir()) == []  # looking creates nothing


# edits


def check_detected(folder: Path, data: bytes) -> None:
    path = folder / "edited.jsonl"
    path.write_bytes(data)
    ledger = Ledger(path)
    assert ledger.verify()
    with pytest.raises(IntegrityError) as raised:
        ledger.read()
    assert raised.value.exit_code == ExitCode.INTEGRITY
    assert all(problem.line for problem in raised.value.problems)
    with pytest.raises(IntegrityError):
        ledger.append("look", {})
    assert path.read_bytes() == data  # nothing is built on a broken chain


edits = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@edits
@given(st.data())
def test_any_changed_byte_of_a_line_is_detected(tmp_path: Path, lines: list[bytes], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(lines) - 1))
    at = data.draw(st.integers(0, len(lines[i]) - 2))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != lines[i][at]))
    changed = lines[i][:at] + bytes([byte]) + lines[i][at + 1 :]
    check_detected(tmp_path, b"".join([*lines[:i], changed, *lines[i + 1 :]]))


@edits
@given(st.data())
def test_any_piece_put_in_or_cut_out_of_a_line_is_detected(
    tmp_path: Path, lines: list[bytes], data: st.DataObject
) -> None:
    i = data.draw(st.integers(0, len(lines) - 1))
    a, b = sorted(data.draw(st.lists(st.integers(0, len(lines[i]) - 1), min_size=2, max_size=2)))
    piece = data.draw(st.binary(max_size=4))
    changed = lines[i][:a] + piece + lines[i][b:]
    if changed != lines[i]:
        check_detected(tmp_path, b"".join([*lines[:i], changed, *lines[i + 1 :]]))


@pytest.mark.parametrize("i", range(4))
def test_a_removed_line_is_detected(tmp_path: Path, lines: list[bytes], i: int) -> None:
    check_detected(tmp_path, b"".join(lines[:i] + lines[i + 1 :]))


@pytest.mark.parametrize("i", range(5))
@pytest.mark.parametrize("j", range(6))
def test_a_doubled_line_is_detected_wherever_it_goes(tmp_path: Path, lines: list[bytes], i: int, j: int) -> None:
    check_detected(tmp_path, b"".join([*lines[:j], lines[i], *lines[j:]]))


def test_every_order_but_the_right_one_is_detected(tmp_path: Path, lines: list[bytes]) -> None:
    generator = random.Random(0)
    for _ in range(40):
        shuffled = generator.sample(lines, len(lines))
        if shuffled != lines:
            check_detected(tmp_path, b"".join(shuffled))


@pytest.mark.parametrize(
    "junk", [b"\n", b"{}\n", b"[]\n", b"null\n", b"not json\n", b'{"n": 1}\n', b"\x00\x00\n", b"[" * 9999 + b"\n"]
)
@pytest.mark.parametrize("j", [0, 2, 5])
def test_a_line_that_is_no_entry_is_detected(tmp_path: Path, lines: list[bytes], junk: bytes, j: int) -> None:
    check_detected(tmp_path, b"".join([*lines[:j], junk, *lines[j:]]))


def rehashed(line: bytes, **changes: object) -> bytes:
    content = {**json.loads(line), **changes}
    del content["hash"]
    spelled = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["hash"] = hashlib.sha256((content["previous"] + spelled).encode()).hexdigest()
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def test_an_edit_with_a_recomputed_hash_is_detected_by_the_next_line(tmp_path: Path, lines: list[bytes]) -> None:
    assert rehashed(lines[2]) == lines[2]
    forged = rehashed(lines[2], body={"run": "r1", "sessions": 12})
    check_detected(tmp_path, b"".join([*lines[:2], forged, *lines[3:]]))


@pytest.mark.parametrize(
    "changes",
    [{"n": 9}, {"n": 5.0}, {"n": True}, {"kind": "other"}, {"body": []}, {"schema": "kbench.ledger/2"}, {"time": 1}],
)
def test_a_last_entry_that_does_not_fit_is_detected(
    tmp_path: Path, lines: list[bytes], changes: dict[str, object]
) -> None:
    check_detected(tmp_path, b"".join([*lines[:4], rehashed(lines[4], **changes)]))


def test_lines_lost_at_the_end_show_only_against_an_anchor(tmp_path: Path, lines: list[bytes]) -> None:
    whole = written(tmp_path)
    anchor = whole.head
    whole.path.write_bytes(b"".join(lines[:3]))
    assert whole.verify() == []
    (problem,) = whole.verify(anchor)
    assert anchor in problem.what and problem.remedy
    whole.path.unlink()
    assert whole.verify(anchor)


def test_a_ledger_written_anew_shows_against_an_anchor(ledger: Ledger) -> None:
    anchor = ledger.head
    ledger.path.unlink()
    ledger.append("plan", {"plan_hash": "bb"})
    assert ledger.verify() == []
    assert ledger.verify(anchor)


def test_an_anchor_stays_good_while_the_ledger_grows(ledger: Ledger) -> None:
    anchor = ledger.head
    ledger.append("look", {})
    assert ledger.verify(anchor) == []


@pytest.mark.parametrize("anchor", ["", "abc", "Z" * 64])
def test_an_anchor_must_be_a_hash(ledger: Ledger, anchor: str) -> None:
    with pytest.raises(UsageError):
        ledger.verify(anchor)


# crashes


def test_a_crash_at_every_byte_of_an_append_loses_nothing(tmp_path: Path, lines: list[bytes]) -> None:
    before, last = lines[:4], lines[4]
    for cut in range(len(last)):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(b"".join(before) + last[:cut])
        ledger = Ledger(path)
        complete = cut == len(last) - 1  # only the newline is missing: the hash vouches for the rest
        assert ledger.verify() == []
        assert len(ledger.read()) == 4 + complete
        if cut % 20 and not complete:
            continue
        entry = ledger.append("look", {"after": "the crash"})
        assert entry.n == 5 + complete
        assert entry.torn.encode("latin-1") == (b"" if complete else last[:cut])
        assert ledger.verify() == []
        assert ledger.read()[-1] == entry
        assert path.read_bytes().startswith(b"".join(before))


@pytest.mark.parametrize("torn", [b"\x00" * 4096, b"\xff\xfe{", b"{}", b"[" * 9999])
def test_torn_bytes_of_any_kind_are_kept_in_the_chain(ledger: Ledger, torn: bytes) -> None:
    with ledger.path.open("ab") as stream:
        stream.write(torn)
    assert ledger.scan().torn == torn
    assert ledger.append("look", {}).torn.encode("latin-1") == torn
    assert ledger.scan().torn == b""
    assert ledger.verify() == []


def test_a_crash_while_the_torn_tail_is_taken_in_changes_nothing(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ledger.path.open("ab") as stream:
        stream.write(b'{"body":')
    before = ledger.path.read_bytes()

    def killed(source: object, target: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            ledger.append("look", {})
    assert ledger.path.read_bytes() == before
    assert ledger.append("look", {}).torn == '{"body":'


def test_a_first_append_that_was_torn(tmp_path: Path, lines: list[bytes]) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.path.write_bytes(lines[0][:30])
    assert (ledger.read(), ledger.verify(), ledger.head) == ([], [], GENESIS)
    assert ledger.append("plan", {}).n == 1
    assert ledger.verify() == []


WRITER = """
import sys
from pathlib import Path
from kbench.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
for i in range(int(sys.argv[2])):
    entry = ledger.append("look", {"i": i, "pad": "x" * 5000})
    print(entry.hash, flush=True)
"""


def test_kill_9_keeps_every_acknowledged_entry(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    acknowledged: list[str] = []
    for stop_after in (1, 7):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), "100000"], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for _ in range(stop_after):
                acknowledged.append(child.stdout.readline().strip())
            child.kill()
            acknowledged += child.stdout.read().split("\n")[:-1]
        ledger = Ledger(path, lock_timeout_s=10)  # a dead process holds no lock
        acknowledged.append(ledger.append("run_start", {}).hash)
        assert ledger.verify() == []
    present = {entry.hash for entry in ledger.read()}
    assert set(acknowledged) <= present


def test_two_processes_and_threads_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    command = [sys.executable, "-c", WRITER, str(path), "10"]
    children = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    ledger = Ledger(path)
    threads = [threading.Thread(target=lambda: [ledger.append("look", {}) for _ in range(10)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait(timeout=60) for child in children] == [0, 0]
    assert len(ledger.read()) == 50
    assert ledger.verify() == []


# disks and folders


def failing(code: int) -> object:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(("call", "code"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("open", errno.EROFS)])
def test_a_disk_that_fails_is_one_line_with_a_remedy(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    before = ledger.read()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        with pytest.raises(MeasurementError) as raised:
            ledger.append("look", {})
    (problem,) = raised.value.problems
    assert problem.file == str(ledger.path) and problem.remedy and os.strerror(code) in problem.what
    assert "\n" not in str(raised.value)
    assert ledger.read()[: len(before)] == before
    ledger.append("look", {})
    assert ledger.verify() == []


def test_a_disk_that_fills_in_the_middle_of_a_line_is_survived(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, []

    def short(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[:40])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(MeasurementError):
            ledger.append("run_start", {"run": "r2"})
    assert len(ledger.read()) == 5
    assert len(ledger.append("run_start", {"run": "r3"}).torn) == 40


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MeasurementError, match="file"):
        Ledger(tmp_path / "file" / "ledger.jsonl").append("plan", {})


def test_a_folder_in_the_place_of_the_ledger(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError):
        Ledger(tmp_path).read()


def test_a_lock_that_is_held_is_reported(ledger: Ledger) -> None:
    from filelock import FileLock

    impatient = Ledger(ledger.path, lock_timeout_s=0.01)
    with FileLock(str(ledger.path) + ".lock"), pytest.raises(MeasurementError, match="locked"):
        impatient.append("look", {})


def test_missing_folders_are_made(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "results" / "suite" / "ledger.jsonl")
    assert isinstance(ledger.append("plan", {}), Entry)
    assert ledger.verify() == []


def test_every_append_is_flushed_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("plan", {})
    assert synced == [str(ledger.path), str(tmp_path)]
    ledger.append("run_start", {})
    assert synced[2:] == [str(ledger.path)]


@pytest.mark.parametrize("body", [{"x": float("nan")}, {"x": {1: 2}}, {"x": Path("a")}])
def test_a_body_without_a_spelling_is_refused_before_anything_is_written(
    ledger: Ledger, body: dict[str, object]
) -> None:
    before = ledger.path.read_bytes()
    with pytest.raises(ValueError, match="x"):
        ledger.append("look", body)
    with pytest.raises(ValueError, match="other"):
        ledger.append("other", {})
    assert ledger.path.read_bytes() == before


def test_importing_the_ledger_imports_nothing_heavy() -> None:
    program = "import sys, kbench.ledger; print(sorted({'torch', 'numpy', 'pandas', 'scipy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
