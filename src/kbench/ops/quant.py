"""Rows to 8-bit floating point, with a scale each.

x `[rows, hidden]` → (values float8_e4m3fn `[rows, hidden]`, scale float32 `[rows]`): scale = max|x| / 448, values =
x / scale rounded to the nearest, so that x ≈ values * scale and nothing overflows. A row of zeros gives zeros and any
finite scale above 0. What a value of exactly half-way rounds to is not judged: its error is below the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops.base import Cost, Edge, InputSettings, Judgement, Outputs, form_problem
from kbench.ops.norm import draw
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, judge_rows, rows_cost

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_FLOOR = 3e-2
"""Relative L2 of the values: two roundings to the nearest differ by less, truncation and a lost bit by more."""
SCALE_LIMIT = 1e-6
AWKWARD_WIDTHS = (1, 111, 500, 1_024)


class PerTokenFp8(TensorOp):
    """Symmetric, one scale a row."""

    arguments: ClassVar[tuple[str, ...]] = ("x",)
    names = ("values", "scale")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        rows, hidden = shape.integer("rows"), shape.integer("hidden")
        x = draw((rows, hidden), settings, generator)
        if kind == "large":
            x = (x.double() / x.double().abs().amax() * _largest(settings.dtype)).to(settings.dtype)
        if kind == "small":
            x = x * (1e-4 if settings.dtype == torch.float16 else 1e-30)
        if kind == "outlier":
            x[:, 0] = -30_000.0
        if kind == "strided":
            x = draw((rows, 2 * hidden), settings, generator)[:, :hidden]
        if kind == "zero row":
            x[0] = 0.0
        return TensorInputs(shape, {"x": x}, {"x": "activation"}, settings.dtype)

    def exact(self, inputs: TensorInputs) -> Outputs:
        x = inputs.arguments["x"].double()
        scale = scales(x)
        return nearest(x / scale[:, None]), scale

    def plain(self, inputs: TensorInputs) -> Outputs:
        x = inputs.arguments["x"].float()
        scale = scales(x)
        return (x / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale

    def standard(self, inputs: TensorInputs) -> TensorStandard:
        return TensorStandard(inputs, self.exact(inputs), (FP8_FLOOR, SCALE_LIMIT))

    def judge_output(self, place: int, have: object, form: Tensor, against: TensorStandard) -> Judgement:
        limit = against.limits[place]
        problem = form_problem(have, form)
        if problem or not isinstance(have, Tensor):
            return Judgement(float("inf"), limit, f"{self.names[place]}: {problem}")
        value, expected = have.double(), against.expected[place]
        if place == 0:
            return judge_rows(value, expected, limit, "values")
        zero = ~against.inputs.arguments["x"].any(dim=-1)
        value = torch.where(zero & (value > 0) & torch.isfinite(value), expected, value)
        return judge_rows(value[:, None], expected[:, None], limit, "scale")

    def _passes(self, answer: Outputs, own: TensorStandard) -> bool:
        values = judge_rows(answer[0], own.expected[0], own.limits[0], "")
        return values.ok and judge_rows(answer[1][:, None], own.expected[1][:, None], own.limits[1], "").ok

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        x = own.inputs.arguments["x"].double()
        values, scale = own.expected
        whole = torch.full_like(scale, float(scale.max()) if len(scale) else 1.0)
        signed = (x.amax(dim=-1) / FP8_MAX).clamp_min(1e-300)
        return {
            **super().wrong(own),
            "one scale for all rows": (nearest(x / whole[:, None]), whole),
            "the largest without its sign": (nearest(x / signed[:, None]), signed),
            "scale inverted": (values, 1 / scale),
            "scale of 240": (nearest(x / scale[:, None] * (240 / FP8_MAX)), scale * (FP8_MAX / 240)),
            "truncated": (truncated(x / scale[:, None]), scale),
            "not scaled": (nearest(x), torch.ones_like(scale)),
        }

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=3)
        return (
            *(Edge(f"width {width}", small.with_axes(hidden=width)) for width in AWKWARD_WIDTHS),
            Edge("one row", shape.with_axes(rows=1)),
            Edge("no row", shape.with_axes(rows=0)),
            Edge("the dtype's largest values", small, "large"),
            Edge("tiny values", small, "small"),
            Edge("one outlier a row", small, "outlier"),
            Edge("a row of zeros", small, "zero row"),
            Edge("strided rows", small, "strided"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        x = inputs.arguments["x"]
        return rows_cost(3 * x.numel(), (x,), self.outputs(inputs))

    def outputs(self, inputs: TensorInputs) -> Outputs:
        x = inputs.arguments["x"]
        values = torch.empty(x.shape, dtype=FP8, device=x.device)
        return values, torch.empty((len(x),), dtype=torch.float32, device=x.device)


def scales(x: Tensor) -> Tensor:
    """max|x| / 448 of each row; 1 where the row is all zeros."""
    largest = x.abs().amax(dim=-1) if x.shape[-1] else x.new_zeros(len(x))
    return torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))


def nearest(x: Tensor) -> Tensor:
    """float64 rounded to the numbers of float8_e4m3fn: three bits of mantissa, exponents from -6, largest 448."""
    step = _step(x)
    return ((x / step).round() * step).clamp(-FP8_MAX, FP8_MAX)


def truncated(x: Tensor) -> Tensor:
    """Rounded towards zero."""
    step = _step(x)
    return ((x / step).trunc() * step).clamp(-FP8_MAX, FP8_MAX)


def _step(x: Tensor) -> Tensor:
    """Distance of neighbouring numbers at `x`."""
    exponent = torch.frexp(x).exponent.clamp_min(-5) - 4  # frexp: x = mantissa * 2^exponent, 1/2 <= mantissa < 1
    return torch.ldexp(torch.ones_like(x), exponent)


def _largest(dtype: torch.dtype) -> float:
    return 60_000.0 if dtype == torch.float16 else 1e30
