"""`kbench selftest` from outside: who is tried in which process, and what becomes of one that takes its process along.

Owns the order and the workers. Kinds that spoil their process get one of their own; the others share. On a CPU two
lanes work side by side. It knows no torch and no kind: the worker lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from kbench.errors import MeasurementError, UsageError
from kbench.protocol import Outcome, Status
from kbench.run.workers import WORKER_COMMAND, Worker, WorkerLost
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

OPEN_TIMEOUT_S = 120.0
TRY_TIMEOUT_S = 300.0
LANES = {"cpu": 2, "cuda": 1}
Row = dict[str, Any]
Observer = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Try:
    """One question to a worker."""

    name: str
    op: str
    args: dict[str, Any]
    own_process: bool = False

    @property
    def is_kind(self) -> bool:
        return "kind" in self.args


@dataclass(slots=True)
class Lane:
    """One worker at a time, replaced when it is lost or spoiled."""

    device: str
    logs: Path
    command: Sequence[str]
    worker: Worker | None = None

    def ask(self, args: dict[str, Any], *, alone: bool = False) -> Outcome:
        if alone:
            self.close()
        try:
            if self.worker is None:
                self.worker = self._opened()
            return self.worker.ask("job", {"name": "selftest", **args}, TRY_TIMEOUT_S)
        except WorkerLost as lost:
            self.worker = None
            return Outcome(lost.status, lost.message)
        finally:
            if alone:
                self.close()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _opened(self) -> Worker:
        worker = Worker("selftest", self.logs / "worker.log", self.command)
        opening = {
            "arm": _arm().model_dump(mode="json"),
            "device": self.device,
            "measure": Measure().model_dump(mode="json"),
            "torch": True,
        }
        outcome = worker.ask("open", opening, OPEN_TIMEOUT_S)
        if outcome.status is not Status.OK:
            worker.close()
            raise WorkerLost("selftest", outcome.status, outcome.message)
        return worker


@dataclass(slots=True)
class Report:
    kinds: list[Row] = field(default_factory=list)
    honest: list[Row] = field(default_factory=list)

    @property
    def document(self) -> dict[str, Any]:
        return {
            "caught": sum(bool(row["caught"]) for row in self.kinds),
            "total": len(self.kinds),
            "passing_without": sum(bool(row["passes_without"]) for row in self.kinds),
            "false_accusations": sum(bool(row["accused"]) for row in self.honest),
            "kinds": self.kinds,
            "honest": self.honest,
        }

    @property
    def passed(self) -> bool:
        shown = all(row["caught"] and row["passes_without"] for row in self.kinds)
        return shown and not any(row["accused"] for row in self.honest)


def selftest(
    device: str, only: str = "", observe: Observer = lambda line: None, command: Sequence[str] = WORKER_COMMAND
) -> Report:
    """Try every kind and every honest implementation whose name or operation contains `only`."""
    with TemporaryDirectory() as logs, ExitStack() as closing:
        lanes = [Lane(device, Path(logs), command) for _ in range(LANES[device])]
        for lane in lanes:
            closing.callback(lane.close)
        tries = _listed(lanes[0], only)
        queue: SimpleQueue[Try] = SimpleQueue()
        for one in sorted(tries, key=lambda one: not one.own_process):
            queue.put(one)
        found: dict[int, Row] = {}
        with ThreadPoolExecutor(len(lanes)) as pool:
            for rows in [pool.submit(_work, lane, queue, observe) for lane in lanes]:
                found |= dict(rows.result())
    ordered = [(one, found[id(one)]) for one in tries]
    return Report([row for one, row in ordered if one.is_kind], [row for one, row in ordered if not one.is_kind])


def _listed(lane: Lane, only: str) -> list[Try]:
    outcome = lane.ask({})
    if outcome.status is not Status.OK:
        raise MeasurementError(f"the selftest cannot start: {outcome.message}")
    facts = outcome.facts
    tries = [Try(row["name"], row["op"], {"kind": row["name"]}, bool(row["own_process"])) for row in facts["kinds"]]
    for row in facts["honest"]:
        tries.append(Try(row["name"], row["op"], {"implementation": row["name"], "op": row["op"]}))
    chosen = [one for one in tries if only in one.name or only in one.op]
    if not chosen:
        raise UsageError(f"nothing to try contains {only!r}", remedy="kbench selftest --json lists the names")
    return chosen


def _work(lane: Lane, queue: SimpleQueue[Try], observe: Observer) -> list[tuple[int, Row]]:
    rows: list[tuple[int, Row]] = []
    while True:
        try:
            one = queue.get_nowait()
        except Empty:
            lane.close()
            return rows
        row = _row(one, lane.ask(one.args, alone=one.own_process))
        observe(_line(one, row))
        rows.append((id(one), row))


def _row(one: Try, outcome: Outcome) -> Row:
    """What the worker said, or that it could not."""
    if outcome.status is Status.OK:
        return dict(outcome.facts)
    row: Row = {"name": one.name, "op": one.op, "status": outcome.status.value, "message": outcome.message}
    return row | ({"caught": False, "defence": "", "passes_without": False} if one.is_kind else {"accused": True})


def _line(one: Try, row: Row) -> str:
    if not one.is_kind:
        return f"{'ACCUSED' if row['accused'] else 'left alone'}: {one.name} ({one.op}) {row['message']}".rstrip()
    if not row["caught"]:
        return f"MISSED: {one.name} ({one.op}) {row['message']}"
    caught = f"caught by {row['defence']}: {one.name} ({one.op}): {row['message']}"
    return caught if row["passes_without"] else f"{caught}; ALSO WITHOUT IT: {row['message_without']}"


def _arm() -> Arm:
    """A worker hosts an arm; this one's is not asked."""
    return Arm(
        name="selftest",
        model=ModelSettings(preset="tiny"),
        engine=EngineSettings(),
        prefill="reference",
        decode="reference",
        page_size=16,
        layout="NHD",
        seed=1,
        root=".",
    )
