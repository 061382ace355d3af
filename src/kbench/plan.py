"""From a suite to a plan: which cases, in which order, under which hash.

Owns the expansion of points to cases, the coin of every block, and the two hashes: the *lock* (rule, suite, traces,
cost grids, seed: what may not change once there is evidence) and the *plan hash* (the lock and the identity of both
arms' code). It measures nothing and imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench import __version__, catalog
from kbench.catalog import AUTO, Case, Registry
from kbench.errors import UsageError
from kbench.hashing import sha256_of, sha256_of_file
from kbench.suite import Arm, LoadedSuite
from kbench.suite.choices import registry_of
from kbench.suite.plugins import is_plugin, plugin_hash
from kbench.suite.recorded import file_of
from kbench.suite.schema import ModelSettings
from kbench.suite.shapes import FILES

RULE_VERSION = 1
"""Counts the meanings of a rule: raised when the same samples could lead to another verdict."""

SESSION_S, CASE_S, TRACED_S, REPLAY_S = 3.0, 0.7, 9.0, 3.0
"""Start of a pair, preparation of a case in both arms, the traced pass, modelled replays of a trace."""

MEASURED_LEVELS = ("kernel", "step")
"""Levels whose cases are measured in windows by a pair of workers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a suite asks for, with everything resolved that can be resolved without measuring."""

    loaded: LoadedSuite
    baseline: Arm
    candidate: Arm
    cases: tuple[Case, ...]
    declaration: dict[str, Any]
    arms: dict[str, str]

    @property
    def name(self) -> str:
        return self.loaded.suite.claim.name

    @property
    def lock_hash(self) -> str:
        return sha256_of(self.declaration)

    @property
    def plan_hash(self) -> str:
        return sha256_of({"lock": self.lock_hash, "arms": self.arms})

    @property
    def both(self) -> tuple[Arm, Arm]:
        return self.baseline, self.candidate

    def at(self, *levels: str) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.level in levels)


def make_plan(loaded: LoadedSuite) -> Plan:
    """Resolve a suite. Raises UsageError where a trace, cost grid, plug-in or checkpoint cannot be read."""
    baseline, candidate = loaded.baseline, loaded.candidate
    return Plan(
        loaded=loaded,
        baseline=baseline,
        candidate=candidate,
        cases=_cases(loaded),
        declaration=_declaration(loaded),
        arms={arm.name: _identity(arm) for arm in (baseline, candidate)},
    )


def model_label(model: ModelSettings) -> str:
    """How a case names its model: the preset or checkpoint folder, and the number of layers where it was changed."""
    if model.preset is None:
        return Path(model.checkpoint or "checkpoint").name
    own = catalog.model_shape(model.preset).layers
    return model.preset if model.layers in (None, own) else f"{model.preset}-{model.layers}layers"


def block_orders(plan_hash: str, session: str, case: Case, blocks: int) -> list[str]:
    """ABBA or BAAB for every block: A is the baseline. The coin is the plan's, so nobody can draw another one."""
    orders = []
    for block in range(blocks):
        coin = hashlib.sha256(f"{plan_hash}|{session}|{case}|{block}".encode()).digest()[0] & 1
        orders.append("BAAB" if coin else "ABBA")
    return orders


def estimated_seconds(plan: Plan, sessions: int) -> float:
    """About how long `sessions` sessions and what is taken once will take, in seconds.

    Windows take their declared time (more where a step is longer than one); the rest are the overheads of a 2-core CPU.
    """
    suite = plan.loaded.suite
    cases = len(plan.at(*MEASURED_LEVELS))
    windows_s = cases * suite.measure.blocks * 4 * suite.measure.window_ms / 1e3
    total = sessions * (SESSION_S + cases * CASE_S + windows_s) + TRACED_S
    if suite.workload is not None:
        real = 0.0 if suite.workload.costs else 3 * (SESSION_S + 2 * suite.workload.exec_s)
        total += len(suite.workload.traces) * (REPLAY_S + real)
    return total


def _cases(loaded: LoadedSuite) -> tuple[Case, ...]:
    suite = loaded.suite
    label = model_label(suite.model)
    cases: list[Case] = []
    if suite.kernel:
        for op in suite.kernel.ops:
            for text in suite.kernel.points:
                shape = catalog.parse_shape(text)
                if catalog.op_applies(op, shape):
                    cases.append(Case("kernel", op, label, str(shape)))
    if suite.step:
        shapes = [catalog.parse_step(text) for text in suite.step.points]
        cases += [Case("step", "step", label, str(shape.point), shape.attributes.pairs()) for shape in shapes]
    if suite.workload:
        cases += [Case("workload", "replay", label, name) for name in suite.workload.traces]
    return tuple(dict.fromkeys(cases))


