"""Every implementation of every operation but paged attention: right on a small shape and on all edge cases."""

from __future__ import annotations

import pytest
import torch

from kbench import catalog
from kbench.catalog import parse_shape, resolve_shape
from kbench.kernels.registry import load
from kbench.kernels.verify import Verification, verify
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.protocol import Status

PAGED = ("attention.decode", "attention.prefill")
SHAPES = {
    "attention.mla_decode": "2*1@70+1*1@33,heads=8,latent=64,rope=16",
    "attention.cascade_merge": "rows=5,heads=4,head_dim=32,parts=3",
    "norm.rmsnorm": "rows=5,hidden=96",
    "norm.add_rmsnorm": "rows=5,hidden=96",
    "gemm": "m=5,n=96,k=64",
    "moe.router": "tokens=9,experts=16,top_k=4",
    "moe.permute": "tokens=9,experts=8,top_k=2,hidden=40",
    "moe.grouped_gemm": "tokens=9,experts=8,top_k=2,n=40,k=48",
    "moe.fused": "tokens=9,experts=8,top_k=2,hidden=48,intermediate=40",
    "sampling.penalties": "rows=5,vocab=999",
    "sampling.mask": "rows=5,vocab=999",
    "sampling.top_k": "rows=5,vocab=999",
    "sampling.top_p": "rows=5,vocab=999",
    "sampling.draw": "rows=5,vocab=333,temperature=0.7",
    "sampling.chain": "rows=5,vocab=333",
    "kv.append": "3*1@37+1*5@20,kv_heads=2,head_dim=32",
    "kv.copy_pages": "3*1@37+1*5@20,kv_heads=2,head_dim=32",
    "kv.convert_pages": "3*1@37+1*5@20,kv_heads=2,head_dim=32",
    "kv.convert_layout": "3*1@37+1*5@20,kv_heads=2,head_dim=32",
    "rope": "tokens=5,q_heads=4,kv_heads=2,head_dim=32",
    "activation.silu_mul": "rows=5,intermediate=96",
    "quant.per_token_fp8": "rows=5,hidden=96",
}
"""One small shape of each operation that has an implementation."""
KERNELS = [
    pytest.param(impl.name, op, marks=[pytest.mark.slow] if impl.name.startswith("compile") else [])
    for impl in catalog.implementations()
    if "cpu" in impl.devices
    for op in impl.ops
    if op not in PAGED
]
"""A compilation takes seconds to minutes: those are slow tests."""


def held(name: str, op: str, dtype: torch.dtype) -> Verification:
    settings = InputSettings(16, "NHD", dtype, torch.device("cpu"), 3)
    return verify(load(name, op), load_op(op), resolve_shape(op, parse_shape(SHAPES[op]), None), settings)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # torch's own, when its compiler is imported
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "op"), KERNELS)
def test_an_implementation_is_right(name: str, op: str, dtype: torch.dtype) -> None:
    if str(dtype).removeprefix("torch.") not in catalog.implementation(name).dtypes:
        pytest.skip(f"{name} does not do {dtype}")
    if name.startswith("compiled-") and dtype != torch.float32:
        pytest.skip("a compilation takes seconds; the other dtypes are compiled on devices")
    found = held(name, op, dtype)
    assert found.status is Status.OK, found.message
    assert found.facts["null_models_killed"] == found.facts["null_models"] >= 1
    assert found.facts["edge_cases_passed"] == found.facts["edge_cases"] >= 3
