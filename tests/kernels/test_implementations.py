from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kbench.catalog import implementations, parse_point
from kbench.kernels.base import Attention
from kbench.kernels.registry import load
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV
from kbench.ops.base import InputSettings
from kbench.ops.correctness import judge, standard
from kbench.ops.inputs import build
from kbench.protocol import Status

from .holding import hold

CPU = torch.device("cpu")
SPEC = AttentionSpec(8, 2, 32)
PAGED = ("attention.decode", "attention.prefill")
ON_CPU = [(impl.name, op) for impl in implementations() if "cpu" in impl.devices for op in impl.ops if op in PAGED]


def settings(page: int, layout: str, dtype: torch.dtype = torch.float32) -> InputSettings:
    return InputSettings(page, layout, dtype, CPU, 11)  # type: ignore[arg-type]


def call(
    implementation: Attention, q: torch.Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec
) -> torch.Tensor:
    kv = implementation.convert(kv)
    return implementation.run(q, kv, implementation.plan(batch, spec, kv), torch.full_like(q, float("nan")))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("name", "op"), ON_CPU)
def test_every_implementation_is_right_on_the_point_and_on_the_edges(
    name: str, op: str, page: int, layout: str
) -> None:
    point = parse_point("3*1@127+1*1@300" if op == "attention.decode" else "2*5@77+1*1@300+1*40")
    verdict = hold(load(name, op), op, point, SPEC, settings(page, layout))
    assert verdict.status is Status.OK, verdict.message
    assert verdict.facts["null_models_killed"] == verdict.facts["null_models"] >= 5
    assert verdict.facts["edge_cases_passed"] == verdict.facts["edge_cases"] == 8
    assert verdict.facts["rel_l2"] <= verdict.facts["limit"]
    assert set(verdict.scopes_us) == {"convert", "plan", "first_call"} and min(verdict.scopes_us.values()) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "op"), ON_CPU)
def test_every_implementation_is_right_in_half_precision(name: str, op: str, dtype: torch.dtype) -> None:
    point = parse_point("2*1@127" if op == "attention.decode" else "1*9@60")
    verdict = hold(load(name, op), op, point, SPEC, settings(16, "NHD", dtype))
    assert verdict.status is Status.OK, verdict.message


@pytest.mark.parametrize("spec", [AttentionSpec(1, 1, 16), AttentionSpec(7, 1, 24), AttentionSpec(6, 6, 40)], ids=str)
@pytest.mark.parametrize(("name", "op"), ON_CPU)
def test_odd_heads_and_head_sizes(name: str, op: str, spec: AttentionSpec) -> None:
    point = parse_point("1*1@50+1*1@33" if op == "attention.decode" else "1*3@50+1*33")
    verdict = hold(load(name, op), op, point, spec, settings(16, "NHD"))
    assert verdict.status is Status.OK, verdict.message


@pytest.mark.parametrize("name", ["reference", "sdpa-gather", "blocked"])
def test_a_padding_row_without_keys_is_zero(name: str) -> None:
    """Graph-mode batches are padded to a captured size with sequences of length 0."""
    inputs = build(parse_point("1*1@40"), SPEC, settings(16, "NHD"))
    table = inputs.batch.block_table[0].tolist()
    batch = AttentionBatch.build([1, 1, 1], [40, 0, 0], [table, [], []], CPU)
    q = torch.cat([inputs.q, torch.randn(2, SPEC.q_heads, SPEC.head_dim)])
    answer = call(load(name, "attention.decode"), q, inputs.kv, batch, SPEC)
    assert judge(answer[:1].clone(), standard(inputs)).ok
    assert torch.equal(answer[1:], torch.zeros_like(answer[1:]))


def test_a_plan_serves_many_calls_and_keeps_no_answer() -> None:
    inputs, other = (build(parse_point("2*1@100"), SPEC, settings(16, "NHD"), kind) for kind in ("random", "needle"))  # type: ignore[arg-type]
    for name in ("reference", "sdpa-gather", "blocked"):
        implementation = load(name, "attention.decode")
        plan = implementation.plan(inputs.batch, SPEC, inputs.kv)
        for chosen in (inputs, other, inputs):
            out = torch.full_like(chosen.q, float("nan"))
            assert judge(implementation.run(chosen.q, chosen.kv, plan, out), standard(chosen)).ok, name


def test_blocked_decode_agrees_with_torch_over_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with one torch call on the unpaged tensors, with tiles so small that there are dozens."""
    monkeypatch.setattr("kbench.kernels.blocked.TILE_BYTES", 1 << 14)
    lengths = [1_000, 17, 400]
    keys, values = (torch.randn(3, 1_008, 2, 32, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    pool = PagedKV(keys.reshape(-1, 16, 2, 32), values.reshape(-1, 16, 2, 32), 16, "NHD")
    tables = [[63 * row + page for page in range(-(-length // 16))] for row, length in enumerate(lengths)]
    q = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(3))
    batch = AttentionBatch.build([1] * 3, lengths, tables, CPU)
    blocked = load("blocked", "attention.decode")
    plan = blocked.plan(batch, SPEC, pool)
    assert len(plan.tiles) > 20  # type: ignore[attr-defined]
    answer = blocked.run(q, pool, plan, torch.empty_like(q))
    for row, length in enumerate(lengths):
        wanted = F.scaled_dot_product_attention(
            q[row][:, None], keys[row, :length].transpose(0, 1), values[row, :length].transpose(0, 1), enable_gqa=True
        )[:, 0]
        torch.testing.assert_close(answer[row], wanted, rtol=1e-5, atol=1e-6)


def test_blocked_decode_visits_only_sequences_that_reach_a_tile() -> None:
    inputs = build(parse_point("1*1@4096+7*1@32"), AttentionSpec(8, 8, 128), settings(16, "NHD"))
    plan = load("blocked", "attention.decode").plan(inputs.batch, inputs.spec, inputs.kv)
    assert plan.tiles[0].active == 8  # type: ignore[attr-defined]
    assert {tile.active for tile in plan.tiles[2:]} == {1}  # type: ignore[attr-defined]
