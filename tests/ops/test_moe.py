"""Experts: the oracle beside transformers' Mixtral, routings, ties, what is empty, rows that are nobody's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kbench.catalog import ROUTINGS, Resolved, parse_shape, resolve_shape
from kbench.errors import UsageError
from kbench.ops.base import InputSettings
from kbench.ops.moe import FusedMoe, GroupedGemm, ranked
from kbench.ops.routing import Permute, Router, draw_ids, scores
from kbench.ops.tensors import TensorInputs, TensorOp

SHAPES = {
    "moe.router": "tokens=33,experts=16,top_k=4",
    "moe.permute": "tokens=33,experts=8,top_k=2,hidden=24",
    "moe.grouped_gemm": "tokens=33,experts=8,top_k=2,n=40,k=48",
    "moe.fused": "tokens=33,experts=8,top_k=2,hidden=48,intermediate=40",
}
OPS: dict[str, TensorOp] = {
    "moe.router": Router(),
    "moe.permute": Permute(),
    "moe.grouped_gemm": GroupedGemm(),
    "moe.fused": FusedMoe(),
}


def shape(op: str, text: str) -> Resolved:
    return resolve_shape(op, parse_shape(text), None)


def settings(dtype: torch.dtype = torch.float32, seed: int = 3) -> InputSettings:
    return InputSettings(16, "NHD", dtype, torch.device("cpu"), seed)


def built(op: str, text: str = "", kind: str = "random", dtype: torch.dtype = torch.float32) -> TensorInputs:
    return OPS[op].build(shape(op, text or SHAPES[op]), settings(dtype), kind)[0]


# ------------------------------------------------------------------------------------------ routing


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_token_never_has_an_expert_twice(routing: str) -> None:
    own = shape("moe.permute", f"tokens=200,experts=8,top_k=3,hidden=8,routing={routing}")
    ids = draw_ids(own, torch.Generator().manual_seed(1)).sort(dim=-1).values
    assert ids.shape == (200, 3) and bool((ids[:, 1:] > ids[:, :-1]).all())


def loads(routing: str, experts: int = 8, top_k: int = 2) -> list[int]:
    own = shape("moe.permute", f"tokens=4000,experts={experts},top_k={top_k},hidden=8,routing={routing}")
    return torch.bincount(draw_ids(own, torch.Generator().manual_seed(1)).reshape(-1), minlength=experts).tolist()


def test_routings_are_what_they_say() -> None:
    even = loads("balanced")
    assert max(even) < 1.1 * min(even)
    assert loads("hot") == [4_000, 4_000, 0, 0, 0, 0, 0, 0]
    assert loads("empty")[-1] == 0 and min(loads("empty")[:-1]) > 0
    skewed = loads("zipf", top_k=1)
    assert skewed == sorted(skewed, reverse=True) and skewed[0] == pytest.approx(4_000 / 2.718, rel=0.1)


@pytest.mark.parametrize("text", ["experts=4,top_k=5", "experts=4,top_k=4,routing=empty", "experts=4,top_k=0"])
def test_more_choices_than_experts_are_an_error_of_the_user(text: str) -> None:
    with pytest.raises(UsageError, match="top_k"):
        built("moe.router", f"tokens=3,{text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("experts", [1, 8, 128, 384])
def test_ranked_logits_never_tie(experts: int, dtype: torch.dtype) -> None:
    own = shape("moe.router", f"tokens=9,experts={experts},top_k=1")
    values = scores(own, torch.Generator().manual_seed(2))
    logits = ranked(values).to(dtype)
    ordered = logits.sort(dim=-1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    assert torch.equal(logits.argsort(dim=-1), values.argsort(dim=-1))


# ------------------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("op", OPS)
def test_every_wrong_model_is_rejected(op: str, routing: str, dtype: torch.dtype) -> None:
    own = f"{SHAPES[op]},routing={routing}"
    report = OPS[op].nulls(tuple(OPS[op].standard(built(op, own, kind, dtype)) for kind in OPS[op].kinds))
    assert not report.survived and report.total >= 4


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_answer_nothing(op: str) -> None:
    text = SHAPES[op].replace("tokens=33", "tokens=0")
    inputs = built(op, text)
    own = OPS[op].standard(inputs)
    assert all(value.shape[0] == 0 or not value.any() for value in own.expected)
    assert OPS[op].judge(OPS[op].plain(inputs), own).ok


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("op", OPS)
def test_redrawn_activations_keep_the_routing(op: str, routing: str) -> None:
    """Fresh tokens choose as the case says: an expert that is empty by construction stays empty."""
    inputs = built(op, f"{SHAPES[op]},routing={routing}")
    before = [tensor.clone() for tensor in OPS[op].activations(inputs)]
    OPS[op].redraw(inputs, torch.Generator().manual_seed(9))
    assert all(not torch.equal(old, new) for old, new in zip(before, OPS[op].activations(inputs), strict=True))
    if op in ("moe.router", "moe.fused"):
        chosen = inputs.arguments["logits"].double().topk(inputs.arguments["top_k"]).indices
        top_k = inputs.arguments["top_k"]
        assert routing != "hot" or int(chosen.max()) == top_k - 1
        assert routing != "empty" or int(chosen.max()) < inputs.arguments["logits"].shape[1] - 1
    assert OPS[op].judge(OPS[op].plain(inputs), OPS[op].standard(inputs)).ok


# ------------------------------------------------------------------------------------------ router


def judged(answer: Any, inputs: TensorInputs) -> str:
    return OPS["moe.router"].judge(answer, OPS["moe.router"].standard(inputs)).problem


def test_the_router_is_the_one_of_mixtral() -> None:
    transformers = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = pytest.importorskip("transformers").MixtralConfig(
        hidden_size=16, num_local_experts=16, num_experts_per_tok=4, intermediate_size=8
    )
    router = transformers.MixtralTopKRouter(config)
    inputs = built("moe.router")
    with torch.no_grad():
        router.weight.copy_(torch.eye(16))
        _, weights, ids = router(inputs.arguments["logits"])
    assert judged((weights, ids), inputs) == ""


def test_the_order_of_experts_is_free_and_ids_may_be_narrow() -> None:
    inputs = built("moe.router")
    weights, ids = OPS["moe.router"].plain(inputs)
    assert judged((weights.flip(-1), ids.flip(-1)), inputs) == ""
    assert judged((weights, ids.int()), inputs) == ""
    assert "weights" in judged((weights.flip(-1), ids), inputs)


def test_ties_may_be_broken_either_way() -> None:
    inputs = built("moe.router", "tokens=2,experts=4,top_k=2", "equal")
    half = torch.full((2, 2), 0.5)
    assert judged((half, torch.tensor([[0, 1], [3, 2]])), inputs) == ""
    assert "twice" in judged((half, torch.tensor([[0, 1], [3, 3]])), inputs)
    assert "not an expert" in judged((half, torch.tensor([[0, 1], [3, 4]])), inputs)
    assert "not an expert" in judged((half, torch.tensor([[0, 1], [3, -1]])), inputs)


def test_a_less_probable_expert_is_named() -> None:
    inputs = built("moe.router")
    order = inputs.arguments["logits"].argsort(dim=-1, descending=True)
    weights, _ = OPS["moe.router"].plain(inputs)
    assert "less probable" in judged((weights, order[:, [0, 1, 2, 4]]), inputs)


@pytest.mark.parametrize("answer", [None, (torch.zeros(33, 4),), (torch.zeros(33, 3), torch.zeros(33, 4).long())])
def test_another_form_is_no_answer(answer: Any) -> None:
    assert judged(answer, built("moe.router")) != ""


# ------------------------------------------------------------------------------------------ permute


@given(st.integers(0, 40), st.integers(1, 12), st.data())
def test_rows_lie_in_the_range_of_their_expert(tokens: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    inputs = built("moe.permute", f"tokens={tokens},experts={experts},top_k={top_k},hidden=3")
    rows, offsets, source = OPS["moe.permute"].plain(inputs)
    flat = inputs.arguments["ids"].reshape(-1)
    for expert in range(experts):
        own = source[offsets[expert] : offsets[expert + 1]].long()
        assert set(own.tolist()) == set((flat == expert).nonzero().flatten().tolist())
        assert torch.equal(rows[offsets[expert] : offsets[expert + 1]], inputs.arguments["x"][own // top_k])
    assert int(offsets[-1]) == flat.numel()


def test_rows_of_one_expert_may_come_in_any_order() -> None:
    op, inputs = OPS["moe.permute"], built("moe.permute", kind="absent")
    own = op.standard(inputs)
    rows, offsets, source = op.plain(inputs)
    first = slice(0, int(offsets[1]))
    rows[first], source[first] = rows[first].flip(0), source[first].flip(0)
    used = int(offsets[-1])
    assert 0 < used < source.numel()
    rows[used:], source[used:] = float("nan"), -7  # what belongs to nobody holds anything
    assert op.judge((rows, offsets, source), own).ok
    source[0] = source[1]
    assert "twice" in op.judge((rows, offsets, source), own).problem


def test_a_row_of_another_token_is_found() -> None:
    op, inputs = OPS["moe.permute"], built("moe.permute")
    own = op.standard(inputs)
    rows, offsets, source = op.plain(inputs)
    rows[4, 1] += 1
    assert "1 rows are not" in op.judge((rows, offsets, source), own).problem
    rows[4, 1] -= 1
    source[0] = source[-1].clone()
    assert op.judge((rows, offsets, source), own).problem


# ------------------------------------------------------------------------------------------ grouped GEMM


def test_each_group_is_multiplied_by_its_own_weight() -> None:
    inputs = built("moe.grouped_gemm", "tokens=30,experts=5,top_k=2,n=7,k=9,routing=zipf")
    x, weight, offsets = (inputs.arguments[name] for name in OPS["moe.grouped_gemm"].arguments)
    expert = torch.arange(5).repeat_interleave(offsets.diff())
    wanted = torch.einsum("rk,rnk->rn", x.double(), weight.double()[expert])
    torch.testing.assert_close(OPS["moe.grouped_gemm"].exact(inputs)[0], wanted, rtol=1e-12, atol=1e-12)


def test_experts_are_empty_where_they_are_promised_to_be() -> None:
    def busy(kind: str, routing: str = "balanced") -> list[bool]:
        text = f"tokens=60,experts=8,top_k=2,n=4,k=4,routing={routing}"
        return (built("moe.grouped_gemm", text, kind).arguments["offsets"].diff() > 0).tolist()

    assert busy("random", "empty") == [True] * 7 + [False]
    assert busy("random", "hot") == [True] * 2 + [False] * 6
    assert busy("alternating") == [True, False] * 4
    assert busy("all absent") == [False] * 8


def guard_case() -> tuple[TensorInputs, int]:
    inputs = built("moe.grouped_gemm", "tokens=33,experts=8,top_k=2,n=40,k=48,routing=empty", "guarded")
    return inputs, int(inputs.arguments["offsets"][-1])


def test_guard_rows_beside_an_empty_expert_are_poisoned() -> None:
    inputs, used = guard_case()
    x, weight, offsets = (inputs.arguments[name] for name in OPS["moe.grouped_gemm"].arguments)
    assert x.shape[0] == used + 16 and int(offsets[-2]) == used, "the last expert ends where the guard rows begin"
    assert bool(x[-8:].isnan().all()) and bool(weight[-1].isnan().all())
    assert bool(x[:used].isfinite().all())
    assert bool(OPS["moe.grouped_gemm"].exact(inputs)[0].isfinite().all())


@pytest.mark.parametrize("poison", [float("nan"), 7.25])
def test_who_writes_a_row_of_nobody_is_found(poison: float) -> None:
    op = OPS["moe.grouped_gemm"]
    inputs, used = guard_case()
    own = op.standard(inputs)
    out = op.outputs(inputs)[0].fill_(poison)
    out[:used] = op.plain(inputs)[0][:used]
    assert op.judge(out, own).ok
    out[used:] = inputs.arguments["x"][used:] @ inputs.arguments["weight"][0].t()
    assert "nobody" in op.judge(out, own).problem


def test_the_cost_counts_rows_and_experts_that_are_there() -> None:
    inputs = built("moe.grouped_gemm", "tokens=10,experts=8,top_k=2,n=4,k=6,routing=hot", dtype=torch.bfloat16)
    cost = OPS["moe.grouped_gemm"].cost(inputs)
    assert cost.flops == 2 * 20 * 4 * 6
    assert OPS["moe.grouped_gemm"].streamed_bytes(inputs) == 2 * 2 * 4 * 6, "two of eight experts"
    assert cost.bytes_read == 2 * (2 * 4 * 6 + 20 * 6) + 9 * 4 and cost.bytes_written == 2 * 20 * 4


# ------------------------------------------------------------------------------------------ the whole layer


def test_the_layer_is_the_one_of_mixtral() -> None:
    """transformers' own block on the same weights; its router is made to see the logits of the case."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = pytest.importorskip("transformers").MixtralConfig(
        hidden_size=48, num_local_experts=8, num_experts_per_tok=2, intermediate_size=40, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    inputs = built("moe.fused")
    given_ = inputs.arguments
    experts = modeling.MixtralExperts(config).double()
    weights, ids = torch.softmax(given_["logits"].double(), dim=-1).topk(2, dim=-1)
    with torch.no_grad():
        experts.gate_up_proj.copy_(given_["gate_up"])
        experts.down_proj.copy_(given_["down"])
        wanted = experts(given_["x"].double(), ids, weights / weights.sum(dim=-1, keepdim=True))
    torch.testing.assert_close(OPS["moe.fused"].exact(inputs)[0], wanted, rtol=1e-9, atol=1e-9)


