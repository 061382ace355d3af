"""Whether a declared fallback was measured, as its entry says: its plan, in a ledger of this results root.

Owns the search for that evidence. A plan hash that is in no ledger, or whose runs did not have the fallback compute
the operation, is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kbench.plan import Plan
from kbench.protocol import Status
from kbench.record import RunRecord, read_run
from kbench.run.history import History, require_intact
from kbench.selection import selections_of
from kbench.suite.schema import Fallback


def benchmarked(plan: Plan, root: Path) -> frozenset[tuple[str, str]]:
    """(operation, implementation) of every fallback of the plan's arms whose evidence is there."""
    entries = [entry for arm in plan.both for entry in arm.fallback]
    return frozenset((entry.op, entry.use) for entry in entries if entry.benchmarked and _measured(entry, root))


def _measured(entry: Fallback, root: Path) -> bool:
    return any(_ran(entry, record) for record in _records(entry.benchmarked, root))


def _records(plan_hash: str, root: Path) -> Iterator[RunRecord]:
    """Ended runs of the plan whose hash begins so, of any suite below the root. Raises IntegrityError where a ledger is
    broken or evidence was altered."""
    for ledger in sorted(root.glob("*/ledger.jsonl")):
        history = History.read(root, ledger.parent.name)
        for run in history.runs():
            if run.ended and run.plan_hash.startswith(plan_hash):
                require_intact(history.folder / run.run, run.files)
                yield read_run(history.folder / run.run)


def _ran(entry: Fallback, record: RunRecord) -> bool:
    return any(
        found.get("resolved") == entry.use and str(found.get("op", f"attention.{role}")).startswith(entry.op)
        for trial in record.trials
        if trial.status == Status.OK
        for role, found in selections_of(trial.facts)
    )
