"""The folder of one run: a journal while it measures, a header and Parquet once it is closed.

Owns `run.json`, `journal.jsonl` and `samples.parquet`. Each journal line is one committed unit (a session's beginning
or end, one trial's outcome, one window's samples); it is flushed before the next unit starts, so that a kill loses at
most the line being written, and a torn last line, and nothing else, is forgiven.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kbench.errors import EvidenceError, IntegrityError, MeasurementError
from kbench.record.sample import Sample, SampleTable, sample_from_json
from kbench.record.selected import selected_columns

RUN_VERSION = 1


@dataclass(frozen=True, slots=True)
class Trial:
    """How one case ended in one worker of one session."""

    session: int
    case: str
    variant: str
    status: str
    message: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trial:
        case, variant, status, message = (str(data[name]) for name in ("case", "variant", "status", "message"))
        return cls(int(data["session"]), case, variant, status, message, dict(data["facts"]))


@dataclass(frozen=True, slots=True)
class SessionMark:
    """Whether a session was measured whole. Samples of a partial session are kept, and never estimated from."""

    session: int
    complete: bool
    levels: tuple[str, ...] = ()
    """Levels that this session had to measure."""
    reason: str = ""
    conditions: dict[str, Any] = field(default_factory=dict)
    """What went on around it on the host: `run.conditions`. Runs of before it was read have none."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SessionMark:
        levels, conditions = tuple(data["levels"]), dict(data.get("conditions", {}))
        return cls(int(data["session"]), bool(data["complete"]), levels, str(data["reason"]), conditions)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run as it is on disk, closed or not."""

    path: Path
    header: dict[str, Any]
    samples: SampleTable
    trials: tuple[Trial, ...]
    sessions: tuple[SessionMark, ...]
    closed: bool

    @property
    def run_id(self) -> str:
        return str(self.header["run"])

    @property
    def complete_sessions(self) -> list[int]:
        return [mark.session for mark in self.sessions if mark.complete]


class Journal:
    """Append-only JSONL. Every `append` is one line, flushed to the file before it returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._drop_torn_tail()
        self._file = self._guard(lambda: path.open("ab"))

    def append(self, kind: str, body: dict[str, Any], *, durable: bool = False) -> None:
        """Write one unit. `durable` also forces it to the disk: session ends are, windows are not."""
        line = json.dumps({"kind": kind, **body}, separators=(",", ":")).encode() + b"\n"

        def write() -> None:
            self._file.write(line)
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())

        self._guard(write)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _drop_torn_tail(self) -> None:
        """A line without its newline was being written when the run was killed: it was never committed."""

        def drop() -> None:
            if not self._path.exists():
                return
            data = self._path.read_bytes()
            kept = data.rfind(b"\n") + 1
            if kept != len(data):
                with self._path.open("r+b") as file:
                    file.truncate(kept)

        self._guard(drop)

    def _guard(self, action: Any) -> Any:
        try:
            return action()
        except OSError as error:
            raise MeasurementError(
                f"cannot write: {error.strerror or error}",
                where=str(self._path),
                remedy="free space, then run again with --resume",
            ) from error


@dataclass(slots=True)
class Content:
    """What the units of a journal say, in the order in which they were committed."""

    samples: list[Sample] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    sessions: dict[int, SessionMark] = field(default_factory=dict)

    def add(self, unit: dict[str, Any]) -> None:
        """Take in one unit. KeyError, TypeError, ValueError or IntegrityError where it is none."""
        kind = unit["kind"]
        if kind == "session":
            mark = SessionMark.from_json(unit)
            self.sessions[mark.session] = mark
            return
        if kind not in ("trial", "samples"):
            raise ValueError(f"a unit of kind {kind!r}")
        found = [sample_from_json(item) for item in unit["samples"]]
        if kind == "trial":
            self.trials.append(Trial.from_json(unit["trial"]))
        self.samples += found


def read_journal(path: Path) -> Content:
    """All committed units. A torn last line is skipped; any other bad line is an IntegrityError with its number."""
    content = Content()
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    except OSError as error:
        raise IntegrityError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    for number, line in enumerate(lines[:-1], start=1):
        try:
            content.add(json.loads(line))
        except (ValueError, KeyError, TypeError, IntegrityError) as error:
            raise IntegrityError("not a journal line", where=f"{path}:{number}", remedy="restore the file") from error
    return content


