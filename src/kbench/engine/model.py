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
from kbench.engine.fused import step_ops
from kbench.engine.inputs import StepInputs
from kbench.engine.kv import KVPool
from kbench.engine.mlp import Dense, Experts, mlp
from kbench.engine.phases import Phases
from kbench.engine.rope import rotary_tables

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
        tables = rotary_tables(shape, max_positions, self.dtype, self.device)
        self.ops = step_ops(self.device, (shape.q_heads, shape.kv_heads, shape.head_dim), shape.norm_eps, tables)

    def forward(
        self,
        inputs: StepInputs,
        kv: KVPool,
        attend: Attend,
        phases: Phases,
        routing: Routing | None = None,
        *,
        sampled: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Logits of the rows that yield a token, `[rows, vocab]` in the model's dtype, in the order of
        `inputs.logit_rows`; in `out` where it is given.

        The caller is in the phase `forward`; the KV write interrupts it, and so does what `attend` enters. `routing`
        overrules the routers of layers with experts, or only looks on. `sampled`: tokens of the step before, where
        `inputs.feed` refers to them.
        """
        shape, weights, ops = self.shape, self.weights, self.ops
        kv_write, turn = phases("kv_write"), ops.turn(inputs)
        width = shape.q_heads * shape.head_dim
        fed = sampled if sampled is not None else inputs.tokens
        residual, normed = ops.embed(inputs, weights.embedding, weights.layers[0].input_norm, fed)
        change: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            if change is not None:
                residual, normed = ops.add_norm(change, residual, layer.input_norm)
            qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
            q = ops.place(layer, qkv, inputs, turn, kv, index, kv_write)
            attended = attend(index, q)
            change = functional.linear(attended.reshape(-1, width), layer.output, layer.output_bias)
            residual, normed = ops.add_norm(change, residual, layer.post_norm)
            change = mlp(layer.mlp, shape, normed, partial(routing, index) if routing is not None else None)
        assert change is not None, "a model has a layer"
        if not inputs.every_row:
            change, residual = (rows.index_select(0, inputs.logit_rows) for rows in (change, residual))
        rows = ops.add_norm(change, residual, weights.norm)[1]
        return functional.linear(rows, weights.head) if out is None else torch.mm(rows, weights.head.t(), out=out)
