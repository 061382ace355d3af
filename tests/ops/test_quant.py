"""fp8 rows: rounding against torch's own conversion, the contract for zeros and extremes, and what is judged wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kbench.catalog import parse_shape, resolve_shape
from kbench.ops.base import InputSettings
from kbench.ops.quant import FP8, nearest, scales
from kbench.ops.registry import load_op
from kbench.ops.tensors import TensorInputs

OP = "quant.per_token_fp8"


def made(kind: str = "random", dtype: torch.dtype = torch.float32) -> TensorInputs:
    shape = resolve_shape(OP, parse_shape("rows=3,hidden=64"), None)
    settings = InputSettings(16, "NHD", dtype, torch.device("cpu"), 3)
    inputs: TensorInputs = load_op(OP).build(shape, settings, kind)[0]
    return inputs


def test_every_number_of_the_format_is_its_own_nearest() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    numbers = numbers[torch.isfinite(numbers)]
    assert torch.equal(nearest(numbers), numbers)


@given(st.floats(-448.0, 448.0, allow_nan=False, width=32))
def test_rounding_is_that_of_torch(value: float) -> None:
    own = torch.tensor([value], dtype=torch.float64)
    assert float(nearest(own)) == float(own.float().to(FP8).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["random", "large", "small", "outlier", "zero row", "strided"])
def test_values_times_scale_are_the_row(kind: str, dtype: torch.dtype) -> None:
    inputs = made(kind, dtype)
    x = inputs.arguments["x"].double()
    values, scale = load_op(OP).exact(inputs)
    assert values.abs().max() <= 448.0 and (scale > 0).all()
    step = torch.maximum(values.abs() / 16, torch.full_like(values, 2.0**-10)) * scale[:, None]
    assert ((values * scale[:, None] - x).abs() <= step * 1.001).all()


def test_a_row_of_zeros_may_have_any_positive_scale() -> None:
    op, inputs = load_op(OP), made("zero row")
    standard = op.standard(inputs)
    values, scale = op.plain(inputs)
    assert not values[0].double().any()
    for own, right in ((1.0, True), (1e-12, True), (0.0, False), (float("inf"), False), (float("nan"), False)):
        scale[0] = own
        assert op.judge((values, scale), standard).ok == right, own


def test_a_nan_or_a_scale_of_its_own_is_wrong() -> None:
    op, inputs = load_op(OP), made()
    standard = op.standard(inputs)
    values, scale = op.plain(inputs)
    assert op.judge((values, scale), standard).ok
    broken = values.clone()
    broken[1, 5] = float("nan")
    assert "NaN in row 1" in op.judge((broken, scale), standard).problem
    assert "scale" in op.judge((values, scale * 1.01), standard).problem
    assert "dtype" in op.judge((values.float(), scale), standard).problem
    assert torch.equal(scales(inputs.arguments["x"]), scale)
