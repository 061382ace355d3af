"""Progress of a run for people: one line a finished trial, on stderr.

Owns the lines. It draws nothing, so a log file holds exactly what happened, in order.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from kbench.plan import Plan
from kbench.report.text import clean, count, duration
from kbench.selection import SelectionRecord, selections_of


@dataclass(slots=True)
class PlainProgress:
    """An observer of a run. A reader that went away (a closed pipe) never ends a measurement."""

    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _sessions: int = field(default=0, init=False)
    _selected: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def __call__(self, event: str, **facts: Any) -> None:
        """Events that are not of interest to people (every window) write nothing."""
        if event == "session_started":
            self._sessions += 1
        if event == "selected":
            # Every session and case resolves anew: a line that says nothing new is not written again.
            told = [text for text in selection_lines(facts) if text not in self._selected]
            self._selected.update(told)
        else:
            told = [text for text in (line(event, facts),) if text]
        for text in told:
            self._write(f"{duration(1e6 * (self.clock() - self._began)):>9}  {text}")

    def _write(self, text: str) -> None:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self.stream.flush()


def progress(plan: Plan, stream: TextIO | None = None) -> PlainProgress:
    """The observer for a run of `plan`, announced by its first line."""
    observer = PlainProgress(sys.stderr if stream is None else stream)
    observer("announced", name=plan.name, plan_hash=plan.plan_hash, cases=len(plan.cases))
    return observer


def selection_lines(facts: dict[str, Any]) -> list[str]:
    """One line for every resolution that a trial's facts tell of."""
    found = [SelectionRecord.from_json(record) for _, record in selections_of(facts["facts"])]
    return [clean(f"{facts['variant']}  {record.line()}") for record in found if record.resolved and record.op]


def line(event: str, facts: dict[str, Any]) -> str:
    """What people are told of an event; empty for those that only tests need."""
    told = {name: clean(value) for name, value in facts.items()}
    if event == "announced":
        return f"{told['name']}: {count(int(facts['cases']), 'case')}, plan {told['plan_hash'][:16]}"
    if event == "run_started":
        return f"run {told['run']}"
    if event == "run_resumed":
        return f"run {told['run']} goes on"
    if event == "nothing_due":
        return "nothing is due: the plan has all of its evidence"
    if event == "session_started":
        return f"session {int(facts['session']) + 1}"
    if event == "budget_spent":
        left, takes = duration(1e6 * facts["left_s"]), duration(1e6 * facts["session_s"])
        return f"the budget ends: {left} left, a session takes {takes}"
    if event == "futile":
        return f"futile after {told['sessions']} sessions, further ones would hardly settle: {told['regimes']}"
    if event == "session_void":
        return f"session {int(facts['session']) + 1} void for both arms: {told['codes']}"
    if event == "too_many_voids":
        return f"{told['void']} void sessions: this host will not become quiet by waiting"
    if event == "session_lost":
        where = f" in {told['case']}" if told.get("case") else ""
        return f"session {int(facts['session']) + 1} lost{where}: {told['variant']}: {told['message']}"
    if event in ("trial_done", "job_done"):
        return f"session {int(facts['session']) + 1}  {_outcome(told)}"
    if event.endswith(("_done", "_failed")) and event != "session_done":
        return f"{event.rsplit('_', 1)[0]}  {_outcome({'status': event.rsplit('_', 1)[1], **told})}"
    return ""


def _outcome(told: dict[str, str]) -> str:
    """`step/step/tiny/32*1@4096 page64 ok`, and what went wrong where something did."""
    parts = [told[name] for name in ("case", "job", "trace", "mode", "variant", "status") if told.get(name)]
    message = told.get("message", "")
    return " ".join(parts) + (f": {message}" if message else "")
