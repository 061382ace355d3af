"""Whether this harness catches what it says it catches, and leaves the honest alone.

Owns one try of one kind of the zoo: a whole trial with every defence, then one without the defence that the kind names,
which it must pass. And one try of an honest implementation, which nothing may accuse. Who runs them, in which process
and how often, is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kbench import catalog
from kbench.catalog import Case, Implementation, parse_shape, resolve_shape
from kbench.errors import UsageError
from kbench.kernels.defences import ALL, Defences
from kbench.kernels.registry import load
from kbench.kernels.zoo.base import Kind
from kbench.kernels.zoo.kinds import kinds
from kbench.measure.kernel import KernelTrial
from kbench.protocol import Outcome, Status
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

SEED = 11
PAGE_SIZE = 16
WINDOWS = 3
MODELS = ("tiny", "tiny-moe")
POINTS = ("3*1@37", "1*5@37+1*3")
SHAPES = {
    "gemm": "m=5,n=96,k=160",
    "sampling.draw": "rows=96,vocab=300",
    "sampling.chain": "rows=96,vocab=300",
}
"""Where a small model's own shape is none, or too large for what is asked."""
VOCABULARY = 500


@dataclass(frozen=True, slots=True)
class Seen:
    """How a trial ended. `sign` is empty where nothing was wrong."""

    status: Status
    message: str
    signs: tuple[str, ...]


def kind_named(name: str, device: str) -> Kind:
    for kind in kinds(device):
        if kind.name == name:
            return kind
    raise UsageError(f"no kind {name!r}", remedy=f"one of {', '.join(kind.name for kind in kinds(device))}")


def listing(device: str) -> dict[str, Any]:
    """What there is to try: kinds, and who is to be held honestly."""
    own = [{"name": kind.name, "op": kind.op, "own_process": kind.own_process} for kind in kinds(device)]
    return {"kinds": own, "honest": [{"name": impl.name, "op": op} for impl, op in _honest(device)]}


def try_kind(name: str, device: str) -> dict[str, Any]:
    """Caught with all defences, by a sign of the kind that it has; and passed without the one that it names."""
    kind = kind_named(name, device)
    with_all = _seen(kind, device, ALL)
    without = _seen(kind, device, ALL.without(kind.defence))
    return {
        "name": kind.name,
        "op": kind.op,
        "caught": kind.sign in with_all.signs,
        "defence": kind.defence,
        "status": with_all.status.value if kind.sign == "status" else kind.sign,
        "message": with_all.message,
        "passes_without": kind.sign not in without.signs and "status" not in without.signs,
        "message_without": without.message,
    }


def try_honest(name: str, op: str, device: str) -> dict[str, Any]:
    """A whole trial of a registered implementation, on a small shape and all edge cases."""
    impl = catalog.implementation(name, op)
    model, shape = honest_shape(op)
    dtype = "float32" if "float32" in impl.dtypes else impl.dtypes[0]
    layout = impl.layouts[0]
    page = next((size for size in impl.page_sizes), PAGE_SIZE)
    arm = _arm(model, op, name, dtype, page, layout)
    trial = KernelTrial(Case("kernel", op, model, shape), arm, device, _measure(16, "serving"), SEED)
    seen = _held(trial, traced=False)
    accused = seen.status not in (Status.OK, Status.UNSUPPORTED)
    return {"name": name, "op": op, "accused": accused, "status": seen.status.value, "message": seen.message}


def honest_shape(op: str) -> tuple[str, str]:
    """Model and shape: the first that fill every axis of the operation in."""
    if op in SHAPES:
        return MODELS[0], SHAPES[op]
    tried = [(model, point) for model in MODELS for point in POINTS]
    for model, point in tried:
        try:
            resolve_shape(op, parse_shape(point), catalog.model_shape(model))
        except UsageError:
            continue
        return model, point
    raise UsageError(f"no small shape of {op}", remedy="add one to kbench.measure.selftest.SHAPES")


def _honest(device: str) -> list[tuple[Implementation, str]]:
    """Every registered implementation that can be loaded here, for each operation or for its family's first."""
    found = []
    for impl in catalog.implementations():
        if device not in impl.devices:
            continue
        for op in impl.ops:
            try:
                load(impl.name, op)
            except UsageError:
                continue  # its package is not installed
            found.append((impl, op))
    return found


def _seen(kind: Kind, device: str, defences: Defences) -> Seen:
    arm = _arm(MODELS[0], kind.op, kind.name, kind.dtype, PAGE_SIZE, "NHD")
    case = Case("kernel", kind.op, MODELS[0], kind.shape)
    measure = _measure(kind.calls, kind.cache)
    made = kind.make()
    trial = KernelTrial(case, arm, device, measure, SEED, implementation=made, defences=defences)
    return _held(trial, traced=kind.sign == "FALLBACK")


def _held(trial: KernelTrial, *, traced: bool) -> Seen:
    """A trial from its start to its end; what `traced` asks is asked after that."""
    outcome = trial.prepare()
    if outcome.status is not Status.OK:
        return Seen(outcome.status, outcome.message, ("status",))
    flags = {flag for _ in range(WINDOWS) for reading in trial.window() for flag in reading.flags}
    outcome = trial.finish()
    if outcome.status is Status.OK and traced:
        outcome = trial.trace()
        selection = outcome.facts.get("selection", {})
        if selection.get("observed") not in ("", None, selection.get("resolved")):
            flags.add("FALLBACK")
            outcome = Outcome(message=f"{selection['observed']} ran")
    signs = ("status", *sorted(flags)) if outcome.status is not Status.OK else tuple(sorted(flags))
    message = outcome.message or ("readings drift within a window" if "UNSTABLE" in flags else "")
    return Seen(outcome.status, message, signs)


def _measure(calls: int, cache: str) -> Measure:
    return Measure.model_validate({"window_steps": calls, "window_ms": 1.0, "cache": cache})


def _arm(model: str, op: str, name: str, dtype: str, page_size: int, layout: str) -> Arm:
    decode = name if op == "attention.decode" else "reference"
    prefill = name if op == "attention.prefill" else "reference"
    return Arm.model_validate(
        {
            "name": "selftest",
            "model": ModelSettings.model_validate({"preset": model, "dtype": dtype}),
            "engine": EngineSettings(),
            "prefill": prefill,
            "decode": decode,
            "page_size": page_size,
            "layout": layout,
            "seed": SEED,
            "kernels": {op: name},
            "root": ".",
        }
    )
