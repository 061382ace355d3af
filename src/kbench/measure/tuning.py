"""Trials of configurations: each is right on the sharpest inputs before it is timed, all on the same inputs.

Owns what joins `kernels.tuner` to a device: the key of a case, the timing of a configuration, the job behind
`kbench tune`. Which configuration a policy takes is the tuner's business.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from kbench import catalog
from kbench.catalog import Case, Resolved
from kbench.clock.cache import last_level_bytes, plan_state
from kbench.clock.timer import prepared_timer
from kbench.engine.arms import arm_shape, open_device
from kbench.engine.kv import torch_dtype
from kbench.errors import UsageError
from kbench.kernels.registry import load
from kbench.kernels.tuner import Key, Tuner, TuningCache, bucket_of, implementation_hash, tunable
from kbench.kernels.verify import check
from kbench.measure.answers import TimedCall
from kbench.measure.boundary import guarded
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.ops.strict import stricter
from kbench.plan import model_label
from kbench.protocol import Measurement, Outcome, Status
from kbench.suite.schema import Arm, Measure

TRIAL_CALLS, TRIAL_MS, WINDOWS = 5, 2.0, 5
"""A trial is short: it ranks configurations that differ by more than a few percent."""


def configured(implementation: Any, case: Case, arm: Arm, device: str, settings: Measure) -> tuple[Any, dict[str, Any]]:
    """`implementation` as the suite's policy wants it, and what that cost: facts for the trial's `tuning`.

    What has nothing to tune comes back as it is, with no facts.
    """
    if not tunable(implementation):
        return implementation, {}
    if settings.tuning != "heuristic" and not settings.tuning_cache:
        raise UsageError(f"policy {settings.tuning} needs a cache", remedy='measure.tuning_cache = "FOLDER"')
    shape = catalog.resolve_shape(case.op, case.shape, arm_shape(arm))
    tuner = Tuner(settings.tuning, TuningCache(Path(arm.root) / settings.tuning_cache))
    key = key_of(implementation, case.op, shape, arm, device)
    timing = ShapeTrials(case.op, shape, arm, device, settings)
    if settings.tuning == "warm-up":
        tuner.warm(implementation, key, shape, timing)
    made = tuner.configured(implementation, key, shape, timing)
    entry = tuner.cache.get(key) if settings.tuning != "heuristic" else None
    return made, {
        "policy": settings.tuning,
        "bucket": key.bucket,
        "configuration": None if entry is None else dict(entry.configuration),
        **tuner.counters.to_json(),
    }


def key_of(implementation: Any, op: str, shape: Resolved, arm: Arm, device: str) -> Key:
    layout = f"{arm.layout}{arm.page_size}" if shape.point is not None else ""
    return Key(op, bucket_of(shape), arm.model.dtype, layout, _device_name(device), implementation_hash(implementation))


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    from kbench.env import snapshot

    cpu = snapshot().get("cpu")
    model = cpu.get("model") if isinstance(cpu, dict) else None
    return f"{model or 'cpu'}, {torch.get_num_threads()} threads"


class ShapeTrials:
    """Trials of the configurations of one shape, on the same inputs. Made when the first is asked for."""

    def __init__(self, op: str, shape: Resolved, arm: Arm, device: str, settings: Measure) -> None:
        self._op, self._shape, self._measure = stricter(load_op(op), arm.tolerated("kernel")), shape, settings
        dtype = torch_dtype(arm.model.dtype)
        self._settings = InputSettings(arm.page_size, arm.layout, dtype, open_device(device), arm.seed)
        self._standard: Any = None
        self._sets: list[Any] = []
        self._flush_bytes = 0
        self.problem = ""
        """Why the last configuration that failed did."""

    def __call__(self, implementation: Any) -> float | None:
        """The quietest window's median in µs; None where the implementation raises or is wrong."""
        with torch.inference_mode():
            outcome = guarded(lambda: self._try(implementation))
        if outcome.status is not Status.OK:
            self.problem = outcome.message
            return None
        return outcome.measurements[0].value

    def _try(self, implementation: Any) -> Outcome:
        if not self._sets:
            self._make()
        judgement = check(implementation, self._op, self._standard)
        if not judgement.ok:
            return Outcome(Status.INCORRECT, judgement.problem)
        calls = [TimedCall.of(self._op, implementation, inputs) for inputs in self._sets]
        timer = prepared_timer(calls, self._settings.device, self._measure.timer, self._flush_bytes)
        readings = [median(timer.window(TRIAL_CALLS, TRIAL_MS)) for _ in range(WINDOWS)]
        return Outcome(measurements=(Measurement("latency", "us", min(readings), timer.name),))

    def _make(self) -> None:
        """Inputs to rotate in the suite's cache state, and the sharpest kind to be judged by."""
        op, shape, device = self._op, self._shape, self._settings.device
        one = op.build(shape, self._settings, op.kinds[-1])[0]
        self._standard = op.standard(one)
        streamed = op.streamed_bytes(one)
        rest = max(0, op.cost(one).bytes - streamed)
        cache = plan_state(streamed, rest, last_level_bytes(device), device.type, self._measure.cache)
        self._flush_bytes = cache.flush_bytes
        self._sets = op.build(shape, self._settings, sets=max(1, cache.sets))


