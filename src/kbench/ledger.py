"""The append-only, hash-chained history of a suite's runs: one canonical JSON object a line in `ledger.jsonl`.

    hash_n = SHA-256(hash_{n-1} ‖ canonical(entry n without its hash)),  hash_0 = 64 zeros

Owns the chain and the file. Which kinds follow which, and what a body holds, is the business of the callers.

What it proves: no line inside the chain was altered, removed, inserted or reordered. What it cannot prove by itself:
that lines are missing at its *end*, or that the whole file was not written anew; both show only against an `anchor`,
a head hash kept elsewhere (a CI log, a git note, a comment).

A crash in the middle of an append leaves a torn last line without a newline. Nothing rested on it, because `append`
had not returned. If every byte of the entry is there (its hash says so) it counts: an announced run stays announced.
Otherwise readers pass over it, and the next append replaces the file in one atomic step by the whole lines plus a new
entry that holds the torn bytes in its `torn` field: kept, dated and part of the chain. A *whole* line that is wrong
is never forgiven.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from kbench.errors import IntegrityError, MeasurementError, Problem, UsageError
from kbench.hashing import canonical, difference, sha256_of

__all__ = ["GENESIS", "SCHEMA", "Entry", "Kind", "Ledger", "Scan", "canonical", "difference", "sha256_of"]

SCHEMA = "kbench.ledger/1"
GENESIS = "0" * 64
_REWRITTEN = "restore the file from a copy; a ledger that was edited proves nothing"


class Kind(StrEnum):
    """What an entry records."""

    PLAN = "plan"
    CALIBRATE = "calibrate"
    RUN_START = "run_start"
    RUN_END = "run_end"
    VOID = "void"
    LOOK = "look"
    DECIDE = "decide"
    AMEND = "amend"
    ANCHOR = "anchor"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger. `torn`: what a crashed append had left before it (bytes as latin-1), usually ""."""

    n: int
    """1 for the first."""
    kind: Kind
    time: str
    """UTC, ISO 8601, milliseconds."""
    body: dict[str, Any]
    torn: str
    previous: str
    hash: str
    schema: str = SCHEMA


@dataclass(frozen=True, slots=True)
class Scan:
    """Everything in a ledger file: readable entries, what is wrong with the chain, and a torn tail not yet taken in."""

    entries: tuple[Entry, ...]
    problems: tuple[Problem, ...]
    torn: bytes

    @property
    def head(self) -> str:
        """The hash of the last entry, `GENESIS` where there is none."""
        return self.entries[-1].hash if self.entries else GENESIS


class Ledger:
    """The ledger at `path`, which need not exist yet. Safe for several processes and threads at once."""

    def __init__(
        self, path: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC), lock_timeout_s: float = 60.0
    ) -> None:
        self.path = Path(path)
        self._now = now
        self._lock_timeout_s = lock_timeout_s

    def append(self, kind: Kind | str, body: dict[str, Any]) -> Entry:
        """Write one entry; it is on disk, and only then, when this returns.

        ValueError: the kind is unknown or the body not plain data. IntegrityError: the chain is broken, so that nothing
        may be built on it. MeasurementError: it could not be written; then no such entry counts, unless the failure was
        the final flush.
        """
        kind = Kind(kind)
        canonical(body)
        with self._locked(), self._reported("append to"):
            created = not self.path.exists()
            data = b"" if created else self.path.read_bytes()
            scan = _scan(data, str(self.path))
            _refuse_broken(scan)
            time = self._now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            entry = _link(scan, kind, time, body)
            if scan.torn:
                self._replace(data[: len(data) - len(scan.torn)] + _line(entry))
            else:
                # A complete last entry may lack its newline only: supply it.
                missing = b"\n" if data and not data.endswith(b"\n") else b""
                _write_synced(self.path, os.O_APPEND, missing + _line(entry))
                if created:
                    _sync_folder(self.path.parent)
            return entry

    def read(self) -> list[Entry]:
        """All entries, oldest first; none without a file. IntegrityError, with every problem, on a broken chain."""
        scan = self.scan()
        _refuse_broken(scan)
        return list(scan.entries)

    def scan(self) -> Scan:
        """Entries and problems together, for showing a ledger that may be broken; decides nothing."""
        with self._reported("read"):
            data = self.path.read_bytes() if self.path.exists() else b""
        return _scan(data, str(self.path))

    def verify(self, anchor: str | None = None) -> list[Problem]:
        """What is wrong with the chain; nothing when it is whole.

        Finds every altered, removed, inserted or reordered line and every line that is not an entry. Lines missing at
        the end, or a ledger written anew from scratch, are found only with an `anchor`: the `head` of an earlier
        time, which must still be in the chain. UsageError: the anchor is not a hash.
        """
        if anchor is not None and not re.fullmatch(r"[0-9a-f]{64}", anchor):
            remedy = "give the 64 hexadecimal digits that `kbench ledger anchor` printed"
            raise UsageError(f"anchor {anchor!r} is not a hash", remedy=remedy)
        scan = self.scan()
        problems = list(scan.problems)
        if anchor not in (None, GENESIS, *(entry.hash for entry in scan.entries)):
            problems.append(
                Problem(
                    what=f"the anchored entry {anchor} is gone: the end was cut off, or the ledger was written anew",
                    file=str(self.path),
                    remedy=_REWRITTEN,
                )
            )
        return problems

    @property
    def head(self) -> str:
        """The hash of the last entry, to be kept elsewhere as an anchor; `GENESIS` for an empty ledger."""
        entries = self.read()
        return entries[-1].hash if entries else GENESIS

    def _replace(self, data: bytes) -> None:
        beside = self.path.with_name(self.path.name + ".new")
        _write_synced(beside, os.O_TRUNC, data)
        os.replace(beside, self.path)
        _sync_folder(self.path.parent)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        with self._reported("create"):
            if not self.path.parent.is_dir():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _sync_folder(self.path.parent.parent)
            lock = FileLock(self.path.with_name(self.path.name + ".lock"), timeout=self._lock_timeout_s)
            try:
                lock.acquire()
            except Timeout as error:
                raise MeasurementError(
                    f"the ledger stayed locked for {self._lock_timeout_s:g} s",
                    where=str(self.path),
                    remedy="wait for the other kbench process that writes it, or end it",
                ) from error
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _reported(self, action: str) -> Iterator[None]:
        """An OSError as one line with a remedy."""
        try:
            yield
        except OSError as error:
            raise MeasurementError(
                f"cannot {action} the ledger: {error.strerror or error}",
                where=str(self.path),
                remedy="free space, make the folder writable, or choose another with --out; nothing recorded is lost",
            ) from error


