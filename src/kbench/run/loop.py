"""The session loop: what is due, session after session until a look, then the parts that are taken once.

Owns budget, resume, retries after a lost worker, and the ledger entries of a run. Every command that measures is this
loop with another filter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kbench.catalog import Case
from kbench.decide.voids import void_sessions
from kbench.errors import MeasurementError
from kbench.ledger import Kind
from kbench.plan import MEASURED_LEVELS, Plan
from kbench.protocol import Status
from kbench.record import RunFolder, RunRecord, read_run
from kbench.run import costs, ladder, workload
from kbench.run.history import History
from kbench.run.session import Host, Job, Loss, Observer, Session, silent
from kbench.run.traced import TracedPass

LOSSES_IN_A_ROW = 3
"""So many sessions lost without a case to blame, and the machine rather than the code under test is at fault."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is asked for."""

    levels: tuple[str, ...]
    root: Path
    host: Host
    resume: bool = False
    exploratory: bool = False
    budget_s: float | None = None
    only: str = ""
    """Measure only cases whose id contains this text; such a run is exploratory."""
    sessions: int | None = None
    """So many sessions and no look beyond them, whatever the rule says (gates and calibrations); None: the rule's."""
    traced: bool = True
    """Whether what ran is observed at the end, in workers of its own."""
    observe: Observer = silent


