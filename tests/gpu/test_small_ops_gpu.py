"""Sampling, KV movement, RoPE, SiLU-mul and fp8 on a CUDA device: all implementations, small and model shapes."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from gpu.compiled import compiled_or_skipped
from kbench.catalog import Case, implementations, model_shape, parse_shape, resolve_shape
from kbench.kernels.registry import load
from kbench.kernels.verify import verify
from kbench.measure.kernel import KernelTrial
from kbench.ops.base import InputSettings, Layout
from kbench.ops.registry import load_op
from kbench.protocol import Status
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # what torch's compiler warns about is not about us
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FAMILIES = ("sampling", "kv", "rope", "activation", "quant")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SMALL = {
    "sampling": "rows=5,vocab=3001",
    "kv": "3*1@37+1*5@20,kv_heads=2,head_dim=32",
    "rope": "tokens=5,q_heads=4,kv_heads=2,head_dim=32",
    "activation": "rows=5,intermediate=96",
    "quant": "rows=5,hidden=96",
}
MODEL = "llama-3-8b"
ALL = [
    pytest.param(impl.name, op, id=f"{impl.name}-{op}")
    for impl in implementations()
    if "cuda" in impl.devices
    for op in impl.ops
    if op.partition(".")[0] in FAMILIES and all(find_spec(package) for package in impl.requires)
]


def settings(dtype: torch.dtype, page: int = 16, layout: Layout = "NHD") -> InputSettings:
    return InputSettings(page, layout, dtype, torch.device("cuda"), 11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "op"), ALL)
def test_every_implementation_is_right(name: str, op: str, dtype: str) -> None:
    shape = resolve_shape(op, parse_shape(SMALL[op.partition(".")[0]]), None)
    with torch.inference_mode(), compiled_or_skipped(name):
        found = verify(load(name, op), load_op(op), shape, settings(DTYPES[dtype]))
    assert found.status is Status.OK, found.message


@pytest.mark.parametrize(("name", "op"), [param for param in ALL if str(param.values[1]).startswith("kv.")])
def test_other_pages_and_layouts(name: str, op: str) -> None:
    axes = ",page_to=16" if op == "kv.convert_pages" else ""
    shape = resolve_shape(op, parse_shape(SMALL["kv"] + axes), None)
    with torch.inference_mode(), compiled_or_skipped(name):
        found = verify(load(name, op), load_op(op), shape, settings(torch.bfloat16, 64, "HND"))
    assert found.status is Status.OK, found.message


@pytest.mark.parametrize(("name", "op"), ALL)
def test_every_implementation_is_right_at_model_shapes(name: str, op: str) -> None:
    shape = resolve_shape(op, parse_shape("8*1@1024"), model_shape(MODEL))
    with torch.inference_mode(), compiled_or_skipped(name):
        found = verify(load(name, op), load_op(op), shape, settings(torch.bfloat16))
    assert found.status is Status.OK, found.message


@pytest.mark.parametrize("axes", ["", ",k=0", ",k=0,p=1.0", ",k=5000", ",temperature=0.0", ",k=1"])
def test_the_fused_kernel_takes_every_path_over_a_large_vocabulary(axes: str) -> None:
    shape = resolve_shape("sampling.chain", parse_shape(f"rows=16,vocab=128256{axes}"), None)
    op = load_op("sampling.chain")
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            found = verify(load("triton-fused-sampling", op_name := "sampling.chain"), op, shape, settings(dtype))
            assert found.status is Status.OK, f"{op_name} {dtype}: {found.message}"


@pytest.mark.skipif(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="wants the device alone")
@pytest.mark.parametrize(("name", "op"), ALL)
def test_a_trial_times_it_and_believes_the_timed_calls(name: str, op: str) -> None:
    """Capture where it is declared, fresh activations, replayed answers: the whole trial."""
    arm = Arm(
        name="it",
        model=ModelSettings(preset=MODEL, dtype="bfloat16"),
        engine=EngineSettings(),
        prefill="reference",
        decode="reference",
        page_size=16,
        layout="NHD",
        seed=1,
        kernels={op: name},
        root=".",
    )
    case = Case("kernel", op, MODEL, "4*1@300")
    trial = KernelTrial(case, arm, "cuda", Measure(window_steps=3, window_ms=5.0), 1)
    prepared = trial.prepare(thorough=False)
    if "InductorError" in prepared.message and "compile" in name:
        pytest.skip(f"torch cannot compile it: {prepared.message}")
    assert prepared.status is Status.OK, prepared.message
    for _ in range(2):
        (latency,) = trial.window()
        assert latency.value > 0
    finished = trial.finish()
    assert finished.status is Status.OK, finished.message
