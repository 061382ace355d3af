"""Attention by backend, with features, latent, merged, and the fused norms, on a CUDA device."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from kbench.catalog import Implementation, implementation, implementations, parse_shape, resolve_shape
from kbench.kernels.registry import load
from kbench.kernels.verify import Verification, verify
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.protocol import Status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # what torch's compiler warns about is not about us
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LLAMA = "q_heads=32,kv_heads=8,head_dim=128"
POINTS = {"attention.decode": "3*1@127+1*1@1500", "attention.prefill": "1*60@300+1*200"}
FEATURES = {"window": "window=100", "softcap": "softcap=30", "sinks": "sinks=1", "lse": "lse=1"}
TENSOR_SHAPES = {
    "attention.mla_decode": "3*1@127+1*1@1500",
    "attention.cascade_merge": "rows=32,heads=32,head_dim=128,parts=4",
    "norm.rmsnorm": "rows=32,hidden=4096",
    "norm.add_rmsnorm": "rows=32,hidden=4096",
}


def held(name: str, op: str, shape: str, dtype: str, page: int = 16, layout: str = "NHD") -> Verification:
    settings = InputSettings(page, layout, DTYPES[dtype], torch.device("cuda"), 11)  # type: ignore[arg-type]
    with torch.inference_mode():
        return verify(load(name, op), load_op(op), resolve_shape(op, parse_shape(shape), None), settings)


def on_cuda(*ops: str) -> list[Any]:
    def absent(known: Implementation) -> list[str]:
        return [package for package in known.requires if importlib.util.find_spec(package) is None]

    return [
        pytest.param(
            known.name,
            op,
            marks=pytest.mark.skipif(bool(absent(known)), reason=f"{', '.join(absent(known))} is not installed"),
            id=f"{known.name}-{op}",
        )
        for known in implementations()
        if "cuda" in known.devices
        for op in known.ops
        if op in ops
    ]


@pytest.mark.parametrize(("name", "op"), on_cuda("attention.decode", "attention.prefill"))
def test_plain_attention_is_right_and_so_are_pages_beyond_two_to_the_31(name: str, op: str) -> None:
    known = implementation(name)
    page = 256 if known.page_multiple_of == 256 else 16
    for dtype in known.dtypes:
        found = held(name, op, f"{POINTS[op]},{LLAMA}", dtype, page, known.layouts[0])
        assert found.status is Status.OK, (dtype, found.message)
        assert found.facts["null_models_killed"] == found.facts["null_models"] >= 5
        assert set(found.facts.get("edge_cases_skipped", {})) <= {"pages beyond 2^31 elements"}


@pytest.mark.parametrize(("name", "op"), on_cuda("attention.decode", "attention.prefill"))
def test_every_declared_feature_is_right(name: str, op: str) -> None:
    known = implementation(name)
    page = 256 if known.page_multiple_of == 256 else 16
    for feature in known.features:
        found = held(name, op, f"{POINTS[op]},{LLAMA},{FEATURES[feature]}", "bfloat16", page, known.layouts[0])
        assert found.status is Status.OK, (feature, found.message)
    together = ",".join(FEATURES[feature] for feature in known.features)
    if len(known.features) > 1:
        found = held(name, op, f"{POINTS[op]},{LLAMA},{together}", "bfloat16", page, known.layouts[-1])
        assert found.status is Status.OK, (together, found.message)


@pytest.mark.parametrize(("name", "op"), on_cuda(*TENSOR_SHAPES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_merges_and_norms_are_right(name: str, op: str, dtype: str) -> None:
    if dtype not in implementation(name).dtypes:
        pytest.skip(f"{name} does not do {dtype}")
    found = held(name, op, TENSOR_SHAPES[op], dtype)
    assert found.status is Status.OK, found.message


@pytest.mark.parametrize("point", ["1*1@127", "32*1@127", "1*1@4096", "32*1@4096"])
@pytest.mark.parametrize("name", ["sdpa-cudnn", "sdpa-flash", "triton-paged-features"])
def test_the_practice_points_by_backend(name: str, point: str) -> None:
    found = held(name, "attention.decode", f"{point},{LLAMA}", "bfloat16")
    assert found.status is Status.OK, found.message


@pytest.mark.parametrize("heads", ["q_heads=7,kv_heads=1,head_dim=64", "q_heads=24,kv_heads=8,head_dim=128"])
@pytest.mark.parametrize("page", [16, 48, 128])
def test_the_triton_kernels_take_odd_groups_and_pages(heads: str, page: int) -> None:
    for name, op in (("triton-paged-features", "attention.decode"), ("triton-prefill", "attention.prefill")):
        for dtype in DTYPES:
            found = held(name, op, f"{POINTS[op]},{heads},window=70,sinks=1", dtype, page, "HND")
            assert found.status is Status.OK, (name, dtype, found.message)
