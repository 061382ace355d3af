"""config.json: what each family's keys mean, and that no key is silently ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints.folder import write_config
from kbench.catalog import LayerKind, Rope
from kbench.checkpoints import read_shape
from kbench.errors import UsageError

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8_192}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": ...}, "model_type None cannot be loaded"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide 4"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "rope_parameters.mrope_section [1]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {}, "rope_scaling": {}}, "rope_scaling stands beside rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_interleaved": True}, "rope_interleaved True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set: quantised"),
        ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias True"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "qwen2_moe"}, "num_experts is missing"),
        ({"model_type": "qwen3_moe", **MOE, "num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8"),
        ({"model_type": "qwen3_moe", **MOE, "use_sliding_window": True}, "use_sliding_window True"),
        ({"model_type": "qwen3_moe", **MOE, "mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types does not list 2 layers"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear"]}, "layer_types[1] 'linear'"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "layer_types[0] 'sliding_attention'"),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 4}, "4 is"),
        ({"logit_scale": 0.0625}, "logit_scale 0.0625 is not understood"),
        ({"use_parallel_residual": False}, "use_parallel_residual false is not understood"),
        ({"sliding_window": 128}, "sliding_window 128 is not understood"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_shape(write_config(tmp_path / "m", **changes))
    text = str(caught.value)
    assert message in text
    assert text.startswith(str(tmp_path / "m" / "config.json"))
    assert "\n" not in text


def shape(tmp_path: Path, **changes: object) -> Any:
    return read_shape(write_config(tmp_path / "m", **changes))


def test_keys_that_change_no_logit_and_nulls_are_passed_over(tmp_path: Path) -> None:
    noise = {"torch_dtype": "bfloat16", "use_cache": False, "pretraining_tp": 2, "eos_token_id": [1, 2], "foo": None}
    assert shape(tmp_path, **noise) == shape(tmp_path)
    assert shape(tmp_path).kinds == (LayerKind(),)


def test_both_spellings_of_rotary_settings_mean_the_same(tmp_path: Path) -> None:
    old = shape(tmp_path, rope_scaling={"type": "llama3", **LLAMA3}, rope_theta=5e5)
    new = shape(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old.rope == new.rope == Rope("llama3", factor=8.0, original_context=8_192, low_turns=1.0, high_turns=4.0)
    assert old.rope_theta == new.rope_theta == 5e5


def test_families_have_the_defaults_of_hugging_face(tmp_path: Path) -> None:
    bare = {"rope_theta": ..., "head_dim": ...}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert shape(tmp_path, **bare).rope_theta == 10_000.0
    assert shape(tmp_path, **bare, model_type="mixtral", **experts).rope_theta == 1_000_000.0
    gpt_oss = shape(tmp_path, **bare, model_type="gpt_oss", **experts)
    assert (gpt_oss.rope_theta, gpt_oss.head_dim, gpt_oss.swiglu_limit) == (150_000.0, 64, 7.0)
    assert [gpt_oss.kind_of(layer).window for layer in range(3)] == [128, 0, 128]
    assert shape(tmp_path, **bare, model_type="qwen3").head_dim == 128
    assert shape(tmp_path, **bare, num_key_value_heads=None).kv_heads == 4
    assert shape(tmp_path, model_type="mistral").windows == (4_096,)
    assert shape(tmp_path, model_type="mistral", sliding_window=None).windows == (0,)


def test_layers_with_and_without_experts(tmp_path: Path) -> None:
    made = shape(
        tmp_path, model_type="qwen3_moe", **MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    assert [made.has_experts(layer) for layer in range(6)] == [False, True, False, False, False, True]


def test_the_published_gpt_oss_file_is_understood_but_for_its_quantisation(tmp_path: Path) -> None:
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4_096}
    published = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2_880,
        "initial_context_length": 4_096,
        "intermediate_size": 2_880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rope_scaling": {**scaling, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150_000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
    }
    from kbench.catalog import model_shape

    made, preset = shape(tmp_path, **published), model_shape("gpt-oss-20b")
    assert made.kinds == preset.kinds
    for field in ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "rope", "experts", "swiglu_alpha", "sinks"):
        assert getattr(made, field) == getattr(preset, field), field
    with pytest.raises(UsageError, match="quantization_config"):
        shape(tmp_path, **published, quantization_config={"quant_method": "mxfp4"})


@pytest.mark.parametrize(("content", "message"), [("[]", "is not an object"), ("{", "cannot be read")])
def test_a_broken_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_shape(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone: no config\.json"):
        read_shape(tmp_path / "gone")
