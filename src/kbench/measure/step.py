"""Level 2: a whole engine step on one point, measured clean, then phase by phase.

Owns `StepTrial`. The clean pass (`window`) takes wall time of schedule → … → bookkeeping with nothing stamped inside,
the device idle at both ends; it is the only gate number. The phased pass (`finish`) stamps every phase by itself and
says how much of the wall the phases explain. Each repetition starts from the same state; restoring it is not timed. A
point gets a KV pool of its own size with scattered pages, partial last pages and NaN wherever nothing was written.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from kbench.catalog import Case
from kbench.catalog.lengths import tailed
from kbench.engine.ladder import StepRecord
from kbench.engine.phases import INSIDE_FORWARD, PHASES, DevicePhaseClock, NullClock, PhaseClock, Phases
from kbench.engine.routing_control import control_routing
from kbench.engine.runner import Runner
from kbench.errors import MeasurementError
from kbench.measure.boundary import failure, guarded, one_line
from kbench.measure.clean_step import clean_step
from kbench.measure.exec_batch import BatchState, KeptWeights, open_runner
from kbench.measure.exec_correct import DRAWS, Judge, Judgement
from kbench.measure.exec_observe import observe, observed_name
from kbench.measure.refused import refused
from kbench.measure.step_modes import other_ways
from kbench.protocol import Measurement, Outcome, Status
from kbench.selection import SelectionRefused
from kbench.suite.schema import Arm, Measure
from kbench.suite.step_points import attributed

_WARMUP_STEPS = 3
_PHASED_STEPS = (4, 40)
_PHASED_NS = 300_000_000
_STEPS_BEFORE_LOOKING_AGAIN = 24
"""In the traced pass: as many as a session of a suite's defaults times at least, a third of them warm."""


