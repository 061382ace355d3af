"""From config.json to a model shape, family by family.

Owns the families, the keys that each understands, and the defaults of keys that Hugging Face leaves out. A key that no
family reads is refused by name (`checkpoints.keys`), so that no feature is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kbench.catalog import ModelShape
from kbench.checkpoints.keys import NEUTRAL, Keys
from kbench.checkpoints.rotary import read_rope

Fields = dict[str, Any]
"""Fields of a ModelShape beyond those that every family has."""


def _llama(keys: Keys) -> Fields:
    bias = keys.flag("attention_bias", False)
    keys.must_be("rope_interleaved", (False,), False)
    return {"attention_bias": bias, "output_bias": bias, "mlp_bias": keys.flag("mlp_bias", False)}


def _mistral(keys: Keys) -> Fields:
    _without_biases(keys)
    # Absent is not null here: Mistral's first release leaves the key out and has the window.
    return {"windows": _every_layer(keys, absent=4_096)}


def _phi3(keys: Keys) -> Fields:
    _without_biases(keys)
    keys.whole("original_max_position_embeddings", 1)  # of longrope, which is refused
    return {"windows": _every_layer(keys)}


def _qwen2(keys: Keys) -> Fields:
    keys.must_be("use_mrope", (False,), False)
    return {"attention_bias": True, "windows": _later_layers(keys)}


def _qwen3(keys: Keys) -> Fields:
    bias = keys.flag("attention_bias", False)
    return {"qk_norm": True, "attention_bias": bias, "output_bias": bias, "windows": _later_layers(keys)}


def _mixtral(keys: Keys) -> Fields:
    _without_biases(keys)
    return {
        "experts": keys.whole("num_local_experts"),
        "experts_per_token": keys.whole("num_experts_per_tok"),
        "expert_intermediate": keys.whole("intermediate_size"),
        "windows": _every_layer(keys),
    }


def _qwen_moe(keys: Keys) -> Fields:
    _no_window(keys)
    dense = keys.raw("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise keys.error("mlp_only_layers", f"is {dense!r}", "a list of layers")
    count = "num_local_experts" if keys.has("num_local_experts") else "num_experts"
    return {
        "experts": keys.whole(count),
        "experts_per_token": keys.whole("num_experts_per_tok"),
        "expert_intermediate": keys.whole("moe_intermediate_size"),
        "norm_topk_prob": keys.flag("norm_topk_prob", False),
        "sparse_step": keys.whole("decoder_sparse_step", 1),
        "dense_at": tuple(dense),
    }


def _qwen2_moe(keys: Keys) -> Fields:
    return {
        **_qwen_moe(keys),
        "attention_bias": keys.flag("qkv_bias", True),
        "shared_experts": 1,
        "shared_intermediate": keys.whole("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def _qwen3_moe(keys: Keys) -> Fields:
    bias = keys.flag("attention_bias", False)
    return {**_qwen_moe(keys), "qk_norm": True, "attention_bias": bias, "output_bias": bias}


def _gpt_oss(keys: Keys) -> Fields:
    bias, per_token = keys.flag("attention_bias", True), keys.whole("num_experts_per_tok")
    keys.must_be("experts_per_token", (per_token,), per_token)  # its other name
    keys.raw("initial_context_length")  # what the rotary settings say once more
    window = keys.whole("sliding_window", 128)
    alternating = tuple(window if layer % 2 == 0 else 0 for layer in range(keys.whole("num_hidden_layers")))
    return {
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
        "experts": keys.whole("num_local_experts"),
        "experts_per_token": per_token,
        "expert_intermediate": keys.whole("intermediate_size"),
        "swiglu_limit": keys.number("swiglu_limit", 7.0),
        "swiglu_alpha": keys.number("swiglu_alpha", 1.702),
        "sinks": True,
        "windows": _layer_types(keys, window) or alternating,
    }


def _without_biases(keys: Keys) -> None:
    for key in ("attention_bias", "mlp_bias"):
        keys.must_be(key, (False,), False)


def _every_layer(keys: Keys, absent: int = 0) -> tuple[int, ...]:
    """The window of a family whose layers are all alike."""
    if not keys.states("sliding_window"):
        return (absent,)
    return (keys.whole("sliding_window") if keys.has("sliding_window") else 0,)


def _later_layers(keys: Keys) -> tuple[int, ...]:
    """Qwen's window, where it is in use: in the layers that `layer_types` names, or from `max_window_layers` on."""
    layers, first = keys.whole("num_hidden_layers"), keys.whole("max_window_layers", 28, least=0)
    if not keys.flag("use_sliding_window", False):
        keys.raw("sliding_window")
        _layer_types(keys, 0)
        return (0,)
    window = keys.whole("sliding_window", 4_096)
    return _layer_types(keys, window) or tuple(0 if layer < first else window for layer in range(layers))


