"""Dense matrix products of the projections: large, thin, misaligned, in every storage order.

x `[m, k]`, weight `[n, k]` → x · weightᵀ `[m, n]`. Shapes are the same in every layout; strides tell the storage:
`nt` both row-major as written, `nn` the weight stored `[k, n]`, `tn` the weight stored `[k, n]` and x stored `[k, m]`.
No rows answer no rows; a sum over no k is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops.base import Cost, Edge, InputSettings, Judgement, Outputs
from kbench.ops.guards import guard_problem, guarded, surrounded
from kbench.ops.norm import draw
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, rows_cost

THIN = (1, 2, 3, 16, 17, 32, 33)
COARSER: Mapping[torch.dtype, torch.dtype] = {
    torch.float32: torch.bfloat16,
    torch.float16: torch.float8_e4m3fn,
    torch.bfloat16: torch.float8_e4m3fn,
}
"""What a kernel that saves precision would compute in."""


class Gemm(TensorOp):
    """The needle: the last of k carries half of every sum, the last output column half of every row."""

    kinds = ("random", "needle")
    arguments: ClassVar[tuple[str, ...]] = ("x", "weight")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        m, n, k = (shape.integer(name) for name in ("m", "n", "k"))
        layout = shape.text("layout")
        x = draw((m, k), settings, generator)
        weight = scaled(n, k, settings, generator)
        if kind == "needle":
            sharpen(x, weight)
        if kind == "zero row":
            x[:1] = 0.0
        if kind == "positive":  # a row of one sum has no other to be measured by: it must not cancel
            x, weight = x.abs(), weight.abs()
        if kind == "guarded":
            x, weight = surrounded(x), surrounded(weight)
        else:
            weight = weight if layout == "nt" else weight.t().contiguous().t()
            x = x.t().contiguous().t() if layout == "tn" else x
        return TensorInputs(shape, {"x": x, "weight": weight}, {"x": "activation", "weight": "weight"}, settings.dtype)

    def exact(self, inputs: TensorInputs) -> Outputs:
        return (inputs.arguments["x"].double() @ inputs.arguments["weight"].double().t(),)

    def plain(self, inputs: TensorInputs) -> Outputs:
        return (inputs.arguments["x"] @ inputs.arguments["weight"].t(),)

    def terms(self, inputs: TensorInputs) -> int:
        return int(inputs.arguments["x"].shape[-1])

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        x, weight = own.inputs.arguments["x"], own.inputs.arguments["weight"]
        wide, expected = weight.double().t(), own.expected[0]
        found = {**super().wrong(own), "last column not computed": (without_last(expected),)}
        if x.shape[1]:
            found["last of k dropped"] = (expected - x[:, -1:].double() * wide[-1:],)
        if x.shape[0] > 1:
            found["rows shifted by one"] = (expected.roll(1, dims=0),)
        if weight.shape[0] == weight.shape[1]:
            found["weight transposed"] = (x.double() @ weight.double(),)
        if own.inputs.dtype in COARSER:
            coarse = COARSER[own.inputs.dtype]
            found["coarser numbers inside"] = (x.to(coarse).double() @ weight.to(coarse).double().t(),)
        return found

    def judge_output(self, place: int, have: object, form: Tensor, against: TensorStandard) -> Judgement:
        judgement = super().judge_output(place, have, form, against)
        problem = guard_problem(have) if judgement.ok and isinstance(have, Tensor) else ""
        return Judgement(float("inf"), judgement.limit, f"{self.names[place]}: {problem}") if problem else judgement

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        def at(m: int, n: int, k: int, layout: str = "nt") -> Resolved:
            return shape.with_axes(m=m, n=n, k=k, layout=layout)

        return (
            *(Edge(f"{m} rows", at(m, 500, 511), "needle") for m in THIN),
            *(Edge(f"{layout}, misaligned", at(37, 111, 500, layout), "needle") for layout in ("nt", "nn", "tn")),
            *(Edge(f"{layout}, one row", at(1, 96, 160, layout)) for layout in ("nn", "tn")),
            Edge("a tile and one", at(129, 129, 129), "needle"),
            Edge("k of one", at(5, 33, 1)),
            Edge("one column", at(5, 1, 64), "positive"),
            Edge("long k", at(3, 40, 5_000), "needle"),
            Edge("no rows", at(0, 64, 64)),
            Edge("no k", at(3, 64, 0)),
            Edge("a row of zeros", at(3, 64, 64), "zero row"),
            Edge("NaN beside and below", at(19, 72, 120), "guarded"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        x, weight = inputs.arguments["x"], inputs.arguments["weight"]
        (m, k), n = x.shape, weight.shape[0]
        cost = rows_cost(2 * m * n * k, (x, weight), ())
        return Cost(cost.flops, cost.bytes_read, m * n * x.element_size())

    def outputs(self, inputs: TensorInputs) -> Outputs:
        x, weight = inputs.arguments["x"], inputs.arguments["weight"]
        return (guarded(x.shape[0], weight.shape[0], x.dtype, x.device),)


def scaled(n: int, k: int, settings: InputSettings, generator: torch.Generator) -> Tensor:
    """A weight `[n, k]` that keeps the size of what it multiplies."""
    return draw((n, k), settings, generator).mul_(max(1, k) ** -0.5)


def sharpen(x: Tensor, weight: Tensor) -> None:
    """The last of k carries half of every sum, and the last row of the weight half of every answer."""
    x[..., -1:] *= x.shape[-1] ** 0.5
    weight[..., -1:, :] *= weight.shape[-2] ** 0.5


def without_last(answer: Tensor) -> Tensor:
    short = answer.clone()
    short[..., -1:] = 0.0
    return short