def tune_job(
    arm: Arm, device: str, settings: Measure, *, op: str, shapes: list[str], cache: str, again: bool = False
) -> Outcome:
    """Time every configuration of the arm's implementation of `op` at each shape, and keep the best of each bucket.

    Facts: `rows`, one a bucket: `{shape, bucket, status, configurations, times_us, best, spent_us}`.
    """
    reference = arm.implementation_of(op)
    if reference is None:
        raise UsageError(f"variant {arm.name!r} names nobody for {op}", remedy="add it to its kernels")
    implementation = load(reference, op, Path(arm.root))
    if not tunable(implementation):
        raise UsageError(f"{reference} has nothing to tune", remedy="give it configurations and with_configuration")
    tuner = Tuner("warm-up", TuningCache(Path(cache)))
    rows: dict[str, dict[str, Any]] = {}
    for text in shapes:
        case = Case("kernel", op, model_label(arm.model), text)
        shape = catalog.resolve_shape(op, case.shape, arm_shape(arm))
        key = key_of(implementation, op, shape, arm, device)
        if key.bucket not in rows:
            rows[key.bucket] = _tune_one(tuner, implementation, key, shape, case, (arm, device, settings), again)
    return Outcome(facts={"rows": list(rows.values()), "implementation": reference, **tuner.counters.to_json()})


def _tune_one(
    tuner: Tuner,
    implementation: Any,
    key: Key,
    shape: Resolved,
    case: Case,
    where: tuple[Arm, str, Measure],
    again: bool,
) -> dict[str, Any]:
    choices = [dict(one) for one in implementation.configurations(shape)]
    row = {"shape": case.point, "bucket": key.bucket, "configurations": choices}
    entry = None if again else tuner.cache.get(key)
    if entry is not None and entry.configuration in choices:
        tuner.counters.hits += 1
        known = {"heuristic_us": entry.heuristic_us, "best_us": entry.time_us, "best": dict(entry.configuration)}
        return {**row, "status": "kept", "times_us": [], "spent_us": entry.spent_us, **known}
    tuner.counters.misses += 1
    started = perf_counter_ns()
    trials = ShapeTrials(case.op, shape, *where)
    found = tuner.tune(implementation, key, shape, trials)
    if found is None:
        spent_us = (perf_counter_ns() - started) / 1_000
        return {**row, "status": f"no configuration: {trials.problem}", "times_us": [], "spent_us": spent_us}
    made = tuner.cache.get(key)
    best_us = made.time_us if made is not None else 0.0
    heuristic_us = made.heuristic_us if made is not None else 0.0
    return {
        **row,
        "status": "tuned",
        "times_us": found.times_us,
        "spent_us": found.spent_us,
        "heuristic_us": heuristic_us,
        "best_us": best_us,
        "best": dict(found.best),
    }
