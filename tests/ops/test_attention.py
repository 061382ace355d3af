from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kbench.catalog import parse_point
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV, cost, oracle, same_dtype, sequence_kv
from kbench.ops.base import InputSettings
from kbench.ops.inputs import build

CPU = torch.device("cpu")


def settings(page: int = 16, layout: str = "NHD", dtype: torch.dtype = torch.float32, seed: int = 3) -> InputSettings:
    return InputSettings(page, layout, dtype, CPU, seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("point", ["1*1@127", "3*1@64", "2*5@77+1*1@300+1*40"])
def test_the_oracle_is_torchs_attention_in_float64(point: str, page: int, layout: str) -> None:
    inputs = build(parse_point(point), AttentionSpec(6, 2, 24), settings(page, layout))
    answer = oracle(inputs.q, inputs.kv, inputs.batch, inputs.spec)
    for index, (row, query_len, kv_len) in enumerate(inputs.batch.spans()):
        keys, values = sequence_kv(inputs.kv, inputs.batch, index, kv_len)
        mask = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len)
        wanted = F.scaled_dot_product_attention(
            inputs.q[row : row + query_len].double().transpose(0, 1),
            keys.double().repeat_interleave(3, dim=1).transpose(0, 1),
            values.double().repeat_interleave(3, dim=1).transpose(0, 1),
            attn_mask=mask,
        ).transpose(0, 1)
        torch.testing.assert_close(answer[row : row + query_len], wanted, rtol=1e-12, atol=1e-13)


def test_chunks_do_not_change_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(parse_point("2*9@200"), AttentionSpec(8, 4, 16), settings())
    whole = oracle(inputs.q, inputs.kv, inputs.batch, inputs.spec)
    monkeypatch.setattr("kbench.ops.attention._CHUNK_ELEMENTS", 3_300)
    chunked = oracle(inputs.q, inputs.kv, inputs.batch, inputs.spec)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-14)


def test_the_same_mathematics_stays_in_the_dtype_of_the_case() -> None:
    spec = AttentionSpec(4, 2, 32)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        inputs = build(parse_point("2*1@500"), spec, settings(dtype=dtype))
        plain = same_dtype(inputs.q, inputs.kv, inputs.batch, spec, torch.empty_like(inputs.q))
        exact = oracle(inputs.q, inputs.kv, inputs.batch, spec)
        errors[dtype] = float((plain.double() - exact).norm() / exact.norm())
        assert plain.dtype == dtype
    assert errors[torch.float32] < 1e-6 < 1e-3 < errors[torch.bfloat16] < 2e-2


def test_a_row_that_sees_no_key_is_zero() -> None:
    spec = AttentionSpec(2, 1, 16)
    pool = torch.full((2, 16, 1, 16), float("nan"))
    batch = AttentionBatch.build([1, 1], [0, 0], [[], []], CPU)
    answer = oracle(torch.randn(2, 2, 16), PagedKV(pool, pool, 16, "NHD"), batch, spec)
    assert torch.equal(answer, torch.zeros_like(answer))


def test_the_batch_pads_tables_with_the_null_page() -> None:
    batch = AttentionBatch.build([1, 3], [20, 3], [[7, 4], [2]], CPU)
    assert batch.block_table.tolist() == [[7, 4], [2, 0]]
    assert batch.query_start.tolist() == [0, 1, 4] and batch.block_table.dtype == torch.int32
    assert (batch.max_query, batch.max_kv, batch.tokens, batch.is_decode) == (3, 20, 4, False)
    assert list(batch.spans()) == [(0, 1, 20), (1, 3, 3)]


def test_cost_counts_actual_lengths_only() -> None:
    spec = AttentionSpec(32, 8, 128)
    decode = build_batch([1] * 32, [4_096] * 32)
    kv_bytes = 2 * 32 * 4_096 * 8 * 128 * 2
    rows = 32 * 32 * 128 * 2
    assert cost(decode, spec, 2).bytes_read == kv_bytes + rows
    assert cost(decode, spec, 2).bytes_written == rows
    assert cost(decode, spec, 2).flops == 4 * 32 * 4_096 * 32 * 128
    assert cost(build_batch([4], [4]), spec, 2).flops == 4 * (1 + 2 + 3 + 4) * 32 * 128
    assert cost(build_batch([2], [5]), spec, 2).flops == 4 * (4 + 5) * 32 * 128


def build_batch(query_lens: list[int], kv_lens: list[int]) -> AttentionBatch:
    return AttentionBatch.build(query_lens, kv_lens, [[1]] * len(kv_lens), CPU)
