"""One session: a fresh pair of workers that measures every due case, one worker at a time.

Owns the order inside a session (prepare, ABBA/BAAB windows, finish) and what is recorded when. A trial that fails costs
its case; a worker that dies ends the session, which stays on record as partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from kbench.catalog import Case
from kbench.plan import Plan, block_orders
from kbench.protocol import Measurement, Outcome, Status
from kbench.record import RunFolder, Sample, SessionMark, Trial
from kbench.run import conditions
from kbench.run.workers import WORKER_COMMAND, Worker, WorkerLost, measuring_cores

OPEN_TIMEOUT_S = 300.0


class Observer(Protocol):
    """Told of every step of a run, by name: progress for people, and the named points at which tests kill it."""

    def __call__(self, event: str, **facts: Any) -> None: ...


def silent(event: str, **facts: Any) -> None:
    """The observer of a run that nobody watches."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where and how workers are started."""

    device: str = "cpu"
    command: Sequence[str] = WORKER_COMMAND


@dataclass(frozen=True, slots=True)
class Job:
    """Work outside of the windows that a session does once in each worker, e.g. the cost grid."""

    name: str
    case: str
    level: str
    args: dict[str, Any]


@dataclass(slots=True)
class Pair:
    """Two workers, started side by side; asked one at a time wherever anything is timed."""

    workers: dict[str, Worker] = field(default_factory=dict)

    def pin(self) -> None:
        """Both workers onto the same cores: only one works at a time, and where a busy neighbour sits is no difference.

        Left to the scheduler each worker stays where it first woke: on a shared 2-core machine one session in eight
        then showed a difference of 10 % between equal arms.
        """
        for worker in self.workers.values():
            worker.pin(measuring_cores())

    def ask(self, variant: str, op: str, args: dict[str, Any], timeout_s: float) -> Outcome:
        return self.workers[variant].ask(op, args, timeout_s)

    def ask_together(self, op: str, args: dict[str, dict[str, Any]], timeout_s: float) -> dict[str, Outcome]:
        """Ask several workers at once (variant → arguments), for work that no clock is held against."""
        for variant, own in args.items():
            self.workers[variant].send(op, own)
        return {variant: self.workers[variant].answer(timeout_s) for variant in args}


@contextmanager
def open_pair(plan: Plan, host: Host, logs: Path, label: str, *, torch: bool = True) -> Any:
    """Start the workers of both arms in parallel and wait until both are ready."""
    pair = Pair()
    arms = plan.both
    measure = plan.loaded.suite.measure.model_dump(mode="json")
    try:
        for arm in arms:
            worker = Worker(arm.name, logs / f"worker-{label}-{arm.name}.log", host.command)
            pair.workers[arm.name] = worker
            opening = {"arm": arm.model_dump(mode="json"), "device": host.device, "measure": measure, "torch": torch}
            worker.send("open", opening)
        for arm in arms:
            outcome = pair.workers[arm.name].answer(OPEN_TIMEOUT_S)
            if outcome.status is not Status.OK:
                raise WorkerLost(arm.name, outcome.status, outcome.message)
        yield pair
    finally:
        for worker in pair.workers.values():
            worker.close()


