"""The decoder against transformers, and what its seeded weights are good for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kbench.catalog import ModelShape, model_shape
from kbench.engine.arms import load_decoder
from kbench.engine.mlp import Dense, Experts, experts_dense, experts_grouped, experts_loop, route
from kbench.engine.model import Decoder, Weights
from kbench.engine.runner import Engine
from kbench.engine.seeded import seeded_weights, weight_count
from kbench.errors import UsageError
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

torch.set_num_threads(1)
CPU = torch.device("cpu")


def make_arm(preset: str = "tiny", **changes: object) -> Arm:
    keys = {
        "name": "arm",
        "model": ModelSettings(preset=preset),
        "engine": EngineSettings(kv_tokens=2_048, max_batched_tokens=128),
        "prefill": "reference",
        "decode": "reference",
        "page_size": 16,
        "layout": "NHD",
        "seed": 1,
        "root": ".",
    }
    return Arm.model_validate(keys | changes)


def llama_logits(shape: ModelShape, weights: Weights, prompt: list[int]) -> Tensor:
    """The last token's logits by transformers' LlamaForCausalLM with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        max_position_embeddings=2_048,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    state["lm_head.weight"] = weights.head
    q_rows, kv_rows = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}."
        assert isinstance(layer.mlp, Dense)
        q, k, v = layer.qkv.split([q_rows, kv_rows, kv_rows])
        gate, up = layer.mlp.gate_up.chunk(2)
        state |= {
            f"{at}self_attn.q_proj.weight": q,
            f"{at}self_attn.k_proj.weight": k,
            f"{at}self_attn.v_proj.weight": v,
            f"{at}self_attn.o_proj.weight": layer.output,
            f"{at}input_layernorm.weight": layer.input_norm,
            f"{at}post_attention_layernorm.weight": layer.post_norm,
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": layer.mlp.down,
        }
    model.load_state_dict(state)
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, -1]


def test_logits_equal_transformers_prefilled_whole_in_chunks_and_token_by_token() -> None:
    prompt = [(7 * index * index + 3) % 512 for index in range(75)]
    expected = llama_logits(model_shape("tiny"), seeded_weights(model_shape("tiny"), 1, torch.float32, CPU), prompt)
    for budget in (128, 32, 1):
        engine = Engine(make_arm(engine=EngineSettings(kv_tokens=512, max_batched_tokens=budget)), "cpu", poison=True)
        engine.add(prompt, 1)
        while engine.has_work:
            engine.step()
        got = engine.runner.last_logits[0]
        assert (got - expected).norm() / expected.norm() <= 1e-5


def test_weights_depend_on_seed_and_shape_only() -> None:
    shape = model_shape("tiny")
    first, again = (seeded_weights(shape, 5, torch.float32, CPU) for _ in range(2))
    other = seeded_weights(shape, 6, torch.float32, CPU)
    deeper = seeded_weights(shape.with_layers(3), 5, torch.float32, CPU)
    assert torch.equal(first.layers[1].qkv, again.layers[1].qkv)
    assert torch.equal(first.layers[1].qkv, deeper.layers[1].qkv)
    assert not torch.equal(first.layers[1].qkv, first.layers[0].qkv)
    assert not torch.equal(first.head, other.head)


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-window"])
def test_greedy_tokens_vary_and_follow_the_distant_context(preset: str) -> None:
    engine = Engine(make_arm(preset), "cpu")
    base = [(31 * index) % 512 for index in range(60)]
    changed = [base[0] + 1, *base[1:]]
    plain, other = engine.generate([base, changed], 24)
    assert len(set(plain)) >= 12
    assert plain != other


def test_a_tied_head_does_not_repeat_the_last_token() -> None:
    shape = ModelShape("tied", 2, 128, 8, 2, 32, 256, 512, tied_embeddings=True)
    weights = seeded_weights(shape, 1, torch.float32, CPU)
    assert weights.head is weights.embedding
    decoder = Decoder(shape, weights, max_positions=512)
    engine = Engine(make_arm(), "cpu", decoder=decoder)
    output = engine.generate([[3, 1, 4, 1, 5]], 24)[0]
    assert len(set(output)) >= 8
    assert sum(a == b for a, b in itertools.pairwise(output)) < len(output) / 2


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-window", "qwen1.5-moe-a2.7b"])
def test_weight_count_counts_the_matrices_that_are_made(preset: str) -> None:
    published = model_shape(preset)
    narrow = {"hidden": 64, "vocab": 97, "head_dim": 16, "intermediate": 48} if published.hidden > 512 else {}
    shape = replace(published.with_layers(4), dense_at=(2,), **narrow)  # type: ignore[arg-type]
    weights = seeded_weights(shape, 1, torch.float32, CPU)
    count = weights.embedding.numel() + weights.head.numel()
    for layer in weights.layers:
        parts = [layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down]
        if isinstance(layer.mlp, Experts):
            shared = layer.mlp.shared
            parts += [layer.mlp.router, *([shared.gate_up, shared.down] if shared else [])]
            parts += [layer.mlp.shared_gate] if layer.mlp.shared_gate is not None else []
        count += sum(part.numel() for part in parts)
    assert weight_count(shape) == count
    assert isinstance(weights.layers[2].mlp, Dense)


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-window"])
@pytest.mark.parametrize("chosen", [None, 0, 7])
def test_all_ways_to_run_experts_agree_with_empty_experts_and_without_tokens(preset: str, chosen: int | None) -> None:
    shape = model_shape(preset)
    layer = seeded_weights(shape, 1, torch.float32, CPU).layers[0].mlp
    assert isinstance(layer, Experts)
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    few = None if chosen is None else [(chosen + index) % 8 for index in range(shape.experts_per_token)]
    alone = None if few is None else torch.tensor(few).expand(9, -1)
    for tokens in (9, 1, 0):
        own = x[:tokens]
        weight, ids = route(layer, shape, own, None if alone is None else lambda ids: alone[: len(ids)])
        loop, *others = (run(layer, shape, own, weight, ids) for run in (experts_loop, *WAYS))
        assert loop.shape == (tokens, 128)
        for other in others:
            assert torch.allclose(loop, other, atol=2e-5)


WAYS = (experts_dense, experts_grouped)


def test_an_arm_without_a_model_says_so() -> None:
    with pytest.raises(UsageError, match="no model"):
        load_decoder(make_arm().model_copy(update={"model": ModelSettings.model_construct()}), CPU, max_positions=8)
