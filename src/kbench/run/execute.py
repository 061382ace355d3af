"""One run from its announcement to its end: the ledger entries around the session loop.

Owns who may run (one at a time, on one machine, under an unchanged declaration), the header, and the order of what is
written: announced in the ledger first, closed last.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kbench import __version__, env
from kbench.errors import IntegrityError, MeasurementError, UsageError
from kbench.ledger import Kind
from kbench.plan import MEASURED_LEVELS, Plan
from kbench.record import RunFolder, RunRecord, list_runs, read_run
from kbench.run import costs, ladder, parts
from kbench.run.committed import committed
from kbench.run.history import History, file_hashes
from kbench.run.loop import Loop, Options, sessions_of
from kbench.run.preflight import check_backends


def execute(plan: Plan, options: Options) -> RunRecord | None:
    """Measure what is due and close the run. None if nothing was due.

    Raises IntegrityError where the declaration changed, MeasurementError where nothing could be measured or written;
    what was recorded by then stays, and `resume` goes on from there. UsageError: an option that cannot be meant.
    """
    _require_sense(plan, options)
    folder = options.root / plan.name
    with _only_one(folder):
        if options.exploratory or options.only:
            check_backends(plan, options.host, options.levels, options.only)
            return _exploratory(plan, options, folder / "exploratory")
        history = History.read(options.root, plan.name)
        history.require_unchanged(plan)
        earlier, aborted, _ = history.evidence(plan)
        name = history.open_run(plan) if options.resume else None
        floors = history.aa_floors(plan, env.snapshot(), options.host.device)
        prior = ladder.Prior(aborted - (name is not None), floors)  # the run that goes on is not aborted
        if name is None and not _anything_due(plan, options, earlier, prior):
            options.observe("nothing_due", plan_hash=plan.plan_hash)
            return None
        _require_this_machine(earlier, options.host.device)
        commit = committed(plan)
        check_backends(plan, options.host, options.levels, options.only)
        if name is None:
            run = _start(plan, options, history, commit)
        else:
            run, options = _resume(folder / name, options)
        record = _measure(Loop(plan, options, run, earlier, prior))
        options.observe("run_closing", run=record.run_id)
        end = {"run": record.run_id, "plan_hash": plan.plan_hash, "files": file_hashes(record.path)}
        history.ledger.append(Kind.RUN_END, end)
        options.observe("run_ended", run=record.run_id)
        return record


def execute_apart(plan: Plan, options: Options, kind: str) -> RunRecord:
    """Measure beside the evidence, in the folder `kind` (`gate`, `calibrate`): nothing is locked or announced.

    `resume` goes on with the newest run of the same plan there that was interrupted. Raises as `execute` does.
    """
    _require_sense(plan, options)
    folder = options.root / plan.name
    with _only_one(folder):
        check_backends(plan, options.host, options.levels, options.only)
        return _exploratory(plan, options, folder / kind)


def _require_sense(plan: Plan, options: Options) -> None:
    """Before anything is announced: a run that could measure nothing would still be on record."""
    if options.budget_s is not None and not options.budget_s > 0:
        raise UsageError(f"a budget of {options.budget_s:g} s", remedy="give a positive number of seconds")
    if options.only and not any(options.only in str(case) for case in plan.at(*options.levels)):
        known = next((str(case) for case in plan.at(*options.levels)), "none")
        raise UsageError(f"no case has {options.only!r} in its id", remedy=f"kbench plan lists them, e.g. {known}")


def _measure(loop: Loop) -> RunRecord:
    loop.folder.open()
    try:
        loop.measure()
        rows = costs.gather([read_run(loop.folder.path)])
        if rows:
            costs.write(rows, loop.folder.path / "costs.parquet")
        parts.merge(loop.folder.path)
        loop.options.observe("journal_closing", run=loop.folder.path.name)
        record = loop.folder.close({"ended": _now()})
        parts.discard(loop.folder.path)
        return record
    finally:
        loop.folder.release()


def _start(plan: Plan, options: Options, history: History, commit: dict[str, Any]) -> RunFolder:
    """Announce the run in the ledger, on disk, before anything of it exists that could be looked at."""
    announced = {entry.body["run"] for entry in history.entries if entry.kind is Kind.RUN_START}
    name = _run_name(history.folder, announced)
    known = {entry.body["plan_hash"] for entry in history.standing if entry.kind is Kind.PLAN}
    if plan.plan_hash not in known:
        history.ledger.append(
            Kind.PLAN,
            {
                "plan_hash": plan.plan_hash,
                "lock_hash": plan.lock_hash,
                "declaration": plan.declaration,
                "arms": plan.arms,
                **commit,
            },
        )
    history.ledger.append(Kind.RUN_START, {"run": name, "plan_hash": plan.plan_hash, "levels": list(options.levels)})
    options.observe("run_announced", run=name)
    run = RunFolder.create(history.folder / name, _header(plan, options, exploratory=False))
    options.observe("run_started", run=name)
    return run


def _resume(path: Path, options: Options) -> tuple[RunFolder, Options]:
    """Go on with an interrupted run: its own levels, on the machine that it was begun on."""
    run = RunFolder(path)
    record = read_run(path)
    missing = {"run", "levels", "machine", "exploratory"} - set(record.header)
    if missing:
        named = ", ".join(sorted(missing))
        raise IntegrityError(f"the run header lacks {named}", where=str(path / "run.json"), remedy="restore the file")
    _require_this_machine([record], options.host.device)
    options.observe("run_resumed", run=path.name)
    return run, replace(options, levels=tuple(record.header["levels"]))


def _require_this_machine(records: Sequence[RunRecord], device: str) -> None:
    here = machine(env.snapshot(), device)
    for record in records:
        if record.header["machine"] != here:
            raise IntegrityError(
                f"this plan's evidence comes from {record.header['machine']}, and this is {here}",
                where=str(record.path),
                remedy="keep a results root (--out) for each machine",
            )


def _exploratory(plan: Plan, options: Options, folder: Path) -> RunRecord:
    """A run that locks nothing and is never evidence."""
    folder.mkdir(parents=True, exist_ok=True)
    interrupted = _interrupted(plan, folder) if options.resume else None
    if interrupted is not None:
        _require_this_machine([read_run(interrupted.path)], options.host.device)
        options.observe("run_resumed", run=interrupted.path.name)
        return _measure(Loop(plan, options, interrupted, ()))
    run = RunFolder.create(folder / _run_name(folder, set()), _header(plan, options, exploratory=True))
    options.observe("run_started", run=run.path.name)
    return _measure(Loop(plan, options, run, ()))


def _interrupted(plan: Plan, folder: Path) -> RunFolder | None:
    """The newest run in `folder` that measured this plan and was never closed."""
    for path in reversed(list_runs(folder)):
        header = RunFolder(path).header()
        if header.get("plan_hash") == plan.plan_hash and not header.get("closed"):
            return RunFolder(path)
    return None


def _anything_due(plan: Plan, options: Options, earlier: Sequence[RunRecord], prior: ladder.Prior) -> bool:
    looks = plan.loaded.suite.rule.looks
    levels = [level for level in MEASURED_LEVELS if level in options.levels and plan.at(level)]
    codes = plan.loaded.suite.rule.void_codes
    have = [sessions_of(earlier, level, codes) for level in levels]
    if any(sessions < looks[0] for sessions in have):
        return True
    if any(sessions < looks[-1] for sessions in have) and ladder.undecided(plan, earlier, levels, prior):
        return True
    suite = plan.loaded.suite
    traced = any(trial.case.startswith("timeline/step/") for record in earlier for trial in record.trials)
    timeline = "timeline" in options.levels and bool(suite.step or suite.kernel) and not traced
    return timeline or bool(ladder.workload_classes(plan, options.levels, earlier, prior))


def _header(plan: Plan, options: Options, *, exploratory: bool) -> dict[str, Any]:
    snapshot = env.snapshot()
    return {
        "suite": plan.name,
        "plan_hash": plan.plan_hash,
        "lock_hash": plan.lock_hash,
        "exploratory": exploratory,
        "forced": list(options.levels) == ["workload"] and plan.loaded.suite.rule.policy.stop != "never",
        "levels": list(options.levels),
        "device": options.host.device,
        "machine": machine(snapshot, options.host.device),
        "kbench": __version__,
        "started": _now(),
        "environment": snapshot,
        "arms": {arm.name: arm.model_dump(mode="json", exclude={"root"}) for arm in plan.both},
        "warnings": env.warnings(snapshot),
    }


def machine(snapshot: dict[str, Any], device: str) -> str:
    """What must be equal for two runs to be pooled: the device, its model and the torch that drives it."""
    torch = snapshot["python"]["packages"]["torch"]
    return f"{device}/{env.host_key(snapshot)}/torch-{torch}"


@contextmanager
def _only_one(folder: Path) -> Any:
    """One run of a suite at a time in one results root."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "run.lock", timeout=0)
        lock.acquire()
    except Timeout as error:
        raise MeasurementError(
            "another kbench measures this suite here", where=str(folder), remedy="wait for it, or choose another --out"
        ) from error
    except OSError as error:
        raise MeasurementError(
            f"cannot write the results: {error.strerror or error}", where=str(folder), remedy="choose another --out"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _run_name(folder: Path, announced: set[str]) -> str:
    """A name that begins with the time, and that no folder and no ledger entry has."""
    base = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    taken = announced | ({path.name for path in folder.glob(f"{base}*")} if folder.is_dir() else set())
    return next(name for name in (f"{base}-{number:02d}" for number in range(100)) if name not in taken)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
