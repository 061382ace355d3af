"""Rotary embedding against transformers, positions of a batch, and rotations as such."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as their_pairs
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as their_halves

from kbench.catalog import model_shape, parse_shape, resolve_shape
from kbench.errors import UsageError
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.ops.rope import tables
from kbench.ops.tensors import TensorInputs

SETTINGS = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), 3)
SMALL = "tokens=6,q_heads=4,kv_heads=2,head_dim=32"


def made(shape: str, kind: str = "random") -> TensorInputs:
    inputs: TensorInputs = load_op("rope").build(resolve_shape("rope", parse_shape(shape), None), SETTINGS, kind)[0]
    return inputs


@pytest.mark.parametrize("offset", [0, 15, 4_000])
def test_halves_are_those_of_llama(offset: int) -> None:
    inputs = made(f"{SMALL},offset={offset},theta=500000.0")
    q, k, positions = (inputs.arguments[name] for name in ("q", "k", "positions"))
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, head_dim=32, max_position_embeddings=8_192)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500_000.0}
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = their_halves(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)
    for have, want in zip(load_op("rope").exact(inputs), expected, strict=True):
        # their tables are float32 throughout: at position 4,000 that is worth three digits
        torch.testing.assert_close(have.float(), want[0].transpose(0, 1), rtol=1e-3, atol=2e-3 if offset else 1e-5)


def test_pairs_are_those_of_gpt_j() -> None:
    inputs = made(f"{SMALL},interleaved=1,offset=3")
    q, positions = inputs.arguments["q"], inputs.arguments["positions"]
    cos, sin = (table[positions][None] for table in (inputs.arguments["cos"], inputs.arguments["sin"]))
    expected = their_pairs(q[None], sin, cos)[0]
    torch.testing.assert_close(load_op("rope").exact(inputs)[0].float(), expected)


def test_positions_are_those_of_new_tokens() -> None:
    op = load_op("rope")
    shape = resolve_shape("rope", parse_shape("1*3@40+2*1@9"), model_shape("tiny"))
    assert op.build(shape, SETTINGS)[0].arguments["positions"].tolist() == [37, 38, 39, 8, 8]
    assert made(f"{SMALL},offset=9").arguments["positions"].tolist() == [9, 10, 11, 12, 13, 14]
    assert made(SMALL, "int32").arguments["positions"].dtype == torch.int32


def test_the_rest_of_the_head_is_left_alone() -> None:
    inputs = made(f"{SMALL},rotary=8,offset=5")
    q, _ = load_op("rope").exact(inputs)
    assert torch.equal(q[..., 8:].float(), inputs.arguments["q"][..., 8:])
    assert not torch.equal(q[..., :8].float(), inputs.arguments["q"][..., :8])


@given(start=st.integers(0, 2_000), distance=st.integers(0, 500))
def test_scores_depend_on_the_distance_alone(start: int, distance: int) -> None:
    cos, sin = (table.double() for table in tables(2_600, 16, 10_000.0))
    from kbench.ops.rope import rotate

    generator = torch.Generator().manual_seed(start)
    q, k = (torch.randn(1, 1, 16, generator=generator, dtype=torch.float64) for _ in range(2))

    def score(at: int) -> float:
        near, far = slice(at, at + 1), slice(at + distance, at + distance + 1)
        return float((rotate(q, cos[far], sin[far], False) * rotate(k, cos[near], sin[near], False)).sum())

    assert score(start) == pytest.approx(score(0), abs=1e-4)


@pytest.mark.parametrize("rotary", [7, 40])
def test_a_rotary_width_that_cannot_be_is_refused(rotary: int) -> None:
    with pytest.raises(UsageError, match="rotary"):
        made(f"{SMALL},rotary={rotary}")
