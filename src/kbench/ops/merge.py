"""Merging partial attention outputs by their log-sum-exp: split KV, shared prefixes, context parallelism.

Contract: log-sum-exps are natural and float32. A part whose log-sum-exp is -inf saw no key: it has no mass and its
output may hold anything, NaN too. +inf means the same: FlashAttention 2 writes it for rows without keys. A row of which
no part saw a key answers 0 and -inf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops.base import Cost, Edge, InputSettings, Outputs
from kbench.ops.norm import draw
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, rows_cost


class CascadeMerge(TensorOp):
    """outputs `[parts, rows, heads, head_dim]`, lse float32 `[parts, rows, heads]` → merged output `[rows, heads,
    head_dim]` in the dtype of `outputs`, merged lse float32 `[rows, heads]`."""

    arguments: ClassVar[tuple[str, ...]] = ("outputs", "lse")
    names = ("output", "lse")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        parts, rows, heads, dim = (shape.integer(name) for name in ("parts", "rows", "heads", "head_dim"))
        outputs = draw((parts, rows, heads, dim), settings, generator)
        lse = torch.randn((parts, rows, heads), generator=generator, device=settings.device) + 5.0
        if kind == "far apart":
            lse = lse * 40.0  # exponentials overflow and vanish without a common maximum
        if kind == "empty":
            _empty(outputs, lse)
        return TensorInputs(
            shape,
            {"outputs": outputs, "lse": lse},
            {"outputs": "activation", "lse": "activation"},
            settings.dtype,
        )

    def exact(self, inputs: TensorInputs) -> Outputs:
        return merge(inputs.arguments["outputs"].double(), inputs.arguments["lse"].double())

    def plain(self, inputs: TensorInputs) -> Outputs:
        return merge(inputs.arguments["outputs"], inputs.arguments["lse"])

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        given = own.inputs.arguments
        outputs, lse = given["outputs"].double(), given["lse"].double()
        ln_2 = 0.6931471805599453
        models = {**super().wrong(own)}
        if outputs.shape[0] > 1:
            even = merge(outputs, torch.zeros_like(lse))[0]
            models["parts averaged"] = (even, own.expected[1])
            models["last part left out"] = merge(outputs[:-1], lse[:-1])
            models["lse taken as base 2"] = (merge(outputs, lse * ln_2)[0], own.expected[1])
        models["lse in base 2"] = (own.expected[0], own.expected[1] / ln_2)
        return models

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=5)
        return (
            Edge("no row", shape.with_axes(rows=0)),
            Edge("one row", shape.with_axes(rows=1)),
            Edge("one part", small.with_axes(parts=1)),
            Edge("odd sizes", small.with_axes(parts=5, heads=3, head_dim=72)),
            Edge("many parts", small.with_axes(parts=33)),
            Edge("masses far apart", small, "far apart"),
            Edge("empty parts and rows", small, "empty"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        outputs, lse = inputs.arguments["outputs"], inputs.arguments["lse"]
        return rows_cost(2 * outputs.numel() + 4 * lse.numel(), (outputs, lse), (outputs[0], lse[0]))

    def streamed_bytes(self, inputs: TensorInputs) -> int:
        return 0  # the parts come out of the kernel before this one

    def outputs(self, inputs: TensorInputs) -> Outputs:
        outputs, lse = inputs.arguments["outputs"], inputs.arguments["lse"]
        return torch.empty_like(outputs[0]), torch.empty_like(lse[0])


def merge(outputs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The definition; weights in the dtype of `lse`, the sum in that of `outputs`."""
    mass = lse.masked_fill(lse == float("inf"), float("-inf"))
    peak = mass.amax(dim=0)
    base = torch.where(torch.isfinite(peak), peak, 0.0)
    weights = torch.exp(mass - base)
    total = weights.sum(dim=0)
    share = (weights / torch.where(total > 0, total, 1.0))[..., None].to(outputs.dtype)
    held = outputs.masked_fill((mass == float("-inf"))[..., None], 0.0)
    return (held * share).sum(dim=0), base + torch.log(total)


def _empty(outputs: Tensor, lse: Tensor) -> None:
    """Rows of which the last part, the first part (as +inf), and every part saw no key; what they hold is NaN."""
    lse[-1, 1] = float("-inf")
    lse[0, 2] = float("inf")
    lse[:, 3] = float("-inf")
    lse[0, 3] = float("inf")
    outputs.masked_fill_(torch.isinf(lse)[..., None], float("nan"))
