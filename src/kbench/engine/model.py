"""A decoder-only transformer: RMSNorm, rotary positions, grouped queries, SwiGLU, optionally QK norm and experts.

Owns the weights' layout, their seeded creation and the forward pass over packed ragged tokens `[tokens, hidden]`.
K and V live in a `KVPool`; attention is asked of a callable, so that the model knows neither pages nor backends.
Weights are fused as an engine would: one QKV and one gate-up projection a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn import functional

from kbench.catalog import ModelShape
from kbench.engine.kv import KVPool
from kbench.engine.metadata import StepInputs
from kbench.engine.phases import Phases

Attend = Callable[[int, Tensor], Tensor]
"""`(layer, q [tokens, q_heads, head_dim]) -> attention of the same shape`; K and V of the tokens are written."""

_MADE_ON_CPU = 2**28
"""Models of up to so many weights are drawn on the CPU and are the same on every device; larger ones where they go."""
_SCORE_GAIN = 2.0
"""Scores of unit variance average over the whole context; this makes a few keys matter, as in trained models."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed SwiGLU experts."""

    router: Tensor
    """`[experts, hidden]`."""
    gate_up: Tensor
    """`[experts, 2 * intermediate, hidden]`, gate first."""
    down: Tensor
    """`[experts, hidden, intermediate]`."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A SwiGLU layer."""

    gate_up: Tensor
    """`[2 * intermediate, hidden]`, gate first."""
    down: Tensor
    """`[hidden, intermediate]`."""


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


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    """`[vocab, hidden]`."""
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    """`[vocab, hidden]`; the embedding itself where they are tied."""
    inverse_frequency: Tensor
    """float32 `[head_dim / 2]` of the rotary positions, on the CPU."""


