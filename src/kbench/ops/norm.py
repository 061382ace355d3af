"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops.base import Cost, Edge, InputSettings, Outputs
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, rows_cost

AWKWARD_WIDTHS = (1, 111, 500, 1_024)


class RmsNorm(TensorOp):
    """x `[rows, hidden]`, weight `[hidden]` → x / sqrt(mean(x²) + eps) * weight, the mean in float32 or better."""

    arguments: ClassVar[tuple[str, ...]] = ("x", "weight", "eps")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        rows, hidden = shape.integer("rows"), shape.integer("hidden")
        x = draw((rows, hidden), settings, generator)
        if kind == "large":
            x = x * 1e4 if settings.dtype != torch.float16 else x * 1e2  # squares overflow half precision
        if kind == "strided":
            x = draw((rows, 2 * hidden), settings, generator)[:, :hidden]
        if kind == "zero row":
            x[0] = 0.0
        weight = 1.0 + 0.1 * draw((hidden,), settings, generator)
        return TensorInputs(
            shape,
            {"x": x, "weight": weight, "eps": shape.number("eps")},
            {"x": "activation", "weight": "weight", "eps": "scalar"},
            settings.dtype,
        )

    def exact(self, inputs: TensorInputs) -> Outputs:
        given = inputs.arguments
        return (rms_norm(given["x"].double(), given["weight"].double(), given["eps"]),)

    def plain(self, inputs: TensorInputs) -> Outputs:
        return (rms_norm(*(inputs.arguments[name] for name in self.arguments)),)

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        given = own.inputs.arguments
        x, weight, eps = given["x"].double(), given["weight"].double(), given["eps"]
        mean = x - x.mean(dim=-1, keepdim=True)
        short = x.clone()
        short[:, -1] = 0.0
        return {
            **super().wrong(own),
            "weight left out": (rms_norm(x, torch.ones_like(weight), eps),),
            "mean subtracted": (rms_norm(mean, weight, eps),),
            "last element dropped": (rms_norm(short, weight, eps),),
        }

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=3)
        widths = tuple(Edge(f"width {width}", small.with_axes(hidden=width)) for width in AWKWARD_WIDTHS)
        return (
            *widths,
            Edge("one row", shape.with_axes(rows=1)),
            Edge("no row", shape.with_axes(rows=0)),
            Edge("large values", small, "large"),
            Edge("a row of zeros", small, "zero row"),
            Edge("strided rows", small, "strided"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        x, weight = inputs.arguments["x"], inputs.arguments["weight"]
        return rows_cost(4 * x.numel(), (x, weight), (x,))

    def outputs(self, inputs: TensorInputs) -> Outputs:
        x = inputs.arguments["x"]
        return (torch.empty(x.shape, dtype=x.dtype, device=x.device),)


class AddRmsNorm(RmsNorm):
    """x, residual `[rows, hidden]` → (RMSNorm(x + residual) * weight, x + residual); the sum is rounded to the dtype
    before it is normed, because the next layer reads it so."""

    arguments = ("x", "residual", "weight", "eps")
    names = ("normed", "residual")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        base = super().make(shape, settings, kind, generator)
        residual = draw(tuple(base.arguments["x"].shape), settings, generator)
        if kind == "zero row":
            residual[0] = 0.0
        arguments = {"x": base.arguments["x"], "residual": residual, **base.arguments}
        return TensorInputs(shape, arguments, {**base.roles, "residual": "activation"}, settings.dtype)

    def exact(self, inputs: TensorInputs) -> Outputs:
        given = inputs.arguments
        total = (given["x"] + given["residual"]).double()
        return rms_norm(total, given["weight"].double(), given["eps"]), given["x"].double() + given["residual"].double()

    def plain(self, inputs: TensorInputs) -> Outputs:
        given = inputs.arguments
        total = given["x"] + given["residual"]
        return rms_norm(total, given["weight"], given["eps"]), total

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        given = own.inputs.arguments
        alone = rms_norm(given["x"].double(), given["weight"].double(), given["eps"])
        return {
            "zeros": tuple(torch.zeros_like(value) for value in own.expected),
            "residual left out": (alone, own.expected[1]),
            "residual not updated": (own.expected[0], given["residual"].double()),
        }

    def cost(self, inputs: TensorInputs) -> Cost:
        x, residual, weight = (inputs.arguments[name] for name in ("x", "residual", "weight"))
        return rows_cost(5 * x.numel(), (x, residual, weight), (x, residual))

    def outputs(self, inputs: TensorInputs) -> Outputs:
        x = inputs.arguments["x"]
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition, in the dtype of its arguments but for the mean of squares (float32 or better)."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


def draw(shape: tuple[int, ...], settings: InputSettings, generator: torch.Generator) -> Tensor:
    """Standard normal values, rounded to the case's dtype."""
    values = torch.randn(shape, generator=generator, device=settings.device, dtype=torch.float32)
    return values.to(settings.dtype)