@dataclass(slots=True)
class Loop:
    """One run from start to end."""

    plan: Plan
    options: Options
    folder: RunFolder
    earlier: Sequence[RunRecord]
    prior: ladder.Prior = ladder.NOTHING
    began: float = field(default_factory=time.monotonic)
    blamed: set[tuple[str, str]] = field(default_factory=set)
    """`(case, variant)` of workers that died: not measured again in this run."""
    wanted: int = 0
    """The look that the session loop goes on to, where an earlier one left something open."""
    _spent: bool = False

    def measure(self) -> None:
        self._sessions()
        while self._look_again():
            self._sessions()
        self._trace()
        records = [*self.earlier, read_run(self.folder.path)]
        classes = ladder.workload_classes(self.plan, self.options.levels, records, self.prior)
        if classes:
            rows = costs.gather(records)
            workload.measure(self.plan, self.options.host, self.folder, classes, rows, self.options.observe)

    def _look_again(self) -> bool:
        """Whether the evidence at this look leaves something open that sessions up to the next look may settle."""
        if self.options.sessions is not None:
            return False
        records = [*self.earlier, read_run(self.folder.path)]
        levels = [level for level in MEASURED_LEVELS if level in self.options.levels and self._level_cases(level)]
        have = min((self._sessions_of(records, level) for level in levels), default=0)
        further = next((look for look in self.plan.loaded.suite.rule.looks if look > have), None)
        if further is None or have == 0 or self._spent:
            return False
        if not ladder.undecided(self.plan, records, levels, self.prior):
            futile = ladder.futile_regimes(self.plan, records, self.prior)
            if futile:
                self.options.observe("futile", sessions=have, regimes=", ".join(futile))
            return False
        if not self.options.exploratory:
            look = {"run": self.folder.path.name, "plan_hash": self.plan.plan_hash, "sessions": have}
            History.read(self.options.root, self.plan.name).ledger.append(Kind.LOOK, look)
        self.wanted = further
        self.options.observe("looked", sessions=have, next=further)
        return True

    def _trace(self) -> None:
        """Trace the cases that this run measured, and the baseline's timeline where it is asked for."""
        if not self.options.traced:
            return
        record = read_run(self.folder.path)
        traced = any(trial.case.startswith("timeline/") or "fingerprint" in trial.facts for trial in record.trials)
        good = {(trial.case, trial.variant) for trial in record.trials if trial.status == Status.OK}
        cases = [
            case
            for case in self.plan.at(*MEASURED_LEVELS)
            if not traced and all((str(case), arm.name) in good for arm in self.plan.both)
        ]
        timeline = "timeline" in self.options.levels and self._missing("timeline")
        if cases or timeline:
            number = max((mark.session for mark in record.sessions), default=-1) + 1
            one = TracedPass(self.plan, self.options.host, self.folder, number, self.options.observe)
            one.measure(cases, timeline=timeline)

    def _sessions(self) -> None:
        record = read_run(self.folder.path)
        number = max((mark.session for mark in record.sessions), default=-1) + 1
        self.blamed |= {
            (trial.case, trial.variant)
            for trial in record.trials
            if trial.status in (Status.CRASHED, Status.HUNG) and trial.case
        }
        self._note_voids()
        unexplained = 0
        longest_s = 0.0
        while due := self._due():
            if self._too_many_voids():
                return
            left_s = self._left_s()
            if left_s is not None and left_s < longest_s:
                self.options.observe("budget_spent", left_s=left_s, session_s=longest_s)
                self._spent = True
                return
            started = time.monotonic()
            thorough = not read_run(self.folder.path).complete_sessions
            session = Session(
                self.plan, self.options.host, self.folder, number, self.options.observe, thorough=thorough
            )
            loss = session.measure(self._cases(due), self._jobs(due, number), due)
            self._note_voids()
            longest_s = max(longest_s, time.monotonic() - started)
            number += 1
            unexplained = self._blame(loss, unexplained)

    def _blame(self, loss: Loss | None, unexplained: int) -> int:
        """Remember whose case a lost session was; give up where sessions go on dying without one."""
        if loss is None:
            return 0
        if loss.case:
            self.blamed.add((loss.case, loss.variant))
            if loss.variant == self.plan.baseline.name and not self.options.exploratory:
                History.read(self.options.root, self.plan.name).ledger.append(
                    Kind.VOID,
                    {
                        "run": self.folder.path.name,
                        "plan_hash": self.plan.plan_hash,
                        "code": "baseline_crash",
                        "session": loss.session,
                        "case": loss.case,
                        "message": loss.message,
                    },
                )
            return 0
        if unexplained + 1 >= LOSSES_IN_A_ROW:
            raise MeasurementError(
                f"{LOSSES_IN_A_ROW} sessions in a row could not start: {loss.variant}: {loss.message}",
                where=str(self.folder.path),
                remedy="see the worker logs in its folder parts",
            )
        return unexplained + 1

    def _due(self) -> list[str]:
        """Levels that still need sessions before the next look."""
        record = read_run(self.folder.path)
        due: list[str] = []
        for level in ("kernel", "step", "costs"):
            if level == "costs" and not costs.wanted(self.plan, self.options.levels):
                continue
            if level != "costs" and (level not in self.options.levels or not self._level_cases(level)):
                continue
            if self._sessions_of([*self.earlier, record], level) < self._target(level):
                due.append(level)
        return due

    def _target(self, level: str) -> int:
        """The next look after the evidence of earlier runs; a level that is at its last look needs no more."""
        if self.options.sessions is not None:
            return self.options.sessions
        rule = self.plan.loaded.suite.rule
        have = self._sessions_of(self.earlier, level)
        due = [look for look in rule.looks if look > have]
        if not due:
            return 0
        # "never" stops at nothing but the last look; the cost grid needs no more than the first.
        last = rule.policy.stop == "never" and level != "costs"
        return due[-1] if last else max(due[0], self.wanted if level != "costs" else 0)

    def _sessions_of(self, records: Sequence[RunRecord], level: str) -> int:
        return sessions_of(records, level, self.plan.loaded.suite.rule.void_codes)

    def _note_voids(self) -> None:
        """Every void session of this run into the ledger, once: a kill between the two is made up for by --resume."""
        if self.options.exploratory or self.options.only:
            return
        found = void_sessions(read_run(self.folder.path), self.plan.loaded.suite.rule.void_codes)
        if not found:
            return
        run, history = self.folder.path.name, History.read(self.options.root, self.plan.name)
        noted = {(void["run"], void.get("session")) for void in history.void_entries(self.plan.plan_hash)}
        for session, codes in found.items():
            if (run, session) not in noted:
                body = {"run": run, "plan_hash": self.plan.plan_hash, "code": ", ".join(codes), "session": session}
                history.ledger.append(Kind.VOID, body)
                self.options.observe("session_void", session=session, codes=", ".join(codes))

    def _too_many_voids(self) -> bool:
        """Whether this run has voided as many sessions as the rule's last look has: they will not stop coming."""
        rule = self.plan.loaded.suite.rule
        count = len(void_sessions(read_run(self.folder.path), rule.void_codes))
        if count < rule.looks[-1]:
            return False
        self.options.observe("too_many_voids", void=count)
        self._spent = True
        return True

    def _level_cases(self, level: str) -> list[Case]:
        return [case for case in self.plan.at(level) if self.options.only in str(case)]

    def _cases(self, due: Sequence[str]) -> list[Case]:
        blamed = {case for case, _ in self.blamed}
        return [
            case
            for level in MEASURED_LEVELS
            if level in due
            for case in self._level_cases(level)
            if str(case) not in blamed
        ]

    def _jobs(self, due: Sequence[str], session: int) -> list[Job]:
        job = costs.job(self.plan, session)
        return [job] if "costs" in due and job.case not in {case for case, _ in self.blamed} else []

    def _missing(self, level: str) -> bool:
        """Whether a level that is taken once has not been taken, in an earlier run or in this one."""
        records = [*self.earlier, read_run(self.folder.path)]
        return not any(trial.case.startswith(f"{level}/") for record in records for trial in record.trials)

    def _left_s(self) -> float | None:
        budget_s = self.options.budget_s
        return None if budget_s is None else budget_s - (time.monotonic() - self.began)


def sessions_of(records: Sequence[RunRecord], level: str, void_codes: Sequence[str] = ()) -> int:
    """Complete sessions that had to measure `level`, without those that one of the rule's codes voids."""
    found = 0
    for record in records:
        out = void_sessions(record, void_codes)
        found += sum(mark.complete and level in mark.levels and mark.session not in out for mark in record.sessions)
    return found