class StepTrial:
    """One case of level 2 on one arm. Nothing is allocated before `prepare`."""

    def __init__(
        self, case: Case, arm: Arm, device: str, settings: Measure, seed: int, kept: KeptWeights | None = None
    ) -> None:
        self._case = case
        self._attributes = case.step_attributes
        self._arm = attributed(arm, self._attributes)
        self._point = tailed(case.parsed, self._attributes.tail, self._arm.page_size)
        self._device = device
        self._settings = settings
        self._seed = seed
        self._kept = kept
        self._null = NullClock()
        self._failure: Outcome | None = None
        self._thorough = True
        self._runner: Runner
        self._state: BatchState
        self._judge: Judge

    # ----------------------------------------------------------------------------------------- prepare

    def prepare(self, *, thorough: bool = True) -> Outcome:
        """Build the case, check its logits against the reference attention, warm up.

        This check is the same in every session. If `thorough`, `finish` makes another, on a cache with new contents.
        """
        self._thorough = thorough
        return self._ended(guarded(self._prepare))

    def _prepare(self) -> Outcome:
        try:
            runner, state = self._open()
        except SelectionRefused as error:
            return refused(error)
        state.check_plan()
        state.restore()
        # The draws are the same in every session; the first one takes all of them.
        draws = DRAWS if self._thorough else DRAWS // 2
        self._judge = Judge(runner, lambda: self._repeat(self._null), draws, declared=self._declared())
        runner.poison_outputs = True
        first_ns = self._timed_step()
        launched, logits = runner.last_step, runner.last_logits.clone()
        judgement = self._judge.judge(logits)
        facts: dict[str, Any] = {
            "point": str(self._point),
            "attributes": dict(self._attributes.pairs()),
            "model": runner.shape.name,
            "layers": runner.shape.layers,
            "dtype": self._arm.model.dtype,
            "page_size": self._arm.page_size,
            "layout": self._arm.layout,
            "kv_pool_bytes": runner.pool.bytes,
            "selection": self._selection({}),
            "correctness": {"rule": "relative L2, worst row, see measure.exec_correct", **asdict(judgement)},
        }
        if not judgement.correct:
            return Outcome(Status.INCORRECT, judgement.problem + self._only_replayed(launched), facts=facts)
        if not judgement.discriminates:
            message = f"a step without attention differs by {judgement.null_error:.2e}, bound {judgement.bound:.2e}"
            return Outcome(Status.NON_DISCRIMINATING, message, facts=facts)
        runner.poison_outputs = False
        for _ in range(_WARMUP_STEPS):
            self._repeat(self._null)
        if self._attributes.graph == "on" and runner.last_step.mode != "graph":
            why = runner.last_step.reason or "captured graphs need a CUDA device"
            return Outcome(Status.UNSUPPORTED, f"graph=on, and the step is not replayed: {why}", facts=facts)
        facts |= {
            "graph": runner.last_step.mode,
            "graph_reason": runner.last_step.reason,
            "padded_tokens": runner.last_step.padded_tokens,
        }
        return Outcome(measurements=(Measurement("first_step", "us", first_ns / 1e3),), facts=facts)

    def _only_replayed(self, launched: StepRecord) -> str:
        """What to look for where a step is wrong as it was replayed, and right as it is launched."""
        if launched.mode == "eager":
            return ""
        self._runner.force(eager="compared with its replay")
        self._timed_step()
        self._runner.force()
        right = self._judge.judge(self._runner.last_logits).correct
        return (
            "; launched kernel by kernel it is right: are lengths read on the host? (docs/graphs.md)" if right else ""
        )

    def _open(self) -> tuple[Runner, BatchState]:
        """The case's own runner and batch, its K and V filled."""
        self._runner = runner = open_runner(self._arm, self._device, [self._point], self._kept)
        control_routing(runner, self._attributes.moe, seed=self._seed, root=Path(self._arm.root))
        self._state = state = BatchState(runner, self._point, self._seed, attributes=self._attributes)
        state.fill(self._seed)
        return runner, state

    def _selection(self, observed: dict[str, str]) -> dict[str, dict[str, Any]]:
        return {
            phase: replace(record, observed=observed.get(phase, "")).to_json()
            for phase, record in self._runner.selection.items()
        }

    # ------------------------------------------------------------------------------------------ window

    def window(self) -> tuple[Measurement, ...]:
        """Clean steps: at least `window_steps`, and until `window_ms` have passed. Failures raise MeasurementError."""
        if self._failure is not None:
            raise MeasurementError(f"the trial ended as {self._failure.status}: {self._failure.message}")
        try:
            return self._window()
        except Exception as error:
            self._failure = failure(error)
            raise MeasurementError(f"{self._case}: {one_line(error)}") from error

    def _window(self) -> tuple[Measurement, ...]:
        walls: list[int] = []
        devices: list[float] = []
        deadline = perf_counter_ns() + round(self._settings.window_ms * 1e6)
        while len(walls) < self._settings.window_steps or perf_counter_ns() < deadline:
            walls.append(self._timed_step(devices))
        taken = [
            Measurement("step_time", "us", median(walls) / 1e3),
            Measurement("step_time_p99", "us", _quantile(walls, 0.99) / 1e3),
            Measurement("step_time_max", "us", max(walls) / 1e3),
        ]
        if devices:
            taken.append(Measurement("device_time", "us", median(devices) * 1e3, clock="event"))
        return tuple(taken)

    def _repeat(self, phases: Phases) -> None:
        """The step from its starting state, untimed."""
        self._state.restore()
        self._state.step(phases)
        self._runner.idle()

    def _timed_step(self, devices: list[float] | None = None) -> int:
        """Wall time of one clean step in ns; appends its device time in ms on CUDA."""
        wall, on_device = clean_step(self._runner, self._state)
        if devices is not None and on_device:
            devices.append(on_device / 1e6)
        return wall

    # ------------------------------------------------------------------------------------------ finish

    def finish(self) -> Outcome:
        """The phased pass, what ran, and a last check of the logits of a step as it was timed."""
        if self._failure is not None:
            return self._failure
        return self._ended(guarded(self._finish))

    def _finish(self) -> Outcome:
        self._timed_step()
        judgement = self._judge.judge(self._runner.last_logits)
        host, walls, clean = self._phased(PhaseClock())
        closures = [sum(stamps.values()) / wall for stamps, wall in zip(host, walls, strict=True)]
        replayed = self._runner.last_step.mode != "eager"
        names = [name for name in PHASES if not (replayed and name in INSIDE_FORWARD)]
        phases = {name: median([stamps.get(name, 0) for stamps in host]) / 1e3 for name in names}
        taken = [Measurement(f"phase.{name}", "us", value) for name, value in phases.items()]
        taken += [
            Measurement("phased_wall", "us", median(walls) / 1e3),
            Measurement("closure", "ratio", median(closures)),
            Measurement("perturbation", "ratio", median(walls) / median(clean) - 1),
            Measurement("metadata_time", "us", phases["metadata"] + phases["h2d"]),
        ]
        conversion = phases.get("convert", 0.0)
        if self._device == "cuda":
            device = self._phased(DevicePhaseClock())[0]
            spans = {name: median([stamps.get(name, 0) for stamps in device]) / 1e3 for name in names}
            taken += [Measurement(f"phase_device.{name}", "us", us, clock="event") for name, us in spans.items()]
            conversion = max(conversion, spans.get("convert", 0.0))
        if not (replayed and self._runner.converts):  # inside a replay a conversion has no time of its own
            taken.append(Measurement("conversion_time", "us", conversion))
        if self._thorough:
            taken += other_ways(self._runner, self._state, self._timed_step)
        facts = {
            "phased_steps": len(walls),
            "selection": self._selection({}),
            "final_correctness": asdict(judgement),
        }
        if not judgement.correct:
            return Outcome(Status.INCORRECT, f"after timed steps: {judgement.problem}", tuple(taken), facts)
        if self._thorough:
            fresh = self._judge_anew()
            facts["fresh_correctness"] = asdict(fresh)
            if not fresh.correct:
                text = f"with new K and V, as if an earlier answer were kept: {fresh.problem}"
                return Outcome(Status.INCORRECT, text, tuple(taken), facts)
        return Outcome(measurements=tuple(taken), facts=facts)

    def _declared(self) -> dict[str, float]:
        """Bounds of the rule's own in the model's dtype."""
        dtype = self._arm.model.dtype
        limits = {"attention": self._arm.tolerated("attention"), "logits": self._arm.tolerated("logits")}
        return {check: own[dtype] for check, own in limits.items() if dtype in own}

    def _judge_anew(self) -> Judgement:
        """The step on the same batch over another cache. Every timed step had the same one, and the same answer."""
        self._state.fill(self._seed + 1)
        judge = Judge(self._runner, lambda: self._repeat(self._null), declared=self._declared())
        self._timed_step()
        return judge.judge(self._runner.last_logits)

    # ------------------------------------------------------------------------------------------- trace

    def trace(self) -> Outcome:
        """What one step launches, and which implementations that shows to have run. Nothing is timed."""
        return guarded(self._trace)

    def _trace(self) -> Outcome:
        try:
            runner, state = self._open()
        except SelectionRefused as error:
            return refused(error)
        state.restore()
        state.step(self._null)
        launched = runner.last_step
        seen = observe(runner, state.restore, state.step)
        for _ in range(_STEPS_BEFORE_LOOKING_AGAIN):
            self._repeat(self._null)
        later = observe(runner, state.restore, state.step)
        observed = {
            phase: observed_name(chosen.resolved, f"attention.{phase}", runner.facts(phase), seen, later)
            for phase, chosen in runner.selection.items()
        }
        facts = {
            "graph": launched.mode,
            "graph_reason": launched.reason,
            "selection": self._selection(observed),
            "fingerprint": {f"attention.{phase}": seen.names(f"attention.{phase}") for phase in observed},
            "kernels": [name for name, _ in seen.kernels.most_common(16)],
            "launches": seen.launches,
            "launches_by_part": {part: sum(names.values()) for part, names in seen.launched.items()},
        }
        return Outcome(facts=facts)

    def _phased(self, clock: PhaseClock | DevicePhaseClock) -> tuple[list[dict[str, int]], list[int], list[int]]:
        """Stamps and wall of phased steps, each beside a clean one, so that drift cannot pass for perturbation."""
        stamps: list[dict[str, int]] = []
        walls: list[int] = []
        clean: list[int] = []
        fewest, most = _PHASED_STEPS
        deadline = perf_counter_ns() + _PHASED_NS
        while len(walls) < fewest or (len(walls) < most and perf_counter_ns() < deadline):
            clean.append(self._timed_step())
            self._state.restore()
            self._runner.idle()
            begin = perf_counter_ns()
            self._state.step(clock)
            walls.append(perf_counter_ns() - begin)
            stamps.append(clock.take())
        return stamps, walls, clean

    def _ended(self, outcome: Outcome) -> Outcome:
        if outcome.status is not Status.OK:
            self._failure = outcome
        return outcome


def _quantile(values: list[int], share: float) -> float:
    """Linear between order statistics, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
