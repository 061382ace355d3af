"""Where each number of a preset comes from: a key of the published config.json, the architecture's code, or kbench.

Owns the names of the keys. Which repository a preset was taken from is its `source`.
"""

from __future__ import annotations

from dataclasses import fields

from kbench.catalog.models import ModelShape

_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim, else hidden_size / num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "experts": "num_experts, num_local_experts or n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_intermediate": "moe_intermediate_size, else intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
    "shared_experts": "n_shared_experts, else one where shared_expert_intermediate_size is set",
    "shared_intermediate": "shared_expert_intermediate_size",
    "dense_layers": "first_k_dense_replace",
    "sparse_step": "decoder_sparse_step",
    "dense_at": "mlp_only_layers",
    "swiglu_limit": "swiglu_limit",
    "max_context": "max_position_embeddings",
    "windows": "sliding_window and layer_types, or the architecture's pattern",
    "softcap": "attn_logit_softcapping",
    "rope": "rope_scaling",
    "latent": "kv_lora_rank",
    "latent_rope": "qk_rope_head_dim",
}
_CODE = ("qk_norm", "attention_bias", "output_bias", "mlp_bias", "shared_gate", "sinks", "swiglu_alpha")
_NOT_NUMBERS = ("name", "foreign", "family", "source")
_UNSURE = {
    ("kimi-k2", "intermediate"): "one source only",
    ("falcon-7b", "intermediate"): "one source only",
}


def field_sources(shape: ModelShape) -> dict[str, str]:
    """Field → source, of the fields that say something about this model: all without a default, and those set."""
    found = {}
    for field in fields(ModelShape):
        if field.name in _NOT_NUMBERS:
            continue
        stated = getattr(shape, field.name) != field.default
        always = field.name in ("rope_theta", "norm_eps", "tied_embeddings", "max_context")
        if stated or always:
            found[field.name] = _source(shape, field.name, stated)
    return found


def _source(shape: ModelShape, name: str, stated: bool) -> str:
    if shape.source.startswith("kbench"):
        return "kbench"
    if name == "max_context" and not stated:
        return "kbench: how far seeded weights are run"
    if name in _CODE:
        return "config.json where it has the key, else the architecture's code in transformers"
    unsure = _UNSURE.get((shape.name, name), "one source only" if "from one source only" in shape.source else "")
    repository = shape.source.split()[0].rstrip(",;")
    return f"{repository} config.json: {_KEYS[name]}" + (f" ({unsure})" if unsure else "")
