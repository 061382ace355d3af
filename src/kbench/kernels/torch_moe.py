"""Mixture-of-experts layers in plain torch: the router, the permutation, the whole layer as a loop over experts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs

State = dict[str, Any]


class TorchRouter(PlainKernel):
    """Softmax over all experts in float32, then the top k."""

    name = "torch-router"

    def run(self, state: State, plan: None, out: Outputs) -> Outputs:
        return chosen_experts(state["logits"], state["top_k"])


class TorchPermute(PlainKernel):
    """A stable sort of the ids, a search for where each expert begins, a gather. Nothing waits for the device."""

    name = "torch-permute"

    def run(self, state: State, plan: None, out: Outputs) -> Outputs:
        x, ids, experts = state["x"], state["ids"], state["experts"]
        source, offsets = sorted_by_expert(ids, experts)
        return x[source // max(1, ids.shape[1])], offsets, source.int()


class TorchMoe(PlainKernel):
    """The layer as Hugging Face models write it: for each expert the rows that chose it, its two products, an addition
    into the answer. The host waits for the number of rows of every expert."""

    name = "torch-moe"

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        x, gate_up, down, top_k = state["x"], state["gate_up"], state["down"], state["top_k"]
        weights, ids = chosen_experts(state["logits"], top_k)
        source, offsets = sorted_by_expert(state["expert_map"][ids], gate_up.shape[0])
        tokens, share = source // top_k, weights.reshape(-1)[source].to(x.dtype)
        answer = out[0].zero_()
        ends = offsets.tolist()
        for expert, (start, stop) in enumerate(pairwise(ends)):
            if stop > start:
                own = tokens[start:stop]
                gate, up = torch.mm(x[own], gate_up[expert].t()).chunk(2, dim=-1)
                part = torch.mm(torch.nn.functional.silu(gate) * up, down[expert].t())
                answer.index_add_(0, own, part * share[start:stop, None])
        return answer


def chosen_experts(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    chosen, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    return chosen / chosen.sum(dim=-1, keepdim=True), ids


def sorted_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(source, offsets int32) of ids `[tokens, top_k]`; ids below 0 go last and belong to nobody."""
    flat = ids.reshape(-1)
    keys, source = torch.where(flat < 0, experts, flat).sort(stable=True)
    bounds = torch.arange(experts + 1, device=ids.device, dtype=keys.dtype)
    return source, torch.searchsorted(keys, bounds, out_int32=True)
