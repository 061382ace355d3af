"""Hugging Face checkpoint folders into the decoder's weights.

Owns the reading and joining of tensors. What a folder must hold, and what is refused, is `kbench.checkpoints`, which
has looked at every header before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kbench.catalog import ModelShape
from kbench.checkpoints import Part, Stored, check_checkpoint, decoder_parts, layer_parts, stored_tensors
from kbench.engine.mlp import Dense, Experts
from kbench.engine.model import Layer, Weights
from kbench.errors import UsageError


def load_checkpoint(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[ModelShape, Weights]:
    """Shape and weights of a checkpoint folder. Anything odd is a UsageError with file, tensor and shapes."""
    shape = check_checkpoint(folder)
    with _opened(stored_tensors(folder)) as read:

        def make(part: Part, kind: torch.dtype = dtype) -> Tensor:
            groups = [[read(name).to(device, kind) for name, _ in group] for group in part.groups]
            joined = [group[0] if len(group) == 1 else torch.cat(group) for group in groups]
            return _ordered(torch.stack(joined) if part.stacked else joined[0], part)

        outer = {name: make(part) for name, part in decoder_parts(shape).items()}
        layers = tuple(_layer(shape, index, make) for index in range(shape.layers))
    embedding = outer["embedding"]
    return shape, Weights(embedding, layers, outer["norm"], outer.get("head", embedding))


def _layer(shape: ModelShape, index: int, make: Any) -> Layer:
    parts = layer_parts(shape, index)
    sinks = make(parts.pop("sinks"), torch.float32) if "sinks" in parts else None
    made = {name: make(part) for name, part in parts.items()}
    own = {name: tensor for name, tensor in made.items() if not name.startswith("mlp.")}
    optional = {name: own.pop(name, None) for name in ("qkv_bias", "q_norm", "k_norm", "output_bias")}
    mlp = _inside(made, "mlp.")
    kind = Experts if shape.has_experts(index) else Dense
    shared = _inside(mlp, "shared.")
    rest: dict[str, Any] = {name: tensor for name, tensor in mlp.items() if not name.startswith("shared.")}
    if shared:
        rest["shared"] = Dense(**shared)
    return Layer(**own, **optional, mlp=kind(**rest), sinks=sinks)


def _inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _ordered(tensor: Tensor, part: Part) -> Tensor:
    """Rows are outputs, and of gate and up all gates come first."""
    if part.order.startswith("transposed"):
        tensor = tensor.transpose(-1, -2)
        axis = -2
    else:
        axis = -1
    if part.order.endswith("interleaved"):
        half = tensor.shape[axis] // 2
        order = torch.arange(2 * half, device=tensor.device).view(half, 2).t().reshape(-1)
        tensor = tensor.index_select(axis, order)
    return tensor.contiguous()


@contextmanager
def _opened(stored: Mapping[str, Stored]) -> Iterator[Any]:
    """A function from a tensor's name to the tensor on the CPU, as it is stored."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for file in {tensor.file for tensor in stored.values()}:
            try:
                handles[file] = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise UsageError(
                    f"cannot be read: {error}", where=str(file), remedy="copy the checkpoint again"
                ) from error
        yield lambda name: handles[stored[name].file].get_tensor(name)