class RunFolder:
    """Writer of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal: Journal | None = None

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> RunFolder:
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=False)
            (path / "parts").mkdir()
        except OSError as error:
            raise MeasurementError(
                f"cannot create the run folder: {error.strerror or error}",
                where=str(path),
                remedy="choose another --out",
            ) from error
        folder.write_header({"schema": RUN_VERSION, "run": path.name, "closed": False, **header})
        return folder

    def open(self) -> RunFolder:
        self._journal = Journal(self.path / "journal.jsonl")
        return self

    def header(self) -> dict[str, Any]:
        return _read_header(self.path)

    def write_header(self, header: dict[str, Any]) -> None:
        partial = self.path / "run.json.partial"
        try:
            with partial.open("w") as file:
                json.dump(header, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path / "run.json")
        except OSError as error:
            raise MeasurementError(
                f"cannot write: {error.strerror or error}",
                where=str(self.path / "run.json"),
                remedy="free space, then run again with --resume",
            ) from error

    def session(self, mark: SessionMark) -> None:
        self._append("session", asdict(mark), durable=True)

    def trial(self, trial: Trial, samples: Iterable[Sample] = ()) -> None:
        self._append("trial", {"trial": asdict(trial), "samples": [asdict(sample) for sample in samples]})

    def samples(self, samples: Iterable[Sample]) -> None:
        self._append("samples", {"samples": [asdict(sample) for sample in samples]})

    def part(self, name: str) -> Path:
        """Where a worker writes a table that becomes part of `NAME.parquet`."""
        return self.path / "parts" / name

    def close(self, extra: dict[str, Any] | None = None) -> RunRecord:
        """Turn the journal into Parquet and close the run. Safe to repeat after a kill at any point."""
        self.release()
        record = read_run(self.path)
        record.samples.write(self.path / "samples.parquet", selected_columns(record.trials))
        header = {
            **record.header,
            **(extra or {}),
            "closed": True,
            "trials": [asdict(trial) for trial in record.trials],
            "sessions": [asdict(mark) for mark in record.sessions],
        }
        self.write_header(header)
        with contextlib.suppress(FileNotFoundError):
            (self.path / "journal.jsonl").unlink()
        return read_run(self.path)

    def release(self) -> None:
        """Let go of the journal and leave the run as it is, to be gone on with."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _append(self, kind: str, body: dict[str, Any], *, durable: bool = False) -> None:
        if self._journal is None:
            raise MeasurementError("the run folder is not open", where=str(self.path))
        self._journal.append(kind, body, durable=durable)


def read_run(path: Path) -> RunRecord:
    """Read a run, closed or interrupted. Raises EvidenceError if there is none, IntegrityError if it is damaged."""
    header = _read_header(path)
    if header.get("closed"):
        try:
            trials = tuple(Trial.from_json(trial) for trial in header["trials"])
            marks = tuple(SessionMark.from_json(mark) for mark in header["sessions"])
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError("not a whole run header", where=str(path / "run.json")) from error
        return RunRecord(path, header, SampleTable.read(path / "samples.parquet"), trials, marks, closed=True)
    content = read_journal(path / "journal.jsonl")
    ordered = tuple(content.sessions[number] for number in sorted(content.sessions))
    return RunRecord(path, header, SampleTable.of(content.samples), tuple(content.trials), ordered, closed=False)


def list_runs(root: Path) -> list[Path]:
    """The run folders below `root`, oldest first (their names begin with the time)."""
    if not root.is_dir():
        return []
    return sorted(path.parent for path in root.glob("*/run.json"))


def _read_header(path: Path) -> dict[str, Any]:
    file = path / "run.json"
    try:
        header = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise EvidenceError("no run here", where=str(path), remedy="kbench run SUITE makes one") from error
    except (OSError, ValueError) as error:
        raise IntegrityError(f"not a readable run header: {error}", where=str(file)) from error
    if not isinstance(header, dict) or header.get("schema") != RUN_VERSION:
        raise IntegrityError("a run header of another version", where=str(file))
    return header
