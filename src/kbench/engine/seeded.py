"""Random weights that depend on a shape and a seed only.

Owns how they are drawn and scaled. Activations stay near unit variance and logits depend on the context, so that a
wrong key shows in the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from kbench.catalog import ModelShape
from kbench.engine.mlp import Dense, Experts
from kbench.engine.model import Layer, Weights

_MADE_ON_CPU = 2**28
"""Models of up to so many weights are drawn on the CPU and are the same on every device; larger ones where they go."""
_SCORE_GAIN = 2.0
"""Scores of unit variance average over the whole context; this makes a few keys matter, as in trained models."""
_BIAS = 0.1


def weight_count(shape: ModelShape) -> int:
    """Elements of all matrices."""
    attention = 2 * (shape.q_heads + shape.kv_heads) * shape.head_dim * shape.hidden
    dense = 3 * shape.hidden * shape.intermediate
    routed = shape.experts * (3 * shape.hidden * shape.expert_intermediate + shape.hidden)
    shared = 3 * shape.hidden * shape.shared_intermediate + (shape.hidden if shape.shared_gate else 0)
    sparse = sum(shape.has_experts(layer) for layer in range(shape.layers))
    tables = (1 if shape.tied_embeddings else 2) * shape.vocab * shape.hidden
    return tables + shape.layers * attention + (shape.layers - sparse) * dense + sparse * (routed + shared)


def seeded_weights(shape: ModelShape, seed: int, dtype: torch.dtype, device: torch.device) -> Weights:
    """Scores are sharp enough that single keys count, and a tied head reads the hidden state through a random diagonal,
    since it would repeat the last token otherwise.
    """
    where = torch.device("cpu") if weight_count(shape) <= _MADE_ON_CPU else device
    draw = _Draw(seed, dtype, device, where)
    hidden, tied = shape.hidden, shape.tied_embeddings
    embedding = draw("embedding", (shape.vocab, hidden), hidden**-0.5 if tied else 1.0)
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(shape, draw, index) for index in range(shape.layers)),
        norm=draw("norm", (hidden,), 1.0) if tied else draw.ones(hidden),
        head=embedding if tied else draw("head", (shape.vocab, hidden), hidden**-0.5),
    )


@dataclass(frozen=True, slots=True)
class _Draw:
    """Normal values that are a function of the seed and a name, whatever else is drawn."""

    seed: int
    dtype: torch.dtype
    device: torch.device
    where: torch.device

    def __call__(self, name: str, size: tuple[int, ...], std: float) -> Tensor:
        digest = blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.where).manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.randn(size, generator=generator, device=self.where, dtype=torch.float32)
        return drawn.mul_(std).to(self.device, self.dtype)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)


def _layer(shape: ModelShape, draw: _Draw, index: int) -> Layer:
    name, hidden, dim = f"layers.{index}", shape.hidden, shape.head_dim
    rows, q_rows = (shape.q_heads + 2 * shape.kv_heads) * dim, shape.q_heads * dim
    qkv = draw(f"{name}.qkv", (rows, hidden), hidden**-0.5)
    qkv[:q_rows] *= _SCORE_GAIN
    return Layer(
        input_norm=draw.ones(hidden),
        qkv=qkv,
        qkv_bias=draw(f"{name}.qkv_bias", (rows,), _BIAS) if shape.attention_bias else None,
        q_norm=draw.ones(dim) * _SCORE_GAIN if shape.qk_norm else None,
        k_norm=draw.ones(dim) if shape.qk_norm else None,
        output=draw(f"{name}.output", (hidden, q_rows), 2.0 * q_rows**-0.5),
        post_norm=draw.ones(hidden),
        mlp=_experts(shape, draw, f"{name}.mlp") if shape.has_experts(index) else _dense(shape, draw, f"{name}.mlp"),
        output_bias=draw(f"{name}.output_bias", (hidden,), _BIAS) if shape.output_bias else None,
        sinks=draw(f"{name}.sinks", (shape.q_heads,), 1.0).float() if shape.sinks else None,
    )


def _dense(shape: ModelShape, draw: _Draw, name: str, width: int | None = None) -> Dense:
    size, hidden = width or shape.intermediate, shape.hidden
    biased = shape.mlp_bias
    return Dense(
        gate_up=draw(f"{name}.gate_up", (2 * size, hidden), hidden**-0.5),
        down=draw(f"{name}.down", (hidden, size), size**-0.5),
        gate_up_bias=draw(f"{name}.gate_up_bias", (2 * size,), _BIAS) if biased else None,
        down_bias=draw(f"{name}.down_bias", (hidden,), _BIAS) if biased else None,
    )


def _experts(shape: ModelShape, draw: _Draw, name: str) -> Experts:
    size, count, hidden = shape.expert_intermediate, shape.experts, shape.hidden
    biased, shared = shape.mlp_bias, shape.shared_intermediate
    return Experts(
        router=draw(f"{name}.router", (count, hidden), hidden**-0.5),
        gate_up=draw(f"{name}.gate_up", (count, 2 * size, hidden), hidden**-0.5),
        down=draw(f"{name}.down", (count, hidden, size), size**-0.5),
        router_bias=draw(f"{name}.router_bias", (count,), _BIAS) if biased else None,
        gate_up_bias=draw(f"{name}.gate_up_bias", (count, 2 * size), _BIAS) if biased else None,
        down_bias=draw(f"{name}.down_bias", (count, hidden), _BIAS) if biased else None,
        shared=_dense(shape, draw, f"{name}.shared", shared) if shared else None,
        shared_gate=draw(f"{name}.shared_gate", (1, hidden), hidden**-0.5) if shape.shared_gate else None,
    )