def test_an_expert_that_is_elsewhere_adds_nothing() -> None:
    inputs = built("moe.fused", kind="absent")
    place, gate_up = inputs.arguments["expert_map"], inputs.arguments["gate_up"]
    assert place.tolist() == [0, -1, 1, -1, 2, -1, 3, -1] and gate_up.shape[0] == 4
    answer = OPS["moe.fused"].exact(inputs)[0]
    ids = inputs.arguments["logits"].topk(2).indices
    nowhere = (ids % 2 == 1).all(dim=-1)
    assert 0 < int(nowhere.sum()) < 33
    assert torch.equal(nowhere, ~answer.any(dim=-1))
    assert not OPS["moe.fused"].exact(built("moe.fused", kind="all absent"))[0].any()


def test_weights_of_unused_experts_may_be_nan() -> None:
    inputs = built("moe.fused", "tokens=3,experts=64,top_k=2,hidden=16,intermediate=8", "unused")
    assert inputs.arguments["gate_up"].isnan().any() and OPS["moe.fused"].exact(inputs)[0].isfinite().all()


def test_the_cost_of_the_layer() -> None:
    inputs = built("moe.fused", "tokens=10,experts=8,top_k=2,hidden=16,intermediate=8,routing=hot")
    cost = OPS["moe.fused"].cost(inputs)
    assert cost.flops == 2 * 20 * 3 * 16 * 8
    assert OPS["moe.fused"].streamed_bytes(inputs) == 2 * 3 * 16 * 8 * 4
