"""Absorbed multi-head latent attention in plain torch: the batch's pages gathered into one padded tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs


@dataclass(frozen=True, slots=True)
class LatentPlan:
    rows: Tensor
    """int64 `[n * longest]`: which row of the flattened cache stands at each place."""
    hidden: Tensor
    """bool `[n, 1, longest]`, True where a sequence ended."""


class TorchMla:
    """Gather, a batched product for each part of the scores, softmax in float32, one batched product for the values."""

    name = "torch-mla"

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    def plan(self, state: dict[str, Any]) -> LatentPlan:
        lengths, table, size = state["seq_lens"], state["block_table"], state["cache"].shape[1]
        position = torch.arange(max(1, int(lengths.max())), device=table.device)
        real = position < lengths[:, None]
        # Padding repeats the first token of the sequence; one without any key reads zeros, below.
        position = torch.where(real, position, 0)
        page = table.long().gather(1, position // size)
        return LatentPlan((page * size + position % size).reshape(-1), ~real[:, None, :])

    def run(self, state: dict[str, Any], plan: LatentPlan, out: Outputs) -> Tensor:
        q, cache = state["q_latent"], state["cache"]
        keys = cache.flatten(0, 1).index_select(0, plan.rows).view(q.shape[0], -1, cache.shape[2])
        keys = keys.masked_fill(plan.hidden.transpose(1, 2), 0.0)
        latent, rope = keys.split((q.shape[2], cache.shape[2] - q.shape[2]), dim=-1)
        # Two sums, as the definition has them: a single one over both widths uses up float32's error limit.
        scores = (q @ latent.transpose(1, 2)).float() + (state["q_rope"] @ rope.transpose(1, 2)).float()
        scores *= state["scale"]
        weights = torch.softmax(scores.masked_fill(plan.hidden, float("-inf")), dim=-1)
        weights = weights.masked_fill(plan.hidden, 0.0).to(q.dtype)
        mixed: Tensor = weights @ latent
        return mixed


class PlainMla(PlainKernel):
    """One sequence at a time, every intermediate in the cache's dtype: what others are compared with."""

    name = "reference-mla"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        from kbench.ops.mla import attend

        return attend(state, state["cache"].dtype)