@dataclass(slots=True)
class Session:
    """Measures the given cases and jobs with one pair and records as it goes."""

    plan: Plan
    host: Host
    folder: RunFolder
    number: int
    observe: Observer = silent
    thorough: bool = True
    """Whether correctness is checked on edge cases and null models too: once a run is enough for those."""

    def measure(self, cases: Sequence[Case], jobs: Sequence[Job], levels: Sequence[str]) -> Loss | None:
        """Run the session. Returns None if it is complete, else what was lost; either way it is on record."""
        mark = SessionMark(self.number, complete=False, levels=tuple(levels), reason="interrupted")
        self.folder.session(mark)
        self.observe("session_started", session=self.number)
        current: str = ""
        before = conditions.read(self.host.device)
        try:
            with open_pair(self.plan, self.host, self.folder.path / "parts", str(self.number)) as pair:
                if self.host.device == "cpu":
                    pair.pin()
                self.observe("session_opened", session=self.number)
                for case in cases:
                    current = str(case)
                    self._case(pair, case)
                for job in jobs:
                    current = job.case
                    self._job(pair, job)
                current = ""
        except WorkerLost as lost:
            self.folder.trial(Trial(self.number, current, lost.variant, lost.status.value, lost.message))
            self.folder.session(
                replace(mark, reason=f"{lost.variant}: {lost.message}", conditions=self._conditions(before))
            )
            self.observe("session_lost", session=self.number, case=current, variant=lost.variant, message=lost.message)
            return Loss(current, lost.variant, lost.status, lost.message, self.number)
        self.folder.session(replace(mark, complete=True, reason="", conditions=self._conditions(before)))
        self.observe("session_done", session=self.number)
        return None

    def _conditions(self, before: conditions.Reading) -> dict[str, Any]:
        return conditions.between(before, conditions.read(self.host.device))

    def _case(self, pair: Pair, case: Case) -> None:
        timeout_s = self.plan.loaded.suite.measure.trial_timeout_s
        prepared: dict[str, Outcome] = {}
        for variant in pair.workers:
            args = {"case": str(case), "thorough": self.thorough}
            prepared[variant] = pair.ask(variant, "prepare", args, timeout_s)
            self.observe("selected", session=self.number, variant=variant, facts=prepared[variant].facts)
        self.observe("case_prepared", session=self.number, case=str(case))
        ready = all(outcome.status is Status.OK for outcome in prepared.values())
        broken = self._windows(pair, case, timeout_s) if ready else {}
        for variant, first in prepared.items():
            last = pair.ask(variant, "finish", {"case": str(case)}, timeout_s) if ready else Outcome()
            merged = _merge(first, broken.get(variant, Outcome()), last)
            samples = [self._sample(case, variant, item, "session") for item in merged.measurements]
            trial = Trial(self.number, str(case), variant, merged.status.value, merged.message, merged.facts)
            self.folder.trial(trial, samples)
            self.observe(
                "trial_done",
                session=self.number,
                case=str(case),
                variant=variant,
                status=merged.status.value,
                message=merged.message,
            )

    def _windows(self, pair: Pair, case: Case, timeout_s: float) -> dict[str, Outcome]:
        """Measure all blocks. A window that fails ends the case, not the session: it comes back by variant."""
        names = {"A": self.plan.baseline.name, "B": self.plan.candidate.name}
        key = f"{self.folder.path.name}/{self.number}"
        for block, order in enumerate(
            block_orders(self.plan.plan_hash, key, case, self.plan.loaded.suite.measure.blocks)
        ):
            for position, letter in enumerate(order):
                variant = names[letter]
                outcome = pair.ask(variant, "window", {"case": str(case)}, timeout_s)
                if outcome.status is not Status.OK:
                    return {variant: outcome}
                self.folder.samples(
                    self._sample(case, variant, item, "window", block, position) for item in outcome.measurements
                )
                self.observe("window_recorded", session=self.number, case=str(case), block=block, position=position)
        return {}

    def _job(self, pair: Pair, job: Job) -> None:
        for variant in pair.workers:
            timeout_s = job_timeout_s(self.plan, len(job.args.get("points", ())))
            outcome = pair.ask(variant, "job", {"name": job.name, **job.args}, timeout_s)
            trial = Trial(self.number, job.case, variant, outcome.status.value, outcome.message, outcome.facts)
            self.folder.trial(trial)
            self.observe("job_done", session=self.number, job=job.name, variant=variant, status=outcome.status.value)

    def _sample(
        self, case: Case, variant: str, item: Measurement, scope: str, block: int = 0, position: int = 0
    ) -> Sample:
        return Sample(
            case=str(case),
            level=case.level,
            variant=variant,
            metric=item.metric,
            unit=item.unit,
            value=item.value,
            scope=scope,
            session=self.number,
            block=block,
            position=position,
            clock=item.clock,
            flags=item.flags,
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """A session that ended with a worker: in which case, whose, and how."""

    case: str
    variant: str
    status: Status
    message: str
    session: int = -1


def job_timeout_s(plan: Plan, points: int) -> float:
    """How long a job over so many points may stay silent: a trial's limit for each, and no longer than an opening."""
    return min(OPEN_TIMEOUT_S, plan.loaded.suite.measure.trial_timeout_s * max(1, points))


def _merge(*outcomes: Outcome) -> Outcome:
    """One trial from its stages: the first status that is not ok, all values, all facts."""
    worst = next((outcome for outcome in outcomes if outcome.status is not Status.OK), outcomes[0])
    return Outcome(
        status=worst.status,
        message=worst.message,
        measurements=tuple(item for outcome in outcomes for item in outcome.measurements),
        facts={key: value for outcome in outcomes for key, value in outcome.facts.items()},
    )
