"""A decoder-only transformer: RMSNorm, rotary positions, grouped queries, SwiGLU, optionally QK norm, biases, experts,
sliding windows and sinks.

Owns the weights' layout and the forward pass over packed ragged tokens `[tokens, hidden]`. K and V live in a `KVPool`;
attention is asked of a callable, so that the model knows neither pages nor backends. Weights are fused as an engine
would: one QKV and one gate-up projection a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kbench.catalog import ModelShape
from kbench.engine.kv import KVPool
from kbench.engine.metadata import StepInputs
from kbench.engine.mlp import Dense, Experts, mlp
from kbench.engine.phases import Phases
from kbench.engine.rope import rotary_tables, rotate

Attend = Callable[[int, Tensor], Tensor]
"""`(layer, q [tokens, q_heads, head_dim]) -> attention of the same shape`; K and V of the tokens are written."""
Routing = Callable[[int, Tensor], Tensor]
"""`(layer, experts that the router chose) -> experts that are visited`, int64 `[tokens, experts_per_token]` both."""


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Tensor
    """`[(q_heads + 2 * kv_heads) * head_dim, hidden]`."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    """`[hidden, q_heads * head_dim]`."""
    post_norm: Tensor
    mlp: Dense | Experts
    output_bias: Tensor | None = None
    sinks: Tensor | None = None
    """float32 `[q_heads]`: a logit a head, as `AttentionSpec.sinks`."""


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    """`[vocab, hidden]`."""
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    """`[vocab, hidden]`; the embedding itself where they are tied."""


class Decoder:
    """Weights with a forward pass. Holds no state of a batch: it may serve several pools."""

    def __init__(self, shape: ModelShape, weights: Weights, *, max_positions: int) -> None:
        self.shape = shape
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._cos, self._sin = rotary_tables(shape, max_positions, self.dtype, self.device)

    def forward(
        self, inputs: StepInputs, kv: KVPool, attend: Attend, phases: Phases, routing: Routing | None = None
    ) -> Tensor:
        """Logits of the rows that yield a token, float32 `[rows, vocab]`, in the order of `inputs.logit_rows`.

        The caller is in the phase `forward`; the KV write interrupts it, and so does what `attend` enters. `routing`
        overrules the routers of layers with experts, or only looks on.
        """
        shape, weights = self.shape, self.weights
        heads, kv_heads, dim = shape.q_heads, shape.kv_heads, shape.head_dim
        kv_write = phases("kv_write")
        tokens = inputs.tokens.shape[0]
        hidden = functional.embedding(inputs.tokens, weights.embedding)
        cos = self._cos.index_select(0, inputs.positions)
        sin = self._sin.index_select(0, inputs.positions)
        for index, layer in enumerate(weights.layers):
            normed = _rms_norm(hidden, layer.input_norm, shape.norm_eps)
            qkv = functional.linear(normed, layer.qkv, layer.qkv_bias).view(tokens, heads + 2 * kv_heads, dim)
            q, k, v = self._rotate(layer, qkv, cos, sin)
            with kv_write:
                kv.write(index, inputs.slots, k, v)
            attended = attend(index, q)
            hidden = hidden + functional.linear(attended.reshape(tokens, heads * dim), layer.output, layer.output_bias)
            normed = _rms_norm(hidden, layer.post_norm, shape.norm_eps)
            hidden = hidden + mlp(layer.mlp, shape, normed, partial(routing, index) if routing is not None else None)
        rows = _rms_norm(hidden.index_select(0, inputs.logit_rows), weights.norm, shape.norm_eps)
        return functional.linear(rows, weights.head).float()

    def _rotate(self, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split, normalise (QK norm) and rotate."""
        shape = self.shape
        split = shape.q_heads + shape.kv_heads
        turning, v = qkv[:, :split], qkv[:, split:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = _rms_norm(turning[:, : shape.q_heads], layer.q_norm, shape.norm_eps)
            k = _rms_norm(turning[:, shape.q_heads :], layer.k_norm, shape.norm_eps)
            turning = torch.cat((q, k), dim=1)
        turned = rotate(turning, cos, sin)
        return turned[:, : shape.q_heads].contiguous(), turned[:, shape.q_heads :], v


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
