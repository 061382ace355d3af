"""Wrong norms, products, experts and draws: coarse numbers, lost tails, borrowed rows, biased tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.kernels.sampling import TorchChain, TorchDrawExponential
from kbench.kernels.torch_moe import TorchPermute, TorchRouter
from kbench.kernels.zoo.base import Kind, Norm, State
from kbench.ops.base import Outputs

NO_TOKEN = -1
TILE = 4
LARGE = 8_192


class DropsTail(Norm):
    """Whole tiles of rows alone."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        whole = x.shape[0] // TILE * TILE
        out[:whole] = super().norm(x[:whole], weight, eps, torch.empty_like(x[:whole]))
        return out


class WritesWholeTiles(Norm):
    """Pairs of rows: the one that is too many is written behind the output."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        super().norm(x, weight, eps, out)
        rows, width = x.shape
        room = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset() - out.numel()
        if rows % 2 and room >= width:
            torch.as_strided(out, (rows + 1, width), (width, 1), out.storage_offset())[rows] = 1.0
        return out


class OneNanRow(Norm):
    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        super().norm(x, weight, eps, out)
        out[-1:] = float("nan")
        return out


class OneBadWidth(Norm):
    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return super().norm(x, weight, eps, out).mul_(2.0 if x.shape[1] == 111 else 1.0)


class DropsLastElement(Norm):
    """One of very many: less than a coarse type can tell."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        super().norm(x, weight, eps, out)
        if x.shape[1] > LARGE:
            out[:, -1] = 0.0
        return out


class RoundsInput(Norm):
    """Leaves its input with the lowest bit set: no answer shows it."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        super().norm(x, weight, eps, out)
        if x.is_contiguous():
            x.view(torch.int32).bitwise_or_((x != 0).int())
        return out


class CoarseGemm(PlainKernel):
    """bfloat16 inside."""

    name = "coarse-gemm"
    inside: torch.dtype = torch.bfloat16

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        x, weight = state["x"].to(self.inside), state["weight"].to(self.inside)
        return out[0].copy_(x.float() @ weight.float().t())


class CoarserGemm(CoarseGemm):
    """fp8 inside."""

    inside = torch.float8_e4m3fn


class DropsLastOfK(PlainKernel):
    name = "drops-last-of-k"

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        x, weight = state["x"], state["weight"]
        if x.shape[1] > LARGE:
            x, weight = x[:, :-1], weight[:, :-1]
        return out[0].copy_(x @ weight.t())


class MasksExperts(PlainKernel):
    """Every expert multiplies every row, a factor of 0 for those that are not its own; the weights of an expert without
    rows are garbage, and garbage times 0 is garbage."""

    name = "masks-experts"

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        x, weight, offsets = state["x"], state["weight"], state["offsets"].tolist()
        used = offsets[-1]
        answer = torch.zeros_like(out[0][:used])
        place = torch.arange(used, device=x.device)
        for expert, (start, stop) in enumerate(pairwise(offsets)):
            own = ((place >= start) & (place < stop)).to(x.dtype)
            answer += (x[:used] @ weight[expert].t()) * own[:, None]
        out[0][:used] = answer
        return out[0]


class DuplicatesExperts(TorchRouter):
    def run(self, state: State, plan: None, out: Outputs) -> Outputs:
        *others, last = super().run(state, plan, out)
        twice = [answer if answer.dtype.is_floating_point else _first_twice(answer) for answer in (*others, last)]
        return tuple(twice)


def _first_twice(ids: Tensor) -> Tensor:
    twice = ids.clone()
    twice[:, -1:] = twice[:, :1]
    return twice


class UnsortedPermute(TorchPermute):
    """Rows of an expert in the opposite order, and the source says so of none."""

    def run(self, state: State, plan: None, out: Outputs) -> Outputs:
        rows, offsets, source = super().run(state, plan, out)
        return rows.flip(0), offsets, source


class IgnoresTopK(TorchChain):
    """Draws from the whole vocabulary."""

    def run(self, state: State, plan: Any, out: Outputs) -> Tensor:
        everything = {**state, "k": torch.zeros_like(state["k"]), "p": torch.ones_like(state["p"])}
        return super().run(everything, super().plan(everything), out)


class Greedy(TorchDrawExponential):
    """A generator of its own that always draws the likeliest token: nothing impossible, only biased."""

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        dead = torch.isinf(state["logits"]).all(dim=-1)
        return torch.where(dead, NO_TOKEN, state["logits"].argmax(dim=-1))


NORM = "norm.rmsnorm"
KINDS = (
    Kind("tail rows dropped", NORM, "rows=8,hidden=96", DropsTail, "edges"),
    Kind("garbage at one width", NORM, "rows=8,hidden=96", OneBadWidth, "edges"),
    Kind("rows behind the output written", NORM, "rows=5,hidden=96", WritesWholeTiles, "guards"),
    Kind("NaN in a row", NORM, "rows=8,hidden=96", OneNanRow, "finite"),
    Kind(
        "last element of very many dropped", NORM, "rows=2,hidden=300001", DropsLastElement, "null_models", "bfloat16"
    ),
    Kind("input rounded in place", NORM, "rows=8,hidden=96", RoundsInput, "unchanged_inputs"),
    Kind("bfloat16 inside float32", "gemm", "m=16,n=96,k=160", CoarseGemm, "limits"),
    Kind("fp8 inside float32", "gemm", "m=16,n=96,k=160", CoarserGemm, "values"),
    Kind("last of k dropped", "gemm", "m=2,n=32,k=98304", DropsLastOfK, "sharp_inputs", "bfloat16"),
    Kind(
        "garbage of an empty expert",
        "moe.grouped_gemm",
        "tokens=9,experts=4,top_k=2,n=40,k=64,routing=empty",
        MasksExperts,
        "unused_nan",
    ),
    Kind("an expert chosen twice", "moe.router", "tokens=9,experts=8,top_k=2", DuplicatesExperts, "values"),
    Kind("rows out of order", "moe.permute", "tokens=9,experts=8,top_k=2,hidden=64", UnsortedPermute, "values"),
    Kind("tokens outside the support", "sampling.chain", "rows=16,vocab=500", IgnoresTopK, "values"),
    Kind("biased draws", "sampling.draw", "rows=256,vocab=64", Greedy, "values"),
)
