"""Level 1: one implementation of an operation on one case, right first, then timed.

Owns the trial: selection, correctness phase, input rotation, windows. What timed calls answered is held against the
oracle in `measure.answers` and `measure.checks`. It is the trial boundary of the level: whatever an implementation
raises becomes a status and one line. It does not know the other arm, nor what is concluded.
"""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch

from kbench import catalog
from kbench.catalog import Case, Resolved
from kbench.clock.cache import last_level_bytes, plan_state
from kbench.clock.ceilings import ceilings
from kbench.clock.device import DeviceClock
from kbench.clock.integrity import unpatched
from kbench.clock.stopping import unstable
from kbench.clock.surroundings import Surroundings
from kbench.clock.timer import prepared_timer
from kbench.engine.arms import Selected, arm_shape, capability_of, open_device, selected
from kbench.engine.kv import torch_dtype
from kbench.env.places import cache_folder
from kbench.errors import MeasurementError
from kbench.kernels.declare import declared
from kbench.kernels.defences import ALL, Defences
from kbench.kernels.guarding import Rest
from kbench.kernels.identity import Identity
from kbench.kernels.resources import resources
from kbench.kernels.verify import Verification, verify, without_nan
from kbench.measure.answers import TimedCall, Watch
from kbench.measure.boundary import guarded
from kbench.measure.checks import memoised, replay_problem, still_running
from kbench.measure.promises import promises
from kbench.measure.refused import refused
from kbench.measure.timed import Timed, summary
from kbench.measure.tuning import configured
from kbench.measure.witness import cuda_facts, host_operators, observed
from kbench.ops.base import InputSettings, Op, checksum
from kbench.ops.registry import load_op
from kbench.ops.strict import stricter
from kbench.protocol import Measurement, Outcome, Status
from kbench.selection import Candidate, SelectionRecord, SelectionRefused, check
from kbench.suite.choices import operation_query
from kbench.suite.schema import Arm, Measure

WITNESSED_WINDOWS = 5