class Decoder:
    """Weights with a forward pass. Holds no state of a batch: it may serve several pools."""

    def __init__(self, shape: ModelShape, weights: Weights, *, max_positions: int) -> None:
        self.shape = shape
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), weights.inverse_frequency)
        # cos and sin per half head, broadcast over heads: [positions, 1, head_dim / 2].
        self._cos = angles.cos().to(self.device, self.dtype).unsqueeze(1)
        self._sin = angles.sin().to(self.device, self.dtype).unsqueeze(1)

    def forward(self, inputs: StepInputs, kv: KVPool, attend: Attend, phases: Phases) -> Tensor:
        """Logits of the rows that yield a token, float32 `[rows, vocab]`, in the order of `inputs.logit_rows`.

        The caller is in the phase `forward`; the KV write interrupts it, and so does what `attend` enters.
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
            hidden = hidden + functional.linear(attended.reshape(tokens, heads * dim), layer.output)
            hidden = hidden + self._mlp(layer.mlp, _rms_norm(hidden, layer.post_norm, shape.norm_eps))
        rows = _rms_norm(hidden.index_select(0, inputs.logit_rows), weights.norm, shape.norm_eps)
        return functional.linear(rows, weights.head).float()

    def _rotate(self, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split, normalise (QK norm) and rotate; the halves of a head are paired, as Hugging Face does."""
        shape = self.shape
        split = shape.q_heads + shape.kv_heads
        turning, v = qkv[:, :split], qkv[:, split:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = _rms_norm(turning[:, : shape.q_heads], layer.q_norm, shape.norm_eps)
            k = _rms_norm(turning[:, shape.q_heads :], layer.k_norm, shape.norm_eps)
            turning = torch.cat((q, k), dim=1)
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned[:, : shape.q_heads].contiguous(), turned[:, shape.q_heads :], v

    def _mlp(self, mlp: Dense | Experts, x: Tensor) -> Tensor:
        if isinstance(mlp, Dense):
            return functional.linear(_swiglu(functional.linear(x, mlp.gate_up)), mlp.down)
        scores = functional.linear(x, mlp.router).float().softmax(dim=-1)
        weight, chosen = scores.topk(self.shape.experts_per_token, dim=-1)
        if self.shape.norm_topk_prob:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        weight = weight.to(x.dtype)
        experts = _experts_loop if x.device.type == "cpu" else _experts_dense
        return experts(mlp, x, weight, chosen)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _experts_loop(mlp: Experts, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Each expert computes its own tokens only. Reads the routing on the host, which is free on the CPU."""
    out = torch.zeros_like(x)
    for expert in range(mlp.router.shape[0]):
        token, slot = torch.where(chosen == expert)
        if token.numel():
            done = functional.linear(_swiglu(functional.linear(x[token], mlp.gate_up[expert])), mlp.down[expert])
            out.index_add_(0, token, done * weight[token, slot].unsqueeze(-1))
    return out


def _experts_dense(mlp: Experts, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """All experts compute all tokens and the unchosen count zero: more work, but no read of the routing on the host."""
    gates = torch.zeros(x.shape[0], mlp.router.shape[0], dtype=x.dtype, device=x.device).scatter_(1, chosen, weight)
    hidden = _swiglu(torch.matmul(x, mlp.gate_up.transpose(1, 2)))
    done = torch.matmul(hidden, mlp.down.transpose(1, 2))
    return (done * gates.t().unsqueeze(-1)).sum(dim=0)


def rotary_frequencies(shape: ModelShape) -> Tensor:
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    return 1.0 / (shape.rope_theta**exponent)


def weight_count(shape: ModelShape) -> int:
    """Elements of all matrices."""
    attention = 2 * (shape.q_heads + shape.kv_heads) * shape.head_dim * shape.hidden
    dense = 3 * shape.hidden * shape.intermediate
    routed = shape.experts * (3 * shape.hidden * shape.expert_intermediate + shape.hidden)
    tables = (1 if shape.tied_embeddings else 2) * shape.vocab * shape.hidden
    return tables + shape.layers * (attention + (routed if shape.experts else dense))


def seeded_weights(shape: ModelShape, seed: int, dtype: torch.dtype, device: torch.device) -> Weights:
    """Random weights that depend on shape and seed only, scaled so that activations stay near unit variance.

    Logits depend on the context: scores are sharp enough that single keys count, and a tied head reads the hidden
    state through a random diagonal, since it would repeat the last token otherwise.
    """
    hidden, dim = shape.hidden, shape.head_dim
    rows = (shape.q_heads + 2 * shape.kv_heads) * dim

    where = torch.device("cpu") if weight_count(shape) <= _MADE_ON_CPU else device

    def draw(name: str, size: tuple[int, ...], std: float) -> Tensor:
        digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(where).manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.randn(size, generator=generator, device=where, dtype=torch.float32)
        return drawn.mul_(std).to(device, dtype)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    def mlp(name: str) -> Dense | Experts:
        if not shape.experts:
            size = shape.intermediate
            return Dense(
                gate_up=draw(f"{name}.gate_up", (2 * size, hidden), hidden**-0.5),
                down=draw(f"{name}.down", (hidden, size), size**-0.5),
            )
        size, count = shape.expert_intermediate, shape.experts
        return Experts(
            router=draw(f"{name}.router", (count, hidden), hidden**-0.5),
            gate_up=draw(f"{name}.gate_up", (count, 2 * size, hidden), hidden**-0.5),
            down=draw(f"{name}.down", (count, hidden, size), size**-0.5),
        )

    def layer(index: int) -> Layer:
        name = f"layers.{index}"
        qkv = draw(f"{name}.qkv", (rows, hidden), hidden**-0.5)
        qkv[: shape.q_heads * dim] *= _SCORE_GAIN
        return Layer(
            input_norm=ones(hidden),
            qkv=qkv,
            qkv_bias=draw(f"{name}.qkv_bias", (rows,), 0.1) if shape.attention_bias else None,
            q_norm=ones(dim) * _SCORE_GAIN if shape.qk_norm else None,
            k_norm=ones(dim) if shape.qk_norm else None,
            output=draw(f"{name}.output", (hidden, shape.q_heads * dim), 2.0 * (shape.q_heads * dim) ** -0.5),
            post_norm=ones(hidden),
            mlp=mlp(f"{name}.mlp"),
        )

    tied = shape.tied_embeddings
    embedding = draw("embedding", (shape.vocab, hidden), hidden**-0.5 if tied else 1.0)
    return Weights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(shape.layers)),
        norm=draw("norm", (hidden,), 1.0) if tied else ones(hidden),
        head=embedding if tied else draw("head", (shape.vocab, hidden), hidden**-0.5),
        inverse_frequency=rotary_frequencies(shape),
    )
