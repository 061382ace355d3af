"""Level 1: one attention implementation on one point, right first, then timed.

Owns the trial: selection, correctness phase, input rotation, windows, and the check of what the timed calls answered.
It is the trial boundary of the level: whatever an implementation raises becomes a status and one line. It does not know
the other arm, nor what is concluded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kbench import catalog
from kbench.catalog import Case
from kbench.clock.cache import CacheState, last_level_bytes, plan_rotation
from kbench.clock.device import DeviceClock, peak_bytes_per_us
from kbench.clock.profiler import profile_kernels
from kbench.clock.timer import Timer, prepared_timer
from kbench.engine.arms import arm_shape, attention_query, open_device
from kbench.engine.kv import torch_dtype
from kbench.errors import KbenchError, MeasurementError, UsageError
from kbench.kernels.base import Attention
from kbench.kernels.registry import is_plugin, load
from kbench.kernels.verify import Verification, verify
from kbench.ops.attention import AttentionSpec, Cost, PagedKV, cost
from kbench.ops.correctness import checksum, judge, standard
from kbench.ops.inputs import Inputs, InputSettings, build_sets
from kbench.protocol import Measurement, Outcome, Status
from kbench.selection import check
from kbench.suite.schema import Arm, Measure

WATCHED_SETS = 2
"""Input sets whose timed outputs are compared in the end; chosen by the seed, unknown to the implementation."""
WITNESSED_WINDOWS = 5


@dataclass(slots=True)
class TimedCall:
    """One input set under the timer. `latest` is what the last call answered; a graph replay fills it anew."""

    implementation: Attention
    inputs: Inputs
    kv: PagedKV
    plan: object
    out: Tensor
    latest: object = None
    called: bool = False

    def __call__(self) -> object:
        self.latest = self.implementation.run(self.inputs.q, self.kv, self.plan, self.out)
        self.called = True
        return self.latest

    def poison(self, value: float) -> None:
        self.called = False
        self.out.fill_(value)
        if isinstance(self.latest, Tensor):
            self.latest.fill_(value)


@dataclass(slots=True)
class Timed:
    """What `prepare` leaves for the windows."""

    timer: Timer
    calls: list[TimedCall]
    cost: Cost
    cache: CacheState
    before: tuple[int, ...]
    random: random.Random
    watched: set[int]
    outputs: dict[int, object] = field(default_factory=dict)
    latencies_us: list[float] = field(default_factory=list)
    clocks: list[dict[str, Any]] = field(default_factory=list)


class KernelTrial:
    """One case on one arm. Both arms of a suite see the same logical queries, keys and values: same seed, same case."""

    def __init__(self, case: Case, arm: Arm, device: str, settings: Measure, seed: int, *, timer: str = "auto") -> None:
        self._case = case
        self._arm = arm
        self._device_name = device
        self._settings = settings
        self._seed = seed
        self._timer_name = timer
        self._timed: Timed | None = None
        self._clock: DeviceClock | None = None
        self._selection: dict[str, str] = {}
        self._thorough = True

    def prepare(self, *, thorough: bool = True) -> Outcome:
        """Select, verify, build the rotation and ready the timer. Everything but `ok` says why in one line."""
        self._thorough = thorough
        return _boundary(self._prepare)

    def window(self) -> tuple[Measurement, ...]:
        """The median latency over at least `window_steps` calls and `window_ms`, outputs poisoned before."""
        with torch.inference_mode():
            return self._window(self._ready())

    def _window(self, timed: Timed) -> tuple[Measurement, ...]:
        poison = timed.random.choice((float("nan"), -3.5))
        for call in timed.calls:
            call.poison(poison)
        readings = timed.timer.window(self._settings.window_steps, self._settings.window_ms)
        latency_us = median(readings)
        timed.latencies_us.append(latency_us)
        self._keep_output(timed)
        flags = (*timed.timer.flags, *self._window_flags(timed, latency_us))
        return (Measurement("latency", "us", latency_us, timed.timer.name, flags),)

    def finish(self) -> Outcome:
        """Compare what timed calls answered with the oracle, look for changed inputs, ask the second witness."""
        return _boundary(self._finish)

    # ----------------------------------------------------------------------------------------- prepare

    def _prepare(self) -> Outcome:
        device = open_device(self._device_name)
        phase = self._case.op.removeprefix("attention.")
        reference = self._arm.decode if phase == "decode" else self._arm.prefill
        shape = arm_shape(self._arm)
        self._selection = {"requested": reference, "resolved": reference, "observed": ""}
        facts: dict[str, Any] = {"selection": self._selection}
        if not is_plugin(reference):
            query = attention_query(self._arm, shape, phase, device.type)
            reasons = check(catalog.implementation(reference, self._case.op), query)
            if reasons:
                text = "; ".join(str(reason) for reason in reasons)
                return Outcome(Status.UNSUPPORTED, f"{reference} cannot serve {self._case.op}: {text}", facts=facts)
        implementation = load(reference, self._case.op, Path(self._arm.root))
        spec = AttentionSpec(shape.q_heads, shape.kv_heads, shape.head_dim)
        dtype = torch_dtype(self._arm.model.dtype)
        settings = InputSettings(self._arm.page_size, self._arm.layout, dtype, device, self._seed)
        with torch.inference_mode():
            verified = verify(implementation, self._case.op, self._case.parsed, spec, settings, thorough=self._thorough)
            facts["correctness"] = verified.facts
            if verified.status is not Status.OK:
                return Outcome(verified.status, verified.message, _scopes(verified), facts)
            self._clock = DeviceClock(device)
            self._timed = self._rotate(implementation, spec, settings)
        return Outcome(measurements=_scopes(verified), facts=facts | self._describe(self._timed, verified))

    def _rotate(self, implementation: Attention, spec: AttentionSpec, settings: InputSettings) -> Timed:
        point, device = self._case.parsed, settings.device
        itemsize = settings.dtype.itemsize
        kv_bytes = 2 * point.kv_tokens * spec.kv_heads * spec.head_dim * itemsize
        cache = plan_rotation(kv_bytes, last_level_bytes(device), device.type)
        sets = build_sets(point, spec, settings, cache.sets)
        kv = implementation.convert(sets[0].kv)
        calls = [
            TimedCall(
                implementation, inputs, kv, implementation.plan(inputs.batch, spec, kv), torch.empty_like(inputs.q)
            )
            for inputs in sets
        ]
        chance = random.Random(self._seed)
        return Timed(
            timer=prepared_timer(calls, device, self._timer_name),
            calls=calls,
            cost=cost(sets[0].batch, spec, itemsize),
            cache=cache,
            before=checksum((sets[0].kv.k, sets[0].kv.v)),
            random=chance,
            watched=set(chance.sample(range(len(calls)), min(WATCHED_SETS, len(calls)))),
        )

    def _describe(self, timed: Timed, verified: Verification) -> dict[str, Any]:
        return {
            "timer": timed.timer.name,
            "cache": timed.cache.label,
            "cache_state": asdict(timed.cache),
            "calls_per_round": timed.timer.round_calls,
            "first_call_us": verified.scopes_us["first_call"],
            "cost": {"flops": timed.cost.flops, "bytes": timed.cost.bytes},
        }

    # ----------------------------------------------------------------------------------------- windows

    def _ready(self) -> Timed:
        if self._timed is None:
            raise MeasurementError(f"{self._case}: not prepared", remedy="prepare must end with ok")
        return self._timed

    def _keep_output(self, timed: Timed) -> None:
        """Copy the answer of one call that this window made. A graph replays all of them and calls none in Python."""
        made = [index for index, call in enumerate(timed.calls) if call.called] or list(range(len(timed.calls)))
        watched = [index for index in made if index in timed.watched]
        if not watched and timed.outputs:
            return
        index = timed.random.choice(watched or made)
        latest = timed.calls[index].latest
        timed.outputs[index] = latest.clone() if isinstance(latest, Tensor) else latest

    def _window_flags(self, timed: Timed, latency_us: float) -> tuple[str, ...]:
        flags: list[str] = []
        device = timed.calls[0].out.device
        if device.type == "cuda" and self._clock is not None:
            state = self._clock.read()
            timed.clocks.append(state)
            flags.extend(state.get("flags", ()))
            peak = peak_bytes_per_us(device)
            if timed.cache.label == "cold":
                if peak is not None and timed.cost.bytes / latency_us > peak:
                    flags.append("IMPOSSIBLE")
            else:
                flags.append("WARM_CACHE")
        return tuple(flags)

    # ------------------------------------------------------------------------------------------ finish

    def _finish(self) -> Outcome:
        timed = self._ready()
        facts: dict[str, Any] = {"selection": self._selection, "timed_outputs_checked": len(timed.outputs)}
        with torch.inference_mode():
            for index, output in sorted(timed.outputs.items()):
                judgement = judge(output, standard(timed.calls[index].inputs))
                if not judgement.ok:
                    return Outcome(Status.INCORRECT, f"output of a timed call: {judgement.problem}", facts=facts)
            first = timed.calls[0].inputs.kv
            if checksum((first.k, first.v)) != timed.before:
                return Outcome(Status.INCORRECT, "timed calls changed the KV cache", facts=facts)
        if timed.latencies_us:
            facts |= {f"{timed.timer.name}_us": median(timed.latencies_us), "device": _summary(timed.clocks)}
        self._timed = None
        return Outcome(facts=facts)

    # ------------------------------------------------------------------------------------------- trace

    def trace(self) -> Outcome:
        """The second witness, on CUDA: the kernels that ran, and their profiler time beside the timer's."""
        return _boundary(self._trace)

    def _trace(self) -> Outcome:
        if self._device_name != "cuda":
            return Outcome()
        outcome = self._prepare()
        if outcome.status is not Status.OK:
            return outcome
        timed = self._ready()
        with torch.inference_mode():
            for _ in range(WITNESSED_WINDOWS):
                self._window(timed)
            facts = self._witness(timed)
        self._timed = None
        return Outcome(facts={"selection": self._selection, **facts})

    def _witness(self, timed: Timed) -> dict[str, Any]:
        """Profiler time of the very calls that were timed, in the same rotation; and the kernels that ran.

        `profiler_us` leaves out the gaps between kernels and is to be compared with the undisturbed timer;
        `profiler_span_us` holds them, which profiling widens: its partner is the timer's reading of the same replay.
        """
        facts: dict[str, Any] = {f"{timed.timer.name}_us": median(timed.latencies_us)}
        profile = profile_kernels(timed.timer.witnessed, timed.timer.round_calls, timed.calls[0].out.device)
        if profile is None:
            return facts
        resolved = self._selection["resolved"]
        expected = "" if is_plugin(resolved) else catalog.implementation(resolved, self._case.op).expects_kernel
        if expected:
            seen = any(expected in name for name in profile.names)
            self._selection["observed"] = resolved if seen else profile.names[0]
        return facts | {
            "profiler_us": profile.busy_us,
            "profiler_sum_us": profile.sum_us,
            "profiler_span_us": profile.span_us,
            f"{timed.timer.name}_profiled_us": profile.timer_us,
            "kernels": list(profile.names[:8]),
        }


def _scopes(verified: Verification) -> tuple[Measurement, ...]:
    return tuple(Measurement(scope, "us", value, "wall") for scope, value in verified.scopes_us.items())


def _summary(clocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Lowest and highest of each sensor over the windows, and every throttle reason that was seen."""
    summary: dict[str, Any] = {}
    for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c"):
        values = [state[name] for state in clocks if name in state]
        if values:
            summary[name] = [min(values), max(values)]
    summary["throttle"] = sorted({reason for state in clocks for reason in state.get("throttle", ())})
    return summary


def _boundary(step: Callable[[], Outcome]) -> Outcome:
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - the trial boundary: an implementation may raise anything
        return Outcome(_status(error), _line(error), facts={"usage": True} if isinstance(error, KbenchError) else {})


def _status(error: Exception) -> Status:
    """torch raises the CPU allocator's refusal as a plain RuntimeError: only its text tells."""
    starved = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    if starved or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Status.OUT_OF_MEMORY
    return Status.UNSUPPORTED if isinstance(error, NotImplementedError | UsageError) else Status.FAILED


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, KbenchError) else f"{type(error).__name__}: {text}"
