"""SiLU of one half times the other: the activation of gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from kbench.catalog import Resolved
from kbench.ops.base import Cost, Edge, InputSettings, Outputs
from kbench.ops.norm import draw
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, rows_cost

AWKWARD_WIDTHS = (1, 111, 500, 1_024)


class SiluMul(TensorOp):
    """x `[rows, 2 * intermediate]`, the gate first, then up → silu(gate) * up, silu(g) = g / (1 + exp(-g))."""

    arguments: ClassVar[tuple[str, ...]] = ("x",)

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        rows, width = shape.integer("rows"), shape.integer("intermediate")
        x = draw((rows, 2 * width), settings, generator)
        if kind == "large":
            x = x * (30.0 if settings.dtype == torch.float16 else 1e4)  # exp of these overflows
        if kind == "strided":
            x = draw((rows, 4 * width), settings, generator)[:, : 2 * width]
        if kind == "zero row":
            x[0] = 0.0
        return TensorInputs(shape, {"x": x}, {"x": "activation"}, settings.dtype)

    def exact(self, inputs: TensorInputs) -> Outputs:
        gate, up = inputs.arguments["x"].double().chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up,)

    def plain(self, inputs: TensorInputs) -> Outputs:
        gate, up = inputs.arguments["x"].chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up,)

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        gate, up = own.inputs.arguments["x"].double().chunk(2, dim=-1)
        late = own.expected[0].roll(1, -1)
        return {
            **super().wrong(own),
            "gate and up swapped": (up * torch.sigmoid(up) * gate,),
            "sigmoid": (torch.sigmoid(gate) * up,),
            "GELU": (torch.nn.functional.gelu(gate) * up,),
            "up left out": (gate * torch.sigmoid(gate),),
            "one element late": (late,),
        }

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=3)
        return (
            *(Edge(f"width {width}", small.with_axes(intermediate=width)) for width in AWKWARD_WIDTHS),
            Edge("one row", shape.with_axes(rows=1)),
            Edge("no row", shape.with_axes(rows=0)),
            Edge("large values", small, "large"),
            Edge("a row of zeros", small, "zero row"),
            Edge("strided rows", small, "strided"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        x = inputs.arguments["x"]
        return rows_cost(5 * x.numel() // 2, (x,), self.outputs(inputs))

    def outputs(self, inputs: TensorInputs) -> Outputs:
        x = inputs.arguments["x"]
        return (torch.empty((len(x), x.shape[1] // 2), dtype=x.dtype, device=x.device),)
