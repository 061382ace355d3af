"""Level 3 in a run: load and limits from the baseline, real slices, modelled replays, and how well the two agree.

Owns which replays a suite needs and in which order. A replay is a job in a worker: real ones on the device, one arm
after the other (baseline, candidate, baseline again: the second baseline is the noise floor of the outputs); modelled
ones need neither device nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbench.catalog import Case
from kbench.errors import EvidenceError
from kbench.plan import Plan, model_label
from kbench.protocol import Measurement, Outcome, Status
from kbench.record import RunFolder, Sample, Trial
from kbench.run import costs, parts
from kbench.run.session import Host, Observer, Pair, open_pair
from kbench.run.workers import WorkerLost

REPLAY_TIMEOUT_S = 3_600.0
EXEC_PATIENCE = 5.0
"""So many times its set length may a real replay take, a trial's time-out on top."""
AGAIN = "again"
"""Marks the second real replay of the baseline."""


@dataclass(slots=True)
class Replays:
    """The workload part of one run."""

    plan: Plan
    host: Host
    folder: RunFolder
    grids: dict[str, Path]
    classes: Sequence[str]
    observe: Observer
    setups: dict[str, dict[str, Any]] = field(default_factory=dict)

    def measure(self) -> None:
        # Modelled work runs on the CPU whatever the device: the workers never import torch.
        modelled = Host("cpu", self.host.command)
        try:
            with open_pair(self.plan, modelled, self.folder.path / "parts", "model", torch=False) as pair:
                self._set_up(pair)
                if self._real_wanted():
                    self._real()
                for name in self.setups:
                    self._modelled(pair, name)
        except WorkerLost as lost:
            self._lost(lost, "all")

    @property
    def _workload(self) -> Any:
        workload = self.plan.loaded.suite.workload
        if workload is None:
            raise EvidenceError("the suite has no [workload]", where=str(self.plan.loaded.path))
        return workload

    def _real_wanted(self) -> bool:
        """Real slices calibrate the model and give outputs. A grid from elsewhere speaks of another machine."""
        return bool(self.setups) and not self._workload.costs

    def _exec_clauses(self) -> bool:
        """Whether a clause judges service by real replays: those then run at the suite's own rate."""
        return any(
            clause.level == "workload"
            and (clause.mode or self._workload.mode) == "exec"
            and clause.metric != "output_divergence"
            for regime in self.plan.loaded.suite.regime
            for clause in regime.require
        )

    # ---------------------------------------------------------------------------------------- jobs

    def _set_up(self, pair: Pair) -> None:
        """Load and limits of every class, from the baseline; the workers share the classes."""
        workload, baseline = self._workload, self.plan.baseline
        common = {
            "arm": baseline.model_dump(mode="json"),
            "costs": str(self.grids[baseline.name]),
            "rate": workload.rate,
            "requests_per_s": workload.requests_per_s,
            "slo": workload.slo.model_dump(mode="json"),
            "exec_s": workload.exec_s,
        }
        waiting = list(self.classes)
        while waiting:
            turn = dict(zip(pair.workers, waiting, strict=False))
            del waiting[: len(turn)]
            asked = {variant: self._request("setup", name, **common) for variant, name in turn.items()}
            outcomes = pair.ask_together("job", asked, REPLAY_TIMEOUT_S)
            for variant, name in turn.items():
                self._trial(self._case("setup", name), baseline.name, outcomes[variant])
                if outcomes[variant].status is Status.OK:
                    self.setups[name] = outcomes[variant].facts

    def _real(self) -> None:
        """Real replays in one pair of workers. A worker that dies takes the remaining slices along, and no more."""
        first, second = self.plan.baseline.name, self.plan.candidate.name
        label = ""
        try:
            with open_pair(self.plan, self.host, self.folder.path / "parts", "exec") as pair:
                for name in self.setups:
                    for variant, run in ((first, ""), (second, ""), (first, AGAIN)):
                        label = f"{name}/{variant}"
                        self._real_slice(pair, name, variant, run)
                    if self._exec_clauses():
                        for variant in (first, second):
                            self._real_replay(pair, name, variant)
        except WorkerLost as lost:
            self._lost(lost, label.partition("/")[0])

    def _real_slice(self, pair: Pair, name: str, variant: str, run: str) -> None:
        """The slice that calibrates the model, and whose outputs are compared."""
        setup, workload = self.setups[name], self._workload
        outcome = self._ask(
            pair,
            variant,
            "exec",
            name,
            rate_scale=setup["rate_scale"],
            slo=setup["slo"],
            max_requests=setup["slice_requests"],
            # Long enough for the slice at the suite's rate, on a machine that is slower today than its model thinks.
            max_seconds=max(2 * workload.exec_s, 1.5 * setup["slice_requests"] / setup["requests_per_s"]),
            segments=workload.segments,
            paths=self._paths("slice", name, variant + run),
        )
        self._trial(self._case("slice", name, run), variant, outcome)

    def _real_replay(self, pair: Pair, name: str, variant: str) -> None:
        setup, workload = self.setups[name], self._workload
        outcome = self._ask(
            pair,
            variant,
            "exec",
            name,
            rate_scale=setup["rate_scale"],
            slo=setup["slo"],
            max_seconds=workload.exec_s,
            segments=workload.segments,
            warmup=workload.warmup,
            paths=self._paths("exec", name, variant),
        )
        self._replayed(name, variant, "exec", outcome)

    def _modelled(self, pair: Pair, name: str) -> None:
        setup, workload = self.setups[name], self._workload
        asked = {
            arm.name: self._request(
                "virtual",
                name,
                costs=str(self.grids[arm.name]),
                rate_scale=setup["rate_scale"],
                slo=setup["slo"],
                segments=workload.segments,
                warmup=workload.warmup,
                paths=self._paths("virtual", name, arm.name),
            )
            for arm in self.plan.both
        }
        for variant, outcome in pair.ask_together("job", asked, REPLAY_TIMEOUT_S).items():
            self._replayed(name, variant, "virtual", outcome)
            if self._slice_file(name, variant).is_file():
                self._calibrate(pair, name, variant)
        self._diverged(pair, name)

    def _calibrate(self, pair: Pair, name: str, variant: str) -> None:
        setup = self.setups[name]
        outcome = self._ask(
            pair,
            variant,
            "calibrate",
            name,
            costs=str(self.grids[variant]),
            exec_requests=str(self._slice_file(name, variant)),
            baseline_requests=str(self._slice_file(name, self.plan.baseline.name)),
            rate_scale=setup["rate_scale"],
            slo=setup["slo"],
            max_requests=setup["slice_requests"],
            candidate=variant == self.plan.candidate.name,
            paths=self._paths("modelled-slice", name, variant),
        )
        self._trial(self._case("calibrate", name), variant, outcome)

    def _diverged(self, pair: Pair, name: str) -> None:
        """Outputs of the candidate, and of the baseline's second replay, against the baseline's first."""
        baseline, candidate = self.plan.baseline.name, self.plan.candidate.name
        first = self._slice_file(name, baseline)
        for variant, other in ((baseline, baseline + AGAIN), (candidate, candidate)):
            second = self._slice_file(name, other)
            if first.is_file() and second.is_file():
                outcome = pair.ask(
                    variant, "job", {"name": "divergence", "a": str(first), "b": str(second)}, REPLAY_TIMEOUT_S
                )
                case = Case("workload", "replay", self._label, name, (("mode", "exec"),))
                self._trial(Case("workload", "divergence", self._label, name), variant, outcome)
                self.folder.samples(self._samples(case, variant, "exec", outcome.measurements))

    def _ask(self, pair: Pair, variant: str, job: str, name: str, **args: Any) -> Outcome:
        request = self._request(job, name, **args)
        timeout_s = REPLAY_TIMEOUT_S
        if job == "exec":
            # Its length is set: what is silent for much longer hangs in somebody's kernel.
            timeout_s = self.plan.loaded.suite.measure.trial_timeout_s + EXEC_PATIENCE * args["max_seconds"]
        return pair.ask(variant, "job", request, timeout_s)

    def _request(self, job: str, name: str, **args: Any) -> dict[str, Any]:
        trace = self.plan.loaded.root / self._workload.traces[name]
        return {"name": job, "trace": str(trace), "trace_class": name, **args}

    # ------------------------------------------------------------------------------------- records

    @property
    def _label(self) -> str:
        return model_label(self.plan.loaded.suite.model)

    def _case(self, op: str, name: str, run: str = "") -> Case:
        return Case("workload", op, self._label, name, (("run", run),) if run else ())

    def _paths(self, kind: str, name: str, variant: str) -> dict[str, str]:
        return parts.part_paths(self.folder.path, f"{kind}-{name}-{variant}")

    def _slice_file(self, name: str, variant: str) -> Path:
        return Path(self._paths("slice", name, variant)["requests"])

    def _replayed(self, name: str, variant: str, mode: str, outcome: Outcome) -> None:
        case = Case("workload", "replay", self._label, name, (("mode", mode),))
        trial = Trial(0, str(case), variant, outcome.status.value, outcome.message, outcome.facts)
        self.folder.trial(trial, self._samples(case, variant, mode, outcome.measurements))
        self.observe("replay_done", trace=name, variant=variant, mode=mode, status=outcome.status.value)

    def _trial(self, case: Case, variant: str, outcome: Outcome) -> None:
        self.folder.trial(Trial(0, str(case), variant, outcome.status.value, outcome.message, outcome.facts))
        self.observe("replay_done", trace=case.point, variant=variant, mode=case.op, status=outcome.status.value)

    def _samples(self, case: Case, variant: str, mode: str, measurements: Sequence[Measurement]) -> Iterator[Sample]:
        plain = str(Case(case.level, case.op, case.model, case.point))
        for item in measurements:
            yield Sample(
                case=plain,
                level="workload",
                variant=variant,
                metric=item.metric,
                unit=item.unit,
                value=item.value,
                scope="segment" if item.segment >= 0 else "run",
                segment=max(item.segment, 0),
                mode=mode,
                clock=item.clock,
                flags=item.flags,
            )

    def _lost(self, lost: WorkerLost, name: str) -> None:
        case = Case("workload", "replay", self._label, name, (("mode", "exec"),))
        self.folder.trial(Trial(0, str(case), lost.variant, lost.status.value, lost.message))
        self.observe("replay_lost", trace=name, variant=lost.variant, message=lost.message)


def measure(
    plan: Plan,
    host: Host,
    folder: RunFolder,
    classes: Sequence[str],
    rows: list[dict[str, Any]],
    observe: Observer,
) -> None:
    """Replay the traces of `classes`. `rows` is the cost grid of all sessions, where the suite names no file."""
    workload = plan.loaded.suite.workload
    if workload is None:
        return
    grids = {name: plan.loaded.root / file for name, file in workload.costs.items()}
    missing = [arm.name for arm in plan.both if arm.name not in grids]
    if missing:
        if not rows:
            case = Case("workload", "setup", model_label(plan.loaded.suite.model), "all")
            folder.trial(Trial(0, str(case), missing[0], Status.FAILED.value, "no cost grid was measured"))
            return
        measured = folder.part("costs.parquet")
        costs.write(rows, measured)
        grids |= dict.fromkeys(missing, measured)
    Replays(plan, host, folder, grids, classes, observe).measure()
