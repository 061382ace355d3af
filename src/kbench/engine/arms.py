"""From a resolved arm to what a runner is made of: model shape, weights, device and the choice of implementations.

Owns the reading of `Arm` for the torch part of the engine. It runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kbench.catalog import Capability, GraphSupport, Implementation, ModelShape, model_shape
from kbench.checkpoints import read_shape
from kbench.engine.checkpoint import load_checkpoint
from kbench.engine.kv import torch_dtype
from kbench.engine.model import Decoder, Weights
from kbench.engine.seeded import seeded_weights
from kbench.errors import UsageError
from kbench.kernels.identity import Identity
from kbench.kernels.registry import Loader
from kbench.selection import Query, SelectionRecord, SelectionRefused, resolve
from kbench.suite.choices import PHASES, attention_queries, choice_of, registry_of
from kbench.suite.schema import Arm


def arm_shape(arm: Arm) -> ModelShape:
    """The model of an arm: a preset, or what a checkpoint's config.json says, with the arm's number of layers."""
    settings = arm.model
    if settings.checkpoint is not None:
        shape = read_shape(_folder(arm))
        if settings.layers is not None and settings.layers != shape.layers:
            raise UsageError(
                f"model.layers is {settings.layers}, the checkpoint has {shape.layers}",
                where=str(_folder(arm)),
                remedy="leave model.layers out",
            )
        return shape
    if settings.preset is None:
        raise UsageError("no model", remedy="set model.preset or model.checkpoint")
    return model_shape(settings.preset).with_layers(settings.layers)


def load_decoder(arm: Arm, device: torch.device, *, max_positions: int) -> Decoder:
    """Weights on the device: from the checkpoint, or seeded (the same for every page size, layout and kernel)."""
    return Decoder(arm_shape(arm), load_weights(arm, device), max_positions=max_positions)


def load_weights(arm: Arm, device: torch.device) -> Weights:
    shape = arm_shape(arm)
    if shape.foreign:
        raise UsageError(
            f"the embedded engine does not run {shape.name}: it has {', '.join(shape.foreign)}",
            remedy="measure its kernels at level 1, or name another model",
        )
    dtype = torch_dtype(arm.model.dtype)
    if arm.model.checkpoint is not None:
        return load_checkpoint(_folder(arm), dtype, device)[1]
    return seeded_weights(shape, arm.seed, dtype, device)


def _folder(arm: Arm) -> Path:
    return Path(arm.root) / str(arm.model.checkpoint)


def open_device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise UsageError(f"no device {name!r}", remedy="cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device", remedy="use --device cpu, or install a CUDA build of torch")
    return torch.device(name)


def capability_of(device: str) -> Capability | None:
    """Compute capability of the CUDA device in use; None on others."""
    return torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None


@dataclass(frozen=True, slots=True)
class Selected:
    """Who serves one operation of an arm: the record of the choice, the instance, and what is known of it."""

    record: SelectionRecord
    implementation: Any
    facts: Implementation | None
    """None of foreign code that declares nothing."""
    identity: Identity

    @property
    def graph(self) -> GraphSupport:
        """Code that declares nothing is not captured."""
        return GraphSupport.NEVER if self.facts is None else self.facts.graph

    def using(self, implementation: Any) -> Selected:
        """The same choice, with an instance that was configured for its case."""
        if implementation is self.implementation:
            return self
        return replace(self, implementation=implementation, identity=Identity.of(implementation))

    def checked(self) -> SelectionRecord:
        """The record with what is no longer as it was when it was resolved."""
        return replace(self.record, mutations=(*self.record.mutations, *self.identity.changes(self.implementation)))


def select(arm: Arm, shape: ModelShape, phase: str, device: str, role: str = "target") -> Selected:
    """Resolve attention of one phase by the arm's policy: one implementation for all kinds of layers.

    Raises UsageError with every reason where nobody may serve.
    """
    queries = attention_queries(arm, shape, phase, device, role=role, capability=capability_of(device))
    return selected(arm, *queries)


def select_phases(arm: Arm, shape: ModelShape, device: str, role: str = "target") -> tuple[Selected, Selected]:
    """Who computes attention of decodes and of prefills, chosen apart. Reasons of both phases are told together."""
    found: list[Selected] = []
    refusals: list[SelectionRefused] = []
    for phase in PHASES:
        try:
            found.append(select(arm, shape, phase, device, role))
        except SelectionRefused as error:
            refusals.append(error)
    if refusals:
        raise refusals[0].joined(refusals[1:])
    return found[0], found[1]


def selected(arm: Arm, *queries: Query) -> Selected:
    """Resolve one operation of an arm by its policy, and load who serves it."""
    op, role = queries[0].op, queries[0].role
    choice = choice_of(arm, op, role)
    if choice is None:
        raise UsageError(f"variant {arm.name!r} names nobody for {op}", remedy="add it to its kernels")
    names = registry_of(arm)
    loader = Loader(Path(arm.root), names, strict=choice.policy == "reject")
    record = resolve(choice, *queries, known=names, look=loader)
    made = loader.load(record.resolved, op)
    return Selected(record, made, loader.facts(record.resolved, op), Identity.of(made))


def with_attention(arm: Arm, implementation: str) -> Arm:
    """The same arm with another implementation in both phases."""
    alone = {"policy": "reject", "fallback": (), "draft": None, "without": ()}
    return arm.model_copy(update={"prefill": implementation, "decode": implementation, **alone})
