"""Matrix products: the oracle beside torch's own, storage orders, what each wrong model meets, guard rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kbench.catalog import Point, Resolved, model_shape, operation, parse_point, parse_shape, resolve_shape
from kbench.ops.base import InputSettings
from kbench.ops.gemm import Gemm
from kbench.ops.guards import GUARD_ROWS, guard_problem, guarded, surrounded
from kbench.ops.registry import load_op
from kbench.ops.tensors import TensorInputs

OP = Gemm()


def shape(text: str) -> Resolved:
    return resolve_shape("gemm", parse_shape(text), None)


def settings(dtype: torch.dtype = torch.float32, seed: int = 3) -> InputSettings:
    return InputSettings(16, "NHD", dtype, torch.device("cpu"), seed)


def built(text: str, kind: str = "random", dtype: torch.dtype = torch.float32) -> TensorInputs:
    return OP.build(shape(text), settings(dtype), kind)[0]


@given(
    st.integers(0, 9),
    st.integers(1, 20),
    st.integers(0, 20),
    st.sampled_from(("nt", "nn", "tn")),
    st.sampled_from(OP.kinds),
)
def test_the_oracle_is_a_linear_layer(m: int, n: int, k: int, layout: str, kind: str) -> None:
    inputs = built(f"m={m},n={n},k={k},layout={layout}", kind)
    x, weight = inputs.arguments["x"], inputs.arguments["weight"]
    wanted = torch.nn.functional.linear(x.double(), weight.double())
    torch.testing.assert_close(OP.exact(inputs)[0], wanted, rtol=1e-12, atol=1e-12)


def test_the_layout_is_told_by_strides_alone() -> None:
    strides = {}
    for layout in ("nt", "nn", "tn"):
        given_ = built(f"m=5,n=7,k=3,layout={layout}").arguments
        assert given_["x"].shape == (5, 3) and given_["weight"].shape == (7, 3)
        strides[layout] = given_["x"].stride(), given_["weight"].stride()
    assert strides == {"nt": ((3, 1), (3, 1)), "nn": ((3, 1), (1, 7)), "tn": ((1, 5), (1, 7))}
    values = [built(f"m=5,n=7,k=3,layout={layout}").arguments["weight"] for layout in ("nt", "nn")]
    assert torch.equal(*values), "the same numbers in another order"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", ["m=5,n=96,k=64", "m=32,n=64,k=4096", "m=3,n=4096,k=32", "m=8,n=24,k=24"])
def test_every_wrong_model_is_rejected(size: str, dtype: torch.dtype) -> None:
    standards = tuple(OP.standard(built(size, kind, dtype)) for kind in OP.kinds)
    report = OP.nulls(standards)
    assert not report.survived and report.total >= 6


def test_random_inputs_alone_would_not_see_a_lost_column() -> None:
    """The needle is there for a reason: one of many columns is far below what bfloat16 rounds away."""
    plain, needle = (OP.standard(built("m=1,n=500000,k=16", kind, torch.bfloat16)) for kind in OP.kinds)
    name = "last column not computed"
    assert name in OP.nulls((plain,)).survived
    assert name in OP.nulls((needle,)).killed


def test_nothing_in_nothing_out() -> None:
    assert OP.exact(built("m=0,n=4,k=8"))[0].shape == (0, 4)
    empty_sum = OP.exact(built("m=2,n=4,k=0"))[0]
    assert empty_sum.shape == (2, 4) and not empty_sum.any()


def test_the_cost_of_a_product() -> None:
    cost = OP.cost(built("m=3,n=5,k=7", dtype=torch.bfloat16))
    assert cost.flops == 2 * 3 * 5 * 7
    assert (cost.bytes_read, cost.bytes_written) == (2 * (3 * 7 + 5 * 7), 2 * 3 * 5)
    assert OP.streamed_bytes(built("m=3,n=5,k=7", dtype=torch.bfloat16)) == 2 * 5 * 7


def test_guard_rows_tell_who_wrote_over_them() -> None:
    inside = guarded(3, 4, torch.bfloat16, torch.device("cpu"))
    inside.fill_(float("nan"))
    assert guard_problem(inside) == ""
    whole = torch.as_strided(inside, (3 + 2 * GUARD_ROWS, 4), (4, 1), 0)
    whole[GUARD_ROWS + 3, 1] = 0.0
    assert guard_problem(inside) == "rows after the last were written"
    whole[GUARD_ROWS - 1, 3] = 0.0
    assert guard_problem(inside) == "rows before the first were written"
    assert guard_problem(torch.zeros(3, 4)) == "", "an answer in memory of its own has no guards"


def test_an_answer_that_spills_over_is_rejected() -> None:
    inputs = built("m=3,n=4,k=8")
    own = OP.standard(inputs)
    out = OP.outputs(inputs)[0]
    out.copy_(OP.plain(inputs)[0])
    assert OP.judge(out, own).ok
    torch.as_strided(out, (4, 4), (4, 1), out.storage_offset())[3] = 1.0
    assert "rows after the last" in OP.judge(out, own).problem


def test_surrounded_values_are_the_same_in_a_frame_of_nan() -> None:
    values = torch.arange(6.0).view(2, 3)
    inside = surrounded(values)
    assert torch.equal(inside, values) and inside.stride() == (11, 1)
    assert torch.as_strided(inside, (2, 4), (11, 1))[:, 3].isnan().all()


@pytest.mark.parametrize(
    ("op", "n", "k"),
    [
        ("gemm.qkv", 6_144, 4_096),
        ("gemm.o", 4_096, 4_096),
        ("gemm.gate_up", 28_672, 4_096),
        ("gemm.down", 4_096, 14_336),
        ("gemm.lm_head", 128_256, 4_096),
    ],
)
def test_llama_projections_have_their_published_sizes(op: str, n: int, k: int) -> None:
    point: Point = parse_point("30*1@500+1*34")
    axes = operation(op).derive(model_shape("llama-3-8b"), point)
    assert axes == {"m": 64, "n": n, "k": k}
    assert isinstance(load_op(op), Gemm)


def test_a_long_sum_may_be_taken_one_term_after_the_other() -> None:
    """A library that sums in blocks errs by less than an honest loop over k: the loop is right, half of k is not."""
    op = load_op("gemm")
    shape = resolve_shape("gemm", parse_shape("m=3,n=40,k=5000"), None)
    for seed in range(1, 6):
        settings = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), seed)
        inputs = op.build(shape, settings, "needle")[0]
        x, weight = inputs.arguments["x"], inputs.arguments["weight"]
        one_by_one = torch.zeros(3, 40)
        for place in range(5000):
            one_by_one += x[:, place, None] * weight[None, :, place]
        own = op.standard(inputs)
        assert op.judge(one_by_one, own).ok
        assert not op.judge((x[:, ::2] @ weight[:, ::2].t()), own).ok
