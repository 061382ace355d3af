"""SiLU-mul against torch.nn.functional and the gated MLP of transformers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from kbench.catalog import parse_shape, resolve_shape
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.ops.tensors import TensorInputs


def made(rows: int, width: int, kind: str = "random", dtype: torch.dtype = torch.float32) -> TensorInputs:
    shape = resolve_shape("activation.silu_mul", parse_shape(f"rows={rows},intermediate={width}"), None)
    settings = InputSettings(16, "NHD", dtype, torch.device("cpu"), 3)
    inputs: TensorInputs = load_op("activation.silu_mul").build(shape, settings, kind)[0]
    return inputs


@given(
    rows=st.integers(1, 4), width=st.integers(1, 40), kind=st.sampled_from(["random", "large", "zero row", "strided"])
)
def test_it_is_the_gate_of_transformers_times_up(rows: int, width: int, kind: str) -> None:
    inputs = made(rows, width, kind)
    x = inputs.arguments["x"].double()
    expected = ACT2FN["silu"](x[:, :width]) * x[:, width:]
    torch.testing.assert_close(load_op("activation.silu_mul").exact(inputs)[0], expected)


def test_large_gates_give_no_nan() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        inputs = made(3, 64, "large", dtype)
        op = load_op("activation.silu_mul")
        assert all(torch.isfinite(value).all() for value in (*op.exact(inputs), *op.plain(inputs)))


def test_its_bytes_are_three_times_the_output() -> None:
    cost = load_op("activation.silu_mul").cost(made(4, 100))
    assert (cost.bytes_read, cost.bytes_written) == (4 * 200 * 4, 4 * 100 * 4)