class KernelTrial:
    """One case on one arm. Both arms of a suite see the same logical inputs: same seed, same case."""

    def __init__(
        self,
        case: Case,
        arm: Arm,
        device: str,
        settings: Measure,
        seed: int,
        *,
        timer: str = "",
        implementation: Any = None,
        defences: Defences = ALL,
    ) -> None:
        """`implementation`: an instance instead of what the arm names. `defences`: for `kbench selftest` alone."""
        self._case = case
        self._arm = arm
        self._device_name = device
        self._settings = settings
        self._seed = seed
        self._timer_name = timer or settings.timer
        self._given = implementation
        self._defences = defences
        self._surroundings: Surroundings | None = None
        self._timed: Timed | None = None
        self._clock: DeviceClock | None = None
        self._chosen: Selected | None = None
        self._thorough = True

    def prepare(self, *, thorough: bool = True) -> Outcome:
        """Select, verify, build the rotation and ready the timer. Everything but `ok` says why in one line."""
        self._thorough = thorough
        return guarded(self._prepare)

    def window(self) -> tuple[Measurement, ...]:
        """The median latency over at least `window_steps` calls and `window_ms`, on fresh activations, outputs
        poisoned before."""
        with torch.inference_mode():
            return self._window(self._ready())

    def _window(self, timed: Timed) -> tuple[Measurement, ...]:
        timed.watch.before_window()
        readings = timed.timer.window(self._settings.window_steps, self._settings.window_ms)
        latency_us = median(readings)
        timed.latencies_us.append(latency_us)
        timed.watch.after_window()
        drifted = ("UNSTABLE",) if self._defences.stability and unstable(readings) else ()
        flags = (*timed.timer.flags, *drifted, *self._window_flags(timed, latency_us))
        return (Measurement("latency", "us", latency_us, timed.timer.name, flags),)

    def finish(self) -> Outcome:
        """Compare what timed calls answered with the oracle, look for changed inputs, kept answers, replayed gaps."""
        return guarded(self._finish)

    # ----------------------------------------------------------------------------------------- prepare

    def _prepare(self) -> Outcome:
        device = open_device(self._device_name)
        self._surroundings = Surroundings.of(device)
        op_name, shape = self._case.op, self._shape()
        facts: dict[str, Any] = {"axes": dict(shape.axes)}
        try:
            self._chosen = self._chosen or self._select(shape)
        except SelectionRefused as error:
            return refused(error, **facts)
        implementation = self._chosen.implementation
        if self._given is None:
            implementation, tuned = configured(implementation, self._case, self._arm, self._device_name, self._settings)
            facts |= {"tuning": tuned} if tuned else {}
            self._chosen = self._chosen.using(implementation)
        facts["selection"] = self._selection()
        op = stricter(load_op(op_name), self._arm.tolerated("kernel"))
        dtype = torch_dtype(self._arm.model.dtype)
        settings = InputSettings(self._arm.page_size, self._arm.layout, dtype, device, self._seed)
        with torch.inference_mode():
            verified = verify(implementation, op, shape, settings, thorough=self._thorough, defences=self._defences)
            facts["correctness"] = verified.facts
            _give_back(device)
            if verified.status is not Status.OK:
                return Outcome(verified.status, verified.message, _scopes(verified), facts)
            self._clock = DeviceClock(device)
            self._timed = self._rotate(implementation, op, shape, settings)
        return Outcome(measurements=_scopes(verified), facts=facts | self._describe(self._timed, verified))

    def _shape(self) -> Resolved:
        return catalog.resolve_shape(self._case.op, self._case.shape, arm_shape(self._arm))

    def _select(self, shape: Resolved) -> Selected:
        """Who computes the case; an instance that was given is held to what it declares, and to nothing else."""
        query = operation_query(self._arm, shape, self._device_name, capability_of(self._device_name))
        if self._given is None:
            return selected(self._arm, query)
        name, own = str(self._arm.implementation_of(query.op)), declared(self._given)
        reasons = tuple(check(own, query)) if own is not None else ()
        if reasons:
            text = f"{name} cannot serve {query.op}: " + "; ".join(map(str, reasons))
            raise SelectionRefused(name, query.op, (Candidate(name, reasons),), text, "")
        return Selected(SelectionRecord(query.op, name, name), self._given, own, Identity.of(self._given))

    def _selection(self, observed: str = "") -> dict[str, Any]:
        return {} if self._chosen is None else replace(self._chosen.checked(), observed=observed).to_json()

    def _rotate(self, implementation: Any, op: Op[Any, Any], shape: Resolved, settings: InputSettings) -> Timed:
        device = settings.device
        one = op.build(shape, settings)[0]
        cost, streamed = op.cost(one), op.streamed_bytes(one)
        del one
        cache = plan_state(
            streamed, max(0, cost.bytes - streamed), last_level_bytes(device), device.type, self._settings.cache
        )
        sets = op.build(shape, settings, sets=max(2, cache.sets))
        for inputs in () if self._defences.unused_nan else sets:
            without_nan(op, inputs)
        if cache.activation_sets == 1:
            sets = [op.sharing(inputs, sets[0]) for inputs in sets]
        # Before the timer: what its own warm-up changes is changed too, and must not become what is compared with.
        before = checksum(op.unchanging(sets[0]))
        rest = Rest(device)  # before the first timed call: threads that come from now on are waited for
        calls = [TimedCall.of(op, implementation, inputs) for inputs in sets[: max(1, cache.sets)]]
        return Timed(
            timer=prepared_timer(calls, device, self._timer_name, cache.flush_bytes),
            calls=calls,
            cost=cost,
            streamed=streamed,
            cache=cache,
            before=before,
            watch=Watch(op, calls, random.Random(self._seed), rest, self._defences),
        )

    def _describe(self, timed: Timed, verified: Verification) -> dict[str, Any]:
        return {
            "timer": timed.timer.name,
            "cache": timed.cache.label,
            "cache_state": asdict(timed.cache),
            "calls_per_round": timed.timer.round_calls,
            "first_call_us": verified.scopes_us["first_call"],
            "cost": {**asdict(timed.cost), "bytes": timed.cost.bytes},
        }

    # ----------------------------------------------------------------------------------------- windows

    def _ready(self) -> Timed:
        if self._timed is None:
            raise MeasurementError(f"{self._case}: not prepared", remedy="prepare must end with ok")
        return self._timed

    def _window_flags(self, timed: Timed, latency_us: float) -> tuple[str, ...]:
        flags: list[str] = []
        if self._device_name == "cuda" and self._clock is not None:
            state = self._clock.read()
            timed.clocks.append(state)
            flags.extend(state.get("flags", ()))
            if timed.impossible(latency_us, self._arm.model.dtype):
                flags.append("IMPOSSIBLE")
            if timed.cache.label == "warm":
                flags.append("WARM_CACHE")
        return tuple(flags)

    # ------------------------------------------------------------------------------------------ finish

    def _finish(self) -> Outcome:
        timed = self._ready()
        watch = timed.watch
        facts: dict[str, Any] = {"selection": self._selection(), "timed_outputs_checked": len(watch.kept)}
        tampered = self._tampered(watch.device)
        if tampered:
            return Outcome(Status.FAILED, tampered, facts=facts)
        with torch.inference_mode():
            problem = self._problem(timed)
            if problem:
                return Outcome(Status.INCORRECT, problem, facts=facts)
        if timed.latencies_us:
            facts |= {f"{timed.timer.name}_us": median(timed.latencies_us), "device": summary(timed.clocks)}
        device = watch.device
        del timed, watch
        self._timed = None
        _give_back(device)
        return Outcome(facts=facts)

    def _tampered(self, device: torch.device) -> str:
        """Whether code under test replaced what time is read with, or changed the process for all that run in it."""
        replaced = unpatched() if self._defences.clock else []
        if replaced:
            return f"code under test replaced {', '.join(replaced)}"
        before = self._surroundings if self._defences.surroundings else None
        changed = before.changed(device) if before is not None else []
        return f"code under test changed the process: {', '.join(changed)}" if changed else ""

    def _problem(self, timed: Timed) -> str:
        """The first thing that is wrong with the calls that were timed, or an empty string."""
        watch, on = timed.watch, self._defences
        problem = watch.problem() if on.timed_answers else ""
        unchanged = checksum(watch.op.unchanging(timed.calls[0].inputs)) == timed.before
        if not problem and on.unchanged_inputs and not unchanged:
            problem = "timed calls changed what they may only read"
        problem = problem or watch.memory_problem()
        if not problem and on.timed_answers and on.every_set:
            problem = replay_problem(watch, timed.timer)
        if not problem and on.fresh_and_again and on.fresh_activations:
            problem = memoised(watch, timed.timer)
        return problem or (still_running(watch) if on.at_rest else "")

    # ------------------------------------------------------------------------------------------- trace

    def trace(self) -> Outcome:
        """The second witness: what ran, and on CUDA its profiler time beside the timer's."""
        return guarded(self._trace)

    def _trace(self) -> Outcome:
        reached = ceilings(open_device(self._device_name), cache_folder() / "ceilings")
        facts: dict[str, Any] = {"ceilings": reached.model_dump(mode="json")}
        self._thorough = False  # the sessions have looked at what is right
        if self._device_name != "cuda" and self._given is None:
            try:
                self._chosen = self._select(self._shape())
            except SelectionRefused as error:
                return refused(error)
            if self._chosen.facts is not None and not promises(self._chosen.facts, self._device_name):
                return Outcome(facts={**facts, "selection": self._selection()})
        outcome = self._prepare()
        if outcome.status is not Status.OK:
            return outcome
        timed = self._ready()
        with torch.inference_mode():
            for _ in range(WITNESSED_WINDOWS):
                self._window(timed)
            facts |= self._witness(timed)
            if self._device_name == "cuda":
                facts["resources"] = resources(timed.calls[0])
        self._timed = None
        return Outcome(facts=facts)

    def _witness(self, timed: Timed) -> dict[str, Any]:
        facts: dict[str, Any] = {f"{timed.timer.name}_us": median(timed.latencies_us)}
        chosen = self._chosen
        promised = chosen is not None and self._defences.expected_kernel and promises(chosen.facts, self._device_name)
        if self._device_name == "cuda":
            own, names = cuda_facts(timed.timer)
            facts, promised = facts | own, promised and bool(own)
        else:
            names = host_operators(timed.timer) if promised else ()
        ran = ""
        if promised and chosen is not None and chosen.facts is not None:
            ran = observed(chosen.facts, chosen.record.resolved, names, self._device_name)
        return {**facts, "selection": self._selection(ran)}


def _give_back(device: torch.device) -> None:
    """Return unused memory: what pages beyond 2^31 elements took here is missing in the worker of the other arm."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _scopes(verified: Verification) -> tuple[Measurement, ...]:
    return tuple(Measurement(scope, "us", value, "wall") for scope, value in verified.scopes_us.items())
