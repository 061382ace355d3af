"""From a resolved arm to what a runner is made of: model shape, weights, device and the choice of implementations.

Owns the reading of `Arm` for the torch part of the engine. It runs nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kbench.catalog import ModelShape, Resolved, model_shape
from kbench.checkpoints import read_shape
from kbench.engine.checkpoint import load_checkpoint
from kbench.engine.kv import torch_dtype
from kbench.engine.model import Decoder, Weights
from kbench.engine.seeded import seeded_weights
from kbench.errors import UsageError
from kbench.kernels.registry import is_plugin
from kbench.selection import Query, SelectionRecord, resolve
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


def attention_queries(arm: Arm, shape: ModelShape, phase: str, device: str) -> tuple[Query, ...]:
    """What each kind of attention layer of the arm asks for in `phase` (`decode` or `prefill`).

    Who asks for graphs asks for captured decodes. A prefill that cannot be captured is no objection: such steps are
    launched eagerly, and each says so.
    """
    return tuple(
        Query(
            op=f"attention.{phase}",
            device=device,
            dtype=arm.model.dtype,
            page_size=arm.page_size,
            layout=arm.layout,
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            graph=arm.engine.graph == "graph" and phase == "decode",
            features=kind.features,
        )
        for kind in shape.kinds
    )


def operation_query(arm: Arm, shape: Resolved, device: str) -> Query:
    """What a kernel case of the arm asks for; attributes of attention are features that an implementation declares."""
    axes = shape.axes
    features = tuple(name for name in ("window", "softcap", "sinks", "lse") if axes.get(name))
    return Query(
        op=shape.op,
        device=device,
        dtype=arm.model.dtype,
        page_size=arm.page_size,
        layout=arm.layout,
        q_heads=int(axes.get("q_heads", axes.get("kv_heads", 1))),  # a cache alone has no query heads
        kv_heads=int(axes.get("kv_heads", 1)),
        head_dim=int(axes.get("head_dim", 0)),
        graph=False,
        mask=str(axes.get("mask", "causal")),
        features=features,
    )


def select(arm: Arm, shape: ModelShape, phase: str, device: str) -> SelectionRecord:
    """Resolve one phase under the policy `reject`: one implementation for all kinds of layers.

    A plug-in states no limits and resolves to itself.
    """
    requested = arm.decode if phase == "decode" else arm.prefill
    if is_plugin(requested):
        return SelectionRecord(op=f"attention.{phase}", requested=requested, resolved=requested)
    return resolve(requested, *attention_queries(arm, shape, phase, device))


def with_attention(arm: Arm, implementation: str) -> Arm:
    """The same arm with another implementation in both phases."""
    return arm.model_copy(update={"prefill": implementation, "decode": implementation})
