"""What a suite's ledger says: whether the declaration still stands, which runs count, which plans came before.

Owns the meaning of ledger entries (`kbench.ledger` owns only their chain). A declaration that changed after there was
evidence is refused here; evidence for a decision is gathered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kbench.decide.evidence import Cell, cell_of
from kbench.decide.timing import aa_floor
from kbench.errors import IntegrityError, KbenchError, Problem
from kbench.hashing import difference, sha256_of_file
from kbench.ledger import Entry, Kind, Ledger
from kbench.noise import key_of
from kbench.plan import Plan
from kbench.record import RunFolder, RunRecord, list_runs, read_run
from kbench.run.committed import require_ancestor
from kbench.suite.defaults import with_defaults

RESTORE = "restore the file, or make the old evidence a pilot: kbench ledger amend SUITE --reason TEXT"
EVIDENCE_FILES = ("run.json", "samples.parquet", "requests.parquet", "steps.parquet", "kv.parquet", "costs.parquet")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run as the ledger tells it."""

    run: str
    plan_hash: str
    started: str
    ended: bool
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class History:
    """The ledger of one suite, read once."""

    folder: Path
    entries: tuple[Entry, ...]

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger.jsonl")

    @classmethod
    def read(cls, root: Path, name: str) -> History:
        """Read the ledger below a results root. Raises IntegrityError where its chain is broken."""
        folder = root / name
        return cls(folder, tuple(Ledger(folder / "ledger.jsonl").read()))

    @property
    def standing(self) -> tuple[Entry, ...]:
        """Entries since the last amendment: what came before it is a pilot and no evidence."""
        last = max((index for index, entry in enumerate(self.entries) if entry.kind is Kind.AMEND), default=-1)
        return self.entries[last + 1 :]

    @property
    def last_decision(self) -> dict[str, Any] | None:
        """The body of the newest entry, where that is a decision: nothing has happened since."""
        newest = self.standing[-1:]
        return newest[0].body if newest and newest[0].kind is Kind.DECIDE else None

    def runs(self, plan_hash: str | None = None) -> list[RunEntry]:
        ends = {entry.body["run"]: entry for entry in self.standing if entry.kind is Kind.RUN_END}
        return [
            RunEntry(
                run=str(entry.body["run"]),
                plan_hash=str(entry.body["plan_hash"]),
                started=entry.time,
                ended=entry.body["run"] in ends,
                files=dict(ends[entry.body["run"]].body["files"]) if entry.body["run"] in ends else {},
            )
            for entry in self.standing
            if entry.kind is Kind.RUN_START and plan_hash in (None, entry.body["plan_hash"])
        ]

    def voids(self, plan_hash: str) -> int:
        return len(self.void_entries(plan_hash))

    def void_entries(self, plan_hash: str) -> list[dict[str, Any]]:
        """Body of every void of this plan: its run, code and session."""
        return [e.body for e in self.standing if e.kind is Kind.VOID and e.body["plan_hash"] == plan_hash]

    def require_unchanged(self, plan: Plan) -> None:
        """Refuse a declaration other than the one that evidence was measured under. Raises IntegrityError (exit 5).

        Also where a run lies here that the ledger does not announce: then its end was cut off, or it was written anew.
        """
        found = unannounced(self.folder, self.entries)
        if found:
            raise IntegrityError(found[0].what, where=found[0].file, remedy=found[0].remedy)
        started = {run.plan_hash for run in self.runs()}
        for entry in self.standing:
            body = entry.body
            if entry.kind is not Kind.PLAN or body["plan_hash"] not in started:
                continue
            if body["lock_hash"] != plan.lock_hash:
                raise _changed(plan, body["declaration"])
            if body.get("suite_commit"):
                require_ancestor(plan, str(body["suite_commit"]))

    def earlier_plans(self, plan: Plan) -> list[dict[str, Any]]:
        """Other plans of this suite, oldest first, with the verdict that each last got (None: none was reached).

        Their arms' code differed, or they are pilots: amended since. A pilot may have this very plan's hash.
        """
        found: list[dict[str, Any]] = []
        pilots = len(self.entries) - len(self.standing)
        for index, entry in enumerate(self.entries):
            body, pilot = entry.body, index < pilots
            if entry.kind is Kind.PLAN and (pilot or body["plan_hash"] != plan.plan_hash):
                found.append({"plan_hash": body["plan_hash"], "time": entry.time, "verdicts": None, "pilot": pilot})
            elif entry.kind is Kind.DECIDE:
                for one in found:
                    if one["plan_hash"] == body["plan_hash"] and one["pilot"] == pilot:
                        one["verdicts"] = dict(body["verdicts"])
        return found

    def aa_floors(self, plan: Plan, environment: dict[str, Any], device: str) -> dict[Cell, float]:
        """How far apart two equal variants may seem on this machine, by the calibrations before the plan's first run.

        A calibration that came later, or had expired by then, widens nothing: a margin is known before the evidence.
        """
        starts = [e for e in self.standing if e.kind is Kind.RUN_START and e.body["plan_hash"] == plan.plan_hash]
        before = self.entries[: starts[0].n - 1] if starts else self.entries
        when = starts[0].time if starts else _now()
        known = [e.body for e in before if e.kind is Kind.CALIBRATE and "sd" in e.body]
        if not known:
            return {}
        key = key_of(environment, device, plan.baseline, plan.loaded.suite.measure)
        sds: dict[str, float] = {}
        for body in known:
            if body["card"] == f"noise/{key.name}.json" and str(body["expires"]) > when:
                sds |= body["sd"]
        sessions = plan.loaded.suite.rule.looks[0]
        return {cell_of(case)[0]: aa_floor(sd, sessions) for case, sd in sds.items()}

    def floors_of(self, plan: Plan, records: Sequence[RunRecord]) -> dict[Cell, float]:
        """`aa_floors` on the machine that `records` were measured on."""
        if not records:
            return {}
        return self.aa_floors(plan, records[0].header["environment"], str(records[0].header["device"]))

    def scatter(self, plan: Plan) -> list[RunRecord]:
        """Every ended run that can still be read, pilots and other plans too: how this machine scatters, no more.

        The runs of this plan come first, then the newest. One that cannot be read is left out: no verdict rests on it.
        """
        found = []
        started = {entry.body["run"]: entry.body["plan_hash"] for entry in self.entries if entry.kind is Kind.RUN_START}
        for entry in self.entries:
            if entry.kind is Kind.RUN_END:
                with suppress(KbenchError):
                    found.append(read_run(self.folder / str(entry.body["run"])))
        found.reverse()
        return sorted(found, key=lambda record: started.get(record.run_id) != plan.plan_hash)

    def open_run(self, plan: Plan) -> str | None:
        """The newest run of this plan that never ended and whose folder is still there."""
        unended = [run.run for run in self.runs(plan.plan_hash) if not run.ended]
        return next((run for run in reversed(unended) if (self.folder / run / "run.json").is_file()), None)

    def evidence(self, plan: Plan) -> tuple[list[RunRecord], int, int]:
        """All ended runs of the plan, how many were aborted, how many voids. Raises IntegrityError on altered files."""
        runs = self.runs(plan.plan_hash)
        records = []
        for run in runs:
            if run.ended:
                require_intact(self.folder / run.run, run.files)
                records.append(read_run(self.folder / run.run))
        _require_one_machine(records)
        return records, sum(not run.ended for run in runs), self.voids(plan.plan_hash)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unannounced(folder: Path, entries: Sequence[Entry]) -> list[Problem]:
    """Run folders beside a ledger that does not know them. Every run is announced before its folder exists.

    A copy under another name, and a run that says that it is exploratory, is nobody's evidence and no problem.
    """
    known = {str(entry.body["run"]) for entry in entries if entry.kind is Kind.RUN_START}
    found = []
    for path in list_runs(folder):
        if path.name in known:
            continue
        with suppress(KbenchError):
            header = RunFolder(path).header()
            if not header.get("exploratory", True) and header.get("run") not in known:
                what = "a run that the ledger does not announce: the ledger's end was cut off, or it was written anew"
                remedy = "restore the ledger from a copy; if the run was put here by hand, move it away"
                found.append(Problem(what, str(path), remedy=remedy))
    return found


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a closed run that a decision can rest on."""
    return {name: sha256_of_file(folder / name) for name in EVIDENCE_FILES if (folder / name).is_file()}


def _changed(plan: Plan, declared: dict[str, Any]) -> IntegrityError:
    where = str(plan.loaded.path)
    remedy = RESTORE.replace("the file", "it")
    error = IntegrityError("the declaration changed after evidence was measured", where=where, remedy=remedy)
    changes = difference(_readable(declared), _readable(plan.declaration)) or difference(declared, plan.declaration)
    error.problems = (*error.problems, *(Problem(line) for line in changes))
    return error


def _readable(declaration: dict[str, Any]) -> dict[str, Any]:
    """By the names that the suite's author wrote, defaults included: `rule.alpha: 0.05 → 0.1`."""
    rest = {key: value for key, value in declaration.items() if key != "suite"}
    return {**rest, **with_defaults(declaration["suite"])}


def require_intact(folder: Path, hashes: dict[str, str]) -> None:
    """Raise IntegrityError where a file of an ended run is gone or another one."""
    for name, expected in hashes.items():
        file = folder / name
        if not file.is_file():
            raise IntegrityError("evidence is gone", where=str(file), remedy=RESTORE)
        if sha256_of_file(file) != expected:
            raise IntegrityError("evidence was altered after its run ended", where=str(file), remedy=RESTORE)
    for name in EVIDENCE_FILES:
        if name not in hashes and (folder / name).exists():
            what, remedy = "evidence was added after its run ended", "move it away: its run did not write it"
            raise IntegrityError(what, where=str(folder / name), remedy=remedy)


def _require_one_machine(records: list[RunRecord]) -> None:
    machines = {str(record.header.get("machine")): record.run_id for record in records}
    if len(machines) > 1:
        named = "; ".join(f"{run}: {machine}" for machine, run in machines.items())
        raise IntegrityError(
            f"runs of one plan come from several machines: {named}",
            remedy="keep a results root (--out) for each machine",
        )