def _declaration(loaded: LoadedSuite) -> dict[str, Any]:
    """What is locked. Files count by content, not by path: moving a trace is no edit, changing a byte of it is one.

    Keys at their default are left out, so that a key that a later version adds does not unlock old evidence; a default
    that changes its meaning raises RULE_VERSION.
    """
    declared = loaded.suite.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for variant in declared["variants"].values():
        for entry in variant.get("fallback", ()):
            entry.pop("benchmarked", None)  # where its evidence is; what that is worth is looked up
    kernel = declared.get("kernel") or {}
    for key in set(FILES) & set(kernel):
        kernel[key] = sha256_of_file(file_of(kernel[key], loaded.root))
    loads = _load_files(loaded)
    if loads:
        declared["step"]["loads"] = loads
    measure = declared.get("measure") or {}
    if "tuning_cache" in measure:
        # Under `build` the cache is an input; under the other policies the run itself fills it.
        entries = (
            sorted((loaded.root / measure["tuning_cache"]).glob("*.json")) if measure.get("tuning") == "build" else []
        )
        measure["tuning_cache"] = {file.name: sha256_of_file(file) for file in entries}
    workload = declared.get("workload")
    if workload:
        for key in {"traces", "costs"} & set(workload):
            workload[key] = {name: sha256_of_file(loaded.root / file) for name, file in workload[key].items()}
    return {"suite": declared, "rule_version": RULE_VERSION}


def _load_files(loaded: LoadedSuite) -> dict[str, str]:
    """Hash of every file of expert loads that a step's point names."""
    step = loaded.suite.step
    controls = [catalog.parse_step(text).attributes.moe for text in step.points] if step else []
    names = sorted({control.recorded for control in controls if control is not None and control.recorded})
    return {name: sha256_of_file(loaded.root / name) for name in names}


def _identity(arm: Arm) -> str:
    """Hash of the code that an arm names: its implementations' sources or plug-in files, and its checkpoint."""
    parts: dict[str, Any] = {"kbench": __version__}
    known, root = registry_of(arm), Path(arm.root)

    def part(op: str, reference: str) -> dict[str, Any]:
        if reference == AUTO:
            return {"name": AUTO, "among": [part(op, found.name) for found in known.in_order(op)]}
        return {"name": reference, "sha256": _source_hash(known, reference, op, root)}

    for phase, reference in (("prefill", arm.prefill), ("decode", arm.decode)):
        parts[phase] = part(f"attention.{phase}", reference)
    for op, reference in sorted(arm.kernels.items()):
        parts[op] = part(op, reference)
    parts |= _alternatives(arm, part)
    if arm.model.checkpoint is not None:
        parts["checkpoint"] = _checkpoint_hash(Path(arm.root) / arm.model.checkpoint)
    return sha256_of(parts)


def _alternatives(arm: Arm, part: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Who else may serve an arm, and who is treated as gone. Arms that allow nobody else have no such part."""
    found: dict[str, Any] = {}
    if arm.fallback:
        found["fallback"] = [{"op": entry.op, **part(entry.op, entry.use)} for entry in arm.fallback]
    if arm.policy == "auto":
        ops = ["attention.prefill", "attention.decode", *sorted(arm.kernels)]
        found["auto"] = {op: part(op, AUTO) for op in ops}
    if arm.draft is not None:
        found["draft"] = [part(f"attention.{phase}", getattr(arm.draft, phase)) for phase in ("prefill", "decode")]
    if arm.without:
        found["without"] = sorted(arm.without)
    return found


def _source_hash(names: Registry, reference: str, op: str, root: Path) -> str:
    if is_plugin(reference):
        return plugin_hash(reference, root)
    known = names.get(reference, op)
    if known.installed:
        return plugin_hash(known.entry, root)
    module = known.entry.partition(":")[0]
    package, _, rest = module.partition(".")
    if package != "kbench":
        return module
    return sha256_of_file(Path(__file__).parent / Path(*rest.split(".")).with_suffix(".py"))


def _checkpoint_hash(folder: Path) -> str:
    """Hash of config.json and of every weight file's name and content."""
    if not (folder / "config.json").is_file():
        raise UsageError("no checkpoint: config.json is missing", where=str(folder), remedy="name a model folder")
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return sha256_of({file.name: sha256_of_file(file) for file in files})
