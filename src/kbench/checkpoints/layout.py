"""Which tensors of a checkpoint make which weight of the decoder: names, shapes, and how they are put together.

Owns the tensor names of every family. One description serves the check before anything is loaded and the loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kbench.catalog import ModelShape

Sizes = tuple[int, ...]
Order = Literal["plain", "transposed", "interleaved", "transposed-interleaved"]


@dataclass(frozen=True, slots=True)
class Part:
    """One weight: tensors (name, shape) of a group are joined along their first axis, groups are stacked on a new one.

    `order`: how the last two axes stand: transposed is [in, out] instead of [out, in]; interleaved has gate and up in
    turn, where the decoder wants all gates first.
    """

    groups: tuple[tuple[tuple[str, Sizes], ...], ...]
    stacked: bool = False
    order: Order = "plain"

    @property
    def tensors(self) -> tuple[tuple[str, Sizes], ...]:
        return tuple(tensor for group in self.groups for tensor in group)


def decoder_parts(shape: ModelShape) -> dict[str, Part]:
    """What is no layer: `embedding`, `norm` and, unless they are tied, `head`."""
    parts = {
        "embedding": _one("model.embed_tokens.weight", (shape.vocab, shape.hidden)),
        "norm": _one("model.norm.weight", (shape.hidden,)),
    }
    return parts if shape.tied_embeddings else parts | {"head": _one("lm_head.weight", (shape.vocab, shape.hidden))}


def layer_parts(shape: ModelShape, index: int) -> dict[str, Part]:
    """The weights of a layer by the field of `engine.model.Layer`; those of its MLP as `mlp.FIELD`."""
    at, hidden = f"model.layers.{index}.", shape.hidden
    parts = {
        "input_norm": _one(f"{at}input_layernorm.weight", (hidden,)),
        "post_norm": _one(f"{at}post_attention_layernorm.weight", (hidden,)),
        **_attention(shape, f"{at}self_attn."),
    }
    found = _experts(shape, at) if shape.has_experts(index) else _dense(shape, f"{at}mlp.", shape.intermediate)
    return parts | {f"mlp.{name}": part for name, part in found.items()}


def _attention(shape: ModelShape, at: str) -> dict[str, Part]:
    hidden, q_rows, kv_rows = shape.hidden, shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    parts = {"output": _one(f"{at}o_proj.weight", (hidden, q_rows))}
    if shape.family == "phi3":
        parts["qkv"] = _one(f"{at}qkv_proj.weight", (q_rows + 2 * kv_rows, hidden))
    else:
        parts["qkv"] = _joined(*((f"{at}{name}_proj.weight", (size, hidden)) for name, size in rows))
    if shape.attention_bias:
        parts["qkv_bias"] = _joined(*((f"{at}{name}_proj.bias", (size,)) for name, size in rows))
    if shape.output_bias:
        parts["output_bias"] = _one(f"{at}o_proj.bias", (hidden,))
    if shape.qk_norm:
        parts |= {f"{name}_norm": _one(f"{at}{name}_norm.weight", (shape.head_dim,)) for name in "qk"}
    if shape.sinks:
        parts["sinks"] = _one(f"{at}sinks", (shape.q_heads,))
    return parts


def _dense(shape: ModelShape, at: str, width: int) -> dict[str, Part]:
    hidden = shape.hidden
    parts = {"down": _one(f"{at}down_proj.weight", (hidden, width))}
    if shape.family == "phi3":
        return parts | {"gate_up": _one(f"{at}gate_up_proj.weight", (2 * width, hidden))}
    parts["gate_up"] = _joined(*((f"{at}{name}_proj.weight", (width, hidden)) for name in ("gate", "up")))
    if shape.mlp_bias:
        parts["gate_up_bias"] = _joined(*((f"{at}{name}_proj.bias", (width,)) for name in ("gate", "up")))
        parts["down_bias"] = _one(f"{at}down_proj.bias", (hidden,))
    return parts


def _experts(shape: ModelShape, at: str) -> dict[str, Part]:
    if shape.family == "gpt_oss":
        return _gpt_oss_experts(shape, f"{at}mlp.")
    mixtral = shape.family == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    at += "block_sparse_moe." if mixtral else "mlp."
    wide, every = (shape.expert_intermediate, shape.hidden), range(shape.experts)
    parts = {
        "router": _one(f"{at}gate.weight", (shape.experts, shape.hidden)),
        "gate_up": Part(
            tuple(tuple((f"{at}experts.{e}.{name}.weight", wide) for name in (gate, up)) for e in every), stacked=True
        ),
        "down": Part(tuple(((f"{at}experts.{e}.{down}.weight", wide[::-1]),) for e in every), stacked=True),
    }
    if shape.shared_intermediate:
        shared = _dense(shape, f"{at}shared_expert.", shape.shared_intermediate)
        parts |= {f"shared.{name}": part for name, part in shared.items()}
    if shape.shared_gate:
        parts["shared_gate"] = _one(f"{at}shared_expert_gate.weight", (1, shape.hidden))
    return parts


def _gpt_oss_experts(shape: ModelShape, at: str) -> dict[str, Part]:
    count, hidden, width = shape.experts, shape.hidden, shape.expert_intermediate
    return {
        "router": _one(f"{at}router.weight", (count, hidden)),
        "router_bias": _one(f"{at}router.bias", (count,)),
        "gate_up": _one(f"{at}experts.gate_up_proj", (count, hidden, 2 * width), "transposed-interleaved"),
        "gate_up_bias": _one(f"{at}experts.gate_up_proj_bias", (count, 2 * width), "interleaved"),
        "down": _one(f"{at}experts.down_proj", (count, width, hidden), "transposed"),
        "down_bias": _one(f"{at}experts.down_proj_bias", (count, hidden)),
    }


def _one(name: str, sizes: Sizes, order: Order = "plain") -> Part:
    return Part((((name, sizes),),), order=order)


def _joined(*tensors: tuple[str, Sizes]) -> Part:
    return Part((tensors,))
