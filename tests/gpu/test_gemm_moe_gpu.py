"""Matrix products and experts on a CUDA device: every implementation at model shapes and edges, capture, guard rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kbench.catalog import Implementation, implementation, implementations, model_shape, parse_shape, resolve_shape
from kbench.clock.cuda import GraphTimer
from kbench.clock.profiler import profile_kernels
from kbench.kernels.registry import load
from kbench.kernels.verify import Verification, poison, verify
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.protocol import Status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # what torch's compiler warns about is not about us
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PROJECTIONS = ("gemm.qkv", "gemm.o", "gemm.gate_up", "gemm.down")
MOE = ("moe.router", "moe.permute", "moe.grouped_gemm", "moe.fused")
SMALL = {
    "gemm": "m=37,n=160,k=264",
    "moe.router": "tokens=33,experts=128,top_k=8",
    "moe.permute": "tokens=33,experts=16,top_k=4,hidden=200",
    "moe.grouped_gemm": "tokens=65,experts=8,top_k=2,n=200,k=328,routing=zipf",
    "moe.fused": "tokens=33,experts=16,top_k=4,hidden=136,intermediate=96,routing=zipf",
}
OURS = [(impl, op) for impl in implementations() if "cuda" in impl.devices for op in SMALL if impl.serves(op)]


def held(
    impl: Implementation, op: str, shape: str, dtype: str = "bfloat16", model: str = "", *, thorough: bool = True
) -> Verification:
    settings = InputSettings(16, "NHD", DTYPES[dtype], torch.device("cuda"), 11)
    resolved = resolve_shape(op, parse_shape(shape), model_shape(model) if model else None)
    with torch.inference_mode():
        return verify(load(impl.name, op), load_op(op), resolved, settings, thorough=thorough)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("impl", "op"), OURS, ids=lambda value: getattr(value, "name", value))
def test_every_implementation_is_right_on_all_edges(impl: Implementation, op: str, dtype: str) -> None:
    if dtype not in impl.dtypes:
        pytest.skip(f"{impl.name} does not do {dtype}")
    found = held(impl, op, SMALL[op], dtype)
    assert found.status is Status.OK, found.message
    assert found.facts["null_models_killed"] == found.facts["null_models"] >= 4
    assert found.facts["edge_cases_passed"] == found.facts["edge_cases"] >= 10


@pytest.mark.parametrize("point", ["1*1@4096", "17*1@4096", "33*1@4096", "128*1@4096", "1*1024"])
@pytest.mark.parametrize("op", PROJECTIONS)
@pytest.mark.parametrize("name", [impl.name for impl in implementations("gemm")])
def test_projections_of_llama(name: str, op: str, point: str) -> None:
    impl = implementation(name, op)
    if "cuda" not in impl.devices:
        pytest.skip("not for CUDA")
    found = held(impl, op, point, model="llama-3-8b", thorough=False)
    assert found.status is Status.OK, found.message


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("gemm.lm_head", "32*1@4096"),
        ("gemm.qkv", "32*1@4096,layout=nn"),
        ("gemm.o", "1*300,layout=tn"),
        ("gemm", "m=4000,n=4000,k=4000"),
        ("gemm", "m=4096,n=4096,k=4096"),
        ("gemm", "m=33,n=4096,k=511"),
        ("gemm", "m=300,n=500,k=4096"),
    ],
)
@pytest.mark.parametrize("name", ["torch-gemm", "torch-gemm-packed", "triton-gemm"])
def test_large_thin_and_misaligned_products(name: str, op: str, shape: str) -> None:
    found = held(implementation(name, op), op, shape, model="llama-3-8b", thorough=False)
    assert found.status is Status.OK, found.message


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("shape", ["1*1@4096", "32*1@4096", "32*1@4096,routing=hot", "1*512,routing=zipf"])
@pytest.mark.parametrize("op", MOE)
def test_experts_of_published_models(op: str, shape: str, model: str) -> None:
    for impl, own in OURS:
        if own == op:
            found = held(impl, op, shape, model=model, thorough=False)
            assert found.status is Status.OK, f"{impl.name}: {found.message}"


@pytest.mark.parametrize(
    ("name", "op", "shape"),
    [
        ("triton-grouped", "moe.grouped_gemm", "tokens=64,experts=8,top_k=2,n=256,k=512"),
        ("torch-grouped-mm", "moe.grouped_gemm", "tokens=64,experts=8,top_k=2,n=256,k=512"),
        ("triton-permute", "moe.permute", "tokens=64,experts=8,top_k=2,hidden=256"),
        ("torch-permute", "moe.permute", "tokens=64,experts=8,top_k=2,hidden=256"),
        ("triton-router", "moe.router", "tokens=64,experts=8,top_k=2"),
        ("triton-moe", "moe.fused", "tokens=64,experts=8,top_k=2,hidden=256,intermediate=128"),
    ],
)
def test_a_captured_call_follows_a_routing_that_changes_under_it(name: str, op: str, shape: str) -> None:
    """Captured while loads were even, replayed while two experts have everything: nothing was decided on the host."""
    own, device = load_op(op), torch.device("cuda")
    settings = InputSettings(16, "NHD", torch.bfloat16, device, 3)
    even = own.build(resolve_shape(op, parse_shape(shape), None), settings)[0]
    hot = own.build(resolve_shape(op, parse_shape(f"{shape},routing=hot"), None), settings)[0]
    with torch.inference_mode():
        steps = own.bind(load(name, op), even)
        state = steps.convert()
        plan, out = steps.plan(state), own.outputs(even)
        latest: list[Any] = []
        timer = GraphTimer(device)
        timer.prepare([lambda: latest.append(steps.run(state, plan, out))])
        for argument, value in hot.arguments.items():
            if isinstance(value, torch.Tensor):
                even.arguments[argument].copy_(value)
        poison(out, float("nan"))
        timer.round()
        torch.cuda.synchronize()
        judgement = own.judge(latest[-1], own.standard(hot))
    assert judgement.ok, judgement.problem


@pytest.mark.parametrize(("impl", "op"), OURS, ids=lambda value: getattr(value, "name", value))
def test_the_kernel_that_was_named_is_the_one_that_ran(impl: Implementation, op: str) -> None:
    if not impl.expects_kernel:
        pytest.skip("it names no kernel")
    own, device = load_op(op), torch.device("cuda")
    inputs = own.build(
        resolve_shape(op, parse_shape(SMALL[op]), None), InputSettings(16, "NHD", torch.bfloat16, device, 3)
    )[0]
    with torch.inference_mode():
        steps = own.bind(load(impl.name, op), inputs)
        state = steps.convert()
        plan, out = steps.plan(state), own.outputs(inputs)
        timer = GraphTimer(device)
        timer.prepare([lambda: steps.run(state, plan, out)])
        profile = profile_kernels(timer.witnessed, timer.round_calls, device)
    assert profile is not None and any(impl.expects_kernel in name for name in profile.names), profile
