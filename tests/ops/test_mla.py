"""Absorbed latent attention against the attention that was absorbed, computed by torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kbench.catalog import parse_shape, resolve_shape
from kbench.ops.base import InputSettings
from kbench.ops.mla import MlaDecode, sequences

OP = MlaDecode()


def settings(dtype: torch.dtype = torch.float32) -> InputSettings:
    return InputSettings(16, "NHD", dtype, torch.device("cpu"), 3)


def shape(point: str = "2*1@70+1*1@33", axes: str = "heads=4,latent=32,rope=8"):  # type: ignore[no-untyped-def]
    return resolve_shape("attention.mla_decode", parse_shape(f"{point},{axes}"), None)


def test_the_oracle_is_torchs_attention_over_rows_that_are_key_and_value() -> None:
    inputs = OP.build(shape(), settings())[0]
    given, (answer,) = inputs.arguments, OP.exact(inputs)
    assert given["scale"] == (128 + 8) ** -0.5
    for index, rows in sequences(given):
        q = torch.cat((given["q_latent"][index], given["q_rope"][index]), dim=-1).double()[:, None]
        keys = rows.double().expand(4, -1, -1)
        wanted = F.scaled_dot_product_attention(q, keys, keys[..., :32], scale=given["scale"])[:, 0]
        torch.testing.assert_close(answer[index], wanted, rtol=1e-11, atol=1e-12)


def test_absorbing_the_projections_changes_nothing() -> None:
    """q·(W_k c) = (W_kᵀ q)·c and Σ w (W_v c) = W_v (Σ w c): the plain attention of the paper, one head."""
    inputs = OP.build(shape("1*1@50"), settings())[0]
    rows = next(sequences(inputs.arguments))[1].double()
    draw = torch.Generator().manual_seed(1)
    up_k, up_v = (torch.randn(16, 32, generator=draw, dtype=torch.float64) for _ in range(2))
    q_nope, q_rope = (torch.randn(size, generator=draw, dtype=torch.float64) for size in (16, 8))
    scores = (rows[:, :32] @ up_k.T @ q_nope + rows[:, 32:] @ q_rope) * inputs.arguments["scale"]
    plain = torch.softmax(scores, 0) @ (rows[:, :32] @ up_v.T)
    given = inputs.arguments
    given["q_latent"] = (q_nope @ up_k).expand(1, 4, -1)
    given["q_rope"] = q_rope.expand(1, 4, -1)
    torch.testing.assert_close(up_v @ OP.exact(inputs)[0][0, 0], plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", [127, 4_096])
def test_wrong_models_are_rejected(context: int, dtype: torch.dtype) -> None:
    standards = tuple(OP.standard(OP.build(shape(f"1*1@{context}"), settings(dtype), kind)[0]) for kind in OP.kinds)
    report = OP.nulls(standards)
    assert {"dropped last page", "mask one short", "rope part left out", "heads rotated"} <= set(report.killed)
    assert not report.survived


def test_cost_is_that_of_one_shared_row_a_token() -> None:
    inputs = OP.build(shape("1*1@100", "heads=128,latent=512,rope=64"), settings(torch.bfloat16))[0]
    own = OP.cost(inputs)
    assert own.flops == 2 * 100 * 128 * (576 + 512)
    assert own.bytes_read == (100 * 576 + 128 * 576) * 2 and own.bytes_written == 128 * 512 * 2
    assert OP.streamed_bytes(inputs) == 100 * 576 * 2


def test_a_sequence_without_keys_answers_zero() -> None:
    inputs = OP.build(shape(), settings(), padding=1)[0]
    assert not bool(OP.exact(inputs)[0][3].any()) and bool(OP.exact(inputs)[0][:3].isfinite().all())