def _no_window(keys: Keys) -> None:
    keys.must_be("use_sliding_window", (False,), False)
    keys.raw("sliding_window")
    _layer_types(keys, 0)


def _layer_types(keys: Keys, window: int) -> tuple[int, ...]:
    """The window of every layer that `layer_types` lists; empty where it is absent. 0: windows are not in use."""
    kinds = {"full_attention": 0, **({"sliding_attention": window} if window else {})}
    listed, layers = keys.raw("layer_types"), keys.whole("num_hidden_layers")
    if listed is None:
        return ()
    if not isinstance(listed, list) or len(listed) != layers:
        raise keys.error("layer_types", f"does not list {layers} layers", "one entry a layer")
    for index, kind in enumerate(listed):
        if kind not in kinds:
            raise keys.error(f"layer_types[{index}]", f"{kind!r} is not supported", " or ".join(kinds))
    return tuple(kinds[kind] for kind in listed)


FAMILIES: Mapping[str, Callable[[Keys], Fields]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _mistral,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "mixtral": _mixtral,
        "qwen2_moe": _qwen2_moe,
        "qwen3_moe": _qwen3_moe,
        "gpt_oss": _gpt_oss,
    }
)
_THETA = {"mixtral": 1_000_000.0, "gpt_oss": 150_000.0}
_HEAD_DIM = {"qwen3": 128, "gpt_oss": 64}
"""Sizes of a head that a family has where the file states none; the others divide the hidden size."""
_KV_HEADS_OPTIONAL = ("llama", "phi3")


def read_shape(folder: Path) -> ModelShape:
    """The model's shape from config.json alone. Anything that the decoder does not compute is a UsageError."""
    keys = Keys.of(folder)
    family = keys.raw("model_type")
    if family not in FAMILIES:
        raise keys.error("model_type", f"{family!r} cannot be loaded", f"one of {', '.join(FAMILIES)}")
    if keys.has("quantization_config"):
        raise keys.error("quantization_config", "is set: quantised weights are not supported", "use unquantised ones")
    keys.must_be("hidden_act", ("silu", "swish"), "silu")
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    theta, rope = read_rope(keys, _THETA.get(family, 10_000.0), partial=family == "phi3")
    shape = ModelShape(
        name=folder.name,
        family=family,
        layers=keys.whole("num_hidden_layers"),
        hidden=hidden,
        q_heads=heads,
        kv_heads=keys.whole("num_key_value_heads", heads if family in _KV_HEADS_OPTIONAL else None),
        head_dim=keys.whole("head_dim", _HEAD_DIM.get(family, hidden // heads)),
        intermediate=keys.whole("intermediate_size"),
        vocab=keys.whole("vocab_size"),
        rope_theta=theta,
        rope=rope,
        norm_eps=keys.number("rms_norm_eps"),
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        max_context=keys.whole("max_position_embeddings"),
        source=keys.file,
        **FAMILIES[family](keys),
    )
    keys.refuse_unread(NEUTRAL)
    if heads % shape.kv_heads:
        raise keys.error("num_key_value_heads", f"{shape.kv_heads} does not divide {heads}", "a divisor of the heads")
    if shape.experts and not shape.experts_per_token <= shape.experts:
        raise keys.error("num_experts_per_tok", f"{shape.experts_per_token} of {shape.experts}", "at most all experts")
    return shape
