"""Shapes of decoder-only transformers: sizes, rotary positions, and which kind of layer stands where.

Owns the nouns that the engine, the operations and checkpoints share. The published ones are in `catalog.presets`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """How rotary positions are stretched beyond the context that a model was trained on. The default: not at all."""

    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    """Positions of the training; llama3 and yarn blend by how often a frequency turns within them."""
    low_turns: float = 1.0
    """llama3: frequencies that turn less often are stretched by the whole factor."""
    high_turns: float = 4.0
    """llama3: frequencies that turn more often stay."""
    beta_fast: float = 32.0
    """yarn: as `high_turns`."""
    beta_slow: float = 1.0
    """yarn: as `low_turns`."""
    truncate: bool = True
    """yarn: whether the blended range begins and ends at whole dimensions."""
    magnitude: float = 1.0
    """cos and sin are multiplied by it."""
    share: float = 1.0
    """Share of a head's elements that turn, the first ones; the others carry no position."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the attention of a layer adds to plain causal attention. Layers of one kind share a step's metadata."""

    window: int = 0
    """Keys that a query sees at most, its own among them; 0: all."""
    softcap: float = 0.0
    sinks: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """What an implementation must declare, as `Implementation.features` names it."""
        return tuple(name for name in ("window", "softcap", "sinks") if getattr(self, name))

    def __str__(self) -> str:
        reach = f"window {self.window:,}" if self.window else "full"
        capped = f", soft cap {self.softcap:g}" if self.softcap else ""
        return f"{reach}{capped}{', sinks' if self.sinks else ''}"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder-only transformer (hidden sizes in elements, no weights)."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    """Of the projections to queries, keys and values."""
    output_bias: bool = False
    """Of attention's output projection."""
    mlp_bias: bool = False
    """Of both projections of every MLP and expert, and of the router."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    shared_experts: int = 0
    """Experts that every token visits."""
    shared_intermediate: int = 0
    """Width of the shared experts, all together."""
    shared_gate: bool = False
    """Whether each token weighs its shared experts by a sigmoid."""
    dense_layers: int = 0
    """Layers before the first with experts."""
    sparse_step: int = 1
    """Every so many-th layer has experts, counted from 1."""
    dense_at: tuple[int, ...] = ()
    """Layers that have no experts besides, counted from 0."""
    swiglu_limit: float = 0.0
    """0: the MLP is silu(gate) * up. Else gate and up are clamped to it, and the MLP is
    gate * sigmoid(swiglu_alpha * gate) * (up + 1), as in gpt-oss."""
    swiglu_alpha: float = 1.0
    max_context: int = 131_072
    windows: tuple[int, ...] = (0,)
    """Keys that a query sees at most in the first, second, … layer, repeated to the last one; 0: all."""
    softcap: float = 0.0
    """Logits of attention are softcap * tanh(logits / softcap); 0 where they are not capped."""
    sinks: bool = False
    """Each head has a learned logit that takes mass and gives no value."""
    rope: Rope = Rope()
    latent: int = 0
    """Width of the compressed KV of multi-head latent attention; 0 for plain attention."""
    latent_rope: int = 0
    foreign: tuple[str, ...] = ()
    """Parts that the embedded engine does not have; empty where it hosts the model."""
    family: str = ""
    """The `model_type` of a Hugging Face checkpoint; empty where the weights are seeded."""
    source: str = ""

    def with_layers(self, layers: int | None) -> ModelShape:
        return self if layers is None else replace(self, layers=layers)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """K and V of all layers for one token, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def kind_of(self, layer: int) -> LayerKind:
        return LayerKind(self.windows[layer % len(self.windows)], self.softcap, self.sinks)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of layers, in the order of their first appearance."""
        return tuple(dict.fromkeys(self.kind_of(layer) for layer in range(self.layers)))

    def has_experts(self, layer: int) -> bool:
        sparse = layer >= self.dense_layers and layer not in self.dense_at and (layer + 1) % self.sparse_step == 0
        return bool(self.experts) and sparse