def _link(scan: Scan, kind: Kind, time: str, body: dict[str, Any]) -> Entry:
    content: dict[str, Any] = {
        "n": len(scan.entries) + 1,
        "kind": str(kind),
        "time": time,
        "body": body,
        "torn": scan.torn.decode("latin-1"),
        "previous": scan.head,
        "schema": SCHEMA,
    }
    line = canonical({**content, "hash": _chained(content)})
    return _entry(json.loads(line))  # what a reader will see: a tuple in the body is a list


def _chained(content: dict[str, Any]) -> str:
    return hashlib.sha256(content["previous"].encode("ascii") + canonical(content)).hexdigest()


def _line(entry: Entry) -> bytes:
    return canonical({field.name: getattr(entry, field.name) for field in fields(Entry)}) + b"\n"


def _entry(raw: dict[str, Any]) -> Entry:
    return Entry(**{**raw, "kind": Kind(raw["kind"])})


def _scan(data: bytes, file: str) -> Scan:
    """Walk the chain. After a problem it goes on from what the line itself says, so that one edit is one or two."""
    *whole, tail = data.split(b"\n")
    entries: list[Entry] = []
    problems: list[Problem] = []
    n, previous = 1, GENESIS
    for number, line in enumerate(whole, start=1):
        entry, what = _parse(line)
        if entry is None:
            problems.append(Problem(what=what, file=file, line=number, remedy=_REWRITTEN))
            continue
        if not what and (entry.n, entry.previous) != (n, previous):
            what = f"entry {entry.n} does not follow entry {n - 1}: a line was altered, removed, inserted or moved"
        if what:
            problems.append(Problem(what=what, file=file, line=number, remedy=_REWRITTEN))
        entries.append(entry)
        n, previous = entry.n + 1, entry.hash
    entry, what = _parse(tail)
    if entry is not None and not what and (entry.n, entry.previous) == (n, previous):
        entries.append(entry)
        tail = b""
    return Scan(tuple(entries), tuple(problems), tail)


def _parse(line: bytes) -> tuple[Entry | None, str]:
    """The entry of a line, if it can be read as one, and what is wrong with it ("" for nothing)."""
    try:
        raw = json.loads(line)
        respelled = canonical(raw)
    except (ValueError, RecursionError):
        return None, "the line is not an entry: no JSON object"
    if not isinstance(raw, dict) or raw.keys() != {field.name for field in fields(Entry)}:
        return None, "the line is not an entry: it lacks fields or has others"
    if raw["schema"] != SCHEMA:
        return None, f"schema {raw['schema']!r} is not {SCHEMA!r}: written by another version of kbench, or altered"
    texts = all(isinstance(raw[name], str) for name in ("kind", "time", "torn", "previous", "hash"))
    if not texts or type(raw["n"]) is not int or not isinstance(raw["body"], dict) or raw["kind"] not in set(Kind):
        return None, "the line is not an entry: a field is of the wrong type"
    content = {name: value for name, value in raw.items() if name != "hash"}
    if not raw["previous"].isascii() or respelled != line or raw["hash"] != _chained(content):
        return _entry(raw), f"entry {raw['n']} was altered: its hash does not fit its content"
    return _entry(raw), ""


def _refuse_broken(scan: Scan) -> None:
    if scan.problems:
        error = IntegrityError("the ledger's chain is broken")
        error.problems = scan.problems
        raise error


def _write_synced(path: Path, mode: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make a new name in `folder` survive a power cut, where the system can open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
