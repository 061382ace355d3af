"""Hugging Face folders against transformers itself, on tiny random checkpoints; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kbench.engine.checkpoint import checkpoint_shape, load_checkpoint
from kbench.engine.runner import Engine
from kbench.errors import UsageError
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

torch.set_num_threads(1)
CPU = torch.device("cpu")
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
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-scaled": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
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


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    shards = {"max_shard_size": "40KB"} if family == "llama" else {}
    model.save_pretrained(tmp_path / family, **shards)
    assert (tmp_path / family / "model.safetensors.index.json").exists() == bool(shards)
    prompt = [(11 * index * index + 5) % 97 for index in range(90)]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    engine = Engine(arm_of(tmp_path / family), "cpu", poison=True)
    request = engine.add(prompt, 6)
    engine.step()
    engine.step()
    got = engine.runner.last_logits[0]
    assert (got - expected).norm() / expected.norm() <= 1e-5
    while engine.has_work:
        engine.step()
    longer = [*prompt, *request.content.output]  # type: ignore[attr-defined]
    with torch.inference_mode():
        greedy = model(torch.tensor([longer])).logits[0].argmax(-1)
    assert tuple(greedy[len(prompt) - 1 : -1].tolist()) == request.content.output  # type: ignore[attr-defined]


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def refused(folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_checkpoint(folder, torch.float32, CPU)
    return str(caught.value)


NORM = "model.layers.1.input_layernorm.weight"


def test_a_missing_tensor_is_named(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.pop(NORM))
    assert f"{NORM} [64] is missing" in refused(llama)


def test_a_tensor_of_another_shape_is_named_with_file_and_both_shapes(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.update({NORM: torch.ones(65)}))
    message = refused(llama)
    assert f"{NORM} is [65], config.json says [64]" in message
    assert "model.safetensors" in message


def test_a_tensor_that_is_not_understood_is_named(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.update({"model.layers.0.adapter.weight": torch.ones(3, 2)}))
    assert "model.layers.0.adapter.weight [3, 2] is not understood" in refused(llama)


def test_integer_weights_are_refused(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int32)}))
    assert "int32" in refused(llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding window of 128"),
    ],
)
def test_features_that_the_decoder_lacks_are_refused(llama: Path, changes: dict[str, object], message: str) -> None:
    edit_config(llama, **changes)
    assert message in refused(llama)
    assert "config.json" in refused(llama)


def test_broken_folders_say_what_is_wrong(llama: Path, tmp_path: Path) -> None:
    assert "no config.json" in refused(tmp_path)
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "shard gone.safetensors is missing" in refused(llama)
    (llama / "model.safetensors.index.json").write_text("{")
    assert "cannot be read" in refused(llama)
    (llama / "model.safetensors.index.json").unlink()
    (llama / "model.safetensors").write_bytes(b"no tensors")
    assert "cannot be read" in refused(llama)
    (llama / "model.safetensors").unlink()
    assert "no safetensors file" in refused(llama)
    (llama / "config.json").write_text("[]")
    assert "is not an object" in refused(llama)


def test_the_shape_is_read_without_weights_and_layers_must_agree(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    shape = checkpoint_shape(llama)
    assert (shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim) == (2, 4, 2, 16)
    with pytest.raises(UsageError, match="the checkpoint has 2"):
        Engine(arm_of(llama, model=ModelSettings(checkpoint="llama", layers=3)), "cpu")
