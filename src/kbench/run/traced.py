"""The traced pass of a run: what ran, under a profiler, after everything that is timed and in workers of their own.

Owns level 0 (the timeline of the baseline's steps) and the observation of every measured case: which kernels or
operators answered, and profiler time as a second witness. Profiling keeps a process slow after it has ended, so no
window is ever measured in these workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kbench.catalog import Case, parse_shape
from kbench.plan import Plan, model_label
from kbench.protocol import Outcome, Status
from kbench.record import RunFolder, Trial
from kbench.run.session import Host, Observer, Pair, job_timeout_s, open_pair
from kbench.run.workers import WorkerLost
from kbench.timeline import analyse

TRACE_FILE = "timeline.json.gz"


@dataclass(frozen=True, slots=True)
class TracedPass:
    """One pair of traced workers. `session` numbers its trials; it is no session that anything is estimated from."""

    plan: Plan
    host: Host
    folder: RunFolder
    session: int
    observe: Observer

    def measure(self, cases: Sequence[Case], *, timeline: bool) -> None:
        current = ""
        try:
            with open_pair(self.plan, self.host, self.folder.path / "parts", "traced") as pair:
                for case in cases:
                    current = str(case)
                    self._case(pair, case)
                if timeline and points(self.plan):
                    current = str(self._timeline_case)
                    self._timeline(pair)
        except WorkerLost as lost:
            # Every gate number is recorded already: a tracer that dies takes only its own facts along.
            where = current if current.startswith("timeline/") else f"timeline/{current.partition('/')[2]}"
            self.folder.trial(Trial(self.session, where, lost.variant, lost.status.value, lost.message))
            self.observe("trace_lost", case=current, variant=lost.variant, message=lost.message)

    @property
    def _timeline_case(self) -> Case:
        return Case("timeline", "step", model_label(self.plan.loaded.suite.model), "all")

    def _timeline(self, pair: Pair) -> None:
        path = self.folder.path / TRACE_FILE
        args = {"name": "timeline", "points": points(self.plan), "path": str(path)}
        outcome = pair.ask(self.plan.baseline.name, "job", args, job_timeout_s(self.plan, len(args["points"])))
        facts = dict(outcome.facts)
        if outcome.status is Status.OK:
            facts["analysis"] = analyse(path, expected_saving=self.plan.loaded.suite.claim.expected_saving)
        self._record(str(self._timeline_case), self.plan.baseline.name, outcome, facts)

    def _case(self, pair: Pair, case: Case) -> None:
        asked = {variant: {"case": str(case)} for variant in pair.workers}
        # On a device the trace holds kernel times, a second witness: there the other worker must be idle.
        if self.host.device == "cpu":
            outcomes = pair.ask_together("trace", asked, job_timeout_s(self.plan, 1))
        else:
            outcomes = {v: pair.ask(v, "trace", args, job_timeout_s(self.plan, 1)) for v, args in asked.items()}
        for variant, outcome in outcomes.items():
            if outcome.facts or outcome.status is not Status.OK:
                self._record(str(case), variant, outcome, outcome.facts)

    def _record(self, case: str, variant: str, outcome: Outcome, facts: dict[str, object]) -> None:
        # A case that cannot be traced was still measured: its failure stands beside it, not in its place.
        traced = case if outcome.status is Status.OK else f"timeline/{case.partition('/')[2]}"
        self.folder.trial(Trial(self.session, traced, variant, outcome.status.value, outcome.message, facts))
        self.observe("trace_done", case=case, variant=variant, status=outcome.status.value, message=outcome.message)


def points(plan: Plan) -> list[str]:
    """The step's batches without their attributes, or those among the kernel's where a suite has no step."""
    suite = plan.loaded.suite
    texts = suite.step.points if suite.step else suite.kernel.points if suite.kernel else ()
    shapes = [parse_shape(text) for text in texts]
    return list(dict.fromkeys(str(shape.point.bare) for shape in shapes if shape.is_batch and shape.point is not None))
