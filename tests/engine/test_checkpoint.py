"""Hugging Face folders against transformers itself, on tiny random checkpoints of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checkpoints.folder import write_checkpoint
from kbench.engine.checkpoint import load_checkpoint
from kbench.engine.runner import Engine
from kbench.errors import UsageError
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

torch.set_num_threads(1)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 2.5}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-partial": ("Phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.75, "sliding_window": 33}),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biased": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 40}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen2-moe-mixed": (
        "Qwen2Moe",
        {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-mixed": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 8.0}},
    ),
    "gpt-oss-types": (
        "GptOss",
        {"head_dim": 16, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 3, "swiglu_limit": 0.3}
        | {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": False},
    ),
}


def make_model(family: str) -> Any:
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SIZES | more))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the default 0.02, biases and norms too: every tensor must matter.
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def arm_of(folder: Path, **more: object) -> Arm:
    keys = {
        "name": "arm",
        "model": ModelSettings(checkpoint=folder.name),
        "engine": EngineSettings(kv_tokens=512, max_batched_tokens=64),
        "prefill": "reference",
        "decode": "reference",
        "page_size": 16,
        "layout": "NHD",
        "seed": 1,
        "root": str(folder.parent),
    }
    return Arm.model_validate(keys | more)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    shards = {"max_shard_size": "40KB"} if family in ("llama", "qwen3-moe") else {}
    model.save_pretrained(tmp_path / family, **shards)
    assert (tmp_path / family / "model.safetensors.index.json").exists() == bool(shards)
    prompt = [(11 * index * index + 5) % 97 for index in range(90)]
    engine = Engine(arm_of(tmp_path / family), "cpu", poison=True)
    request = engine.add(prompt, 6)
    logits = []
    while engine.has_work:
        done = engine.step()
        if done.tokens:
            logits.append(engine.runner.last_logits[0])
    longer = [*prompt, *request.content.output]  # type: ignore[attr-defined]
    with torch.inference_mode():
        expected = model(torch.tensor([longer])).logits[0, len(prompt) - 1 : -1]
    got = torch.stack(logits)
    assert ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max() <= 1e-5
    assert tuple(expected.argmax(-1).tolist()) == request.content.output  # type: ignore[attr-defined]


def test_layers_must_agree(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama")
    with pytest.raises(UsageError, match="the checkpoint has 2"):
        Engine(arm_of(tmp_path / "llama", model=ModelSettings(checkpoint="llama", layers=3)), "cpu")


def test_what_is_wrong_with_a_folder_stops_the_loading(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match="is truncated"):
        load_checkpoint(tmp_path / "llama", torch.float32, torch.device("cpu"))
