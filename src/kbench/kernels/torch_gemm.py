"""Matrix products through torch: one, and one for each expert, in three ways."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs

State = dict[str, Any]


class TorchGemm(PlainKernel):
    """torch.mm, which is cuBLAS on CUDA, in whatever order the operands are stored."""

    name = "torch-gemm"

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        return torch.mm(state["x"], state["weight"].t(), out=out[0])


class TorchPackedGemm(TorchGemm):
    """torch.mm with the weight stored `[k, n]`, whatever it was: rows of the product then read rows of the weight."""

    name = "torch-gemm-packed"

    def convert(self, arguments: State) -> State:
        return {**arguments, "weight": arguments["weight"].t().contiguous().t()}


class TorchCompileGemm(PlainKernel):
    """torch.nn.functional.linear through torch.compile, with symbolic sizes."""

    name = "torch-compile-gemm"
    recompiles = 64
    """Sizes of 0 and 1, strides and dtypes are compiled apart; torch would give up compiling after eight of them."""

    def __init__(self) -> None:
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = max(dynamo.recompile_limit, self.recompiles)
        self._linear: Any = torch.compile(torch.nn.functional.linear, dynamic=True, fullgraph=True)

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        answer: Tensor = self._linear(state["x"], state["weight"])
        return answer


@dataclass(frozen=True, slots=True)
class Group:
    expert: int
    start: int
    stop: int


class TorchGroupedLoop(PlainKernel):
    """One torch.mm for each expert that has rows. The host must know the offsets: `plan` waits for the device."""

    name = "torch-grouped-loop"

    def plan(self, state: State) -> list[Group]:  # type: ignore[override]
        ends = state["offsets"].tolist()
        groups = [Group(expert, *span) for expert, span in enumerate(pairwise(ends))]
        return [group for group in groups if group.stop > group.start]

    def run(self, state: State, plan: list[Group], out: Outputs) -> Tensor:  # type: ignore[override]
        x, weight, answer = state["x"], state["weight"], out[0]
        for group in plan:
            torch.mm(x[group.start : group.stop], weight[group.expert].t(), out=answer[group.start : group.stop])
        return answer


@dataclass(frozen=True, slots=True)
class Padded:
    """`buffer` `[experts, capacity, k]` is 0 where no row goes; `slots` says where each row goes in it."""

    buffer: Tensor
    slots: Tensor


class TorchGroupedPadded(PlainKernel):
    """The padded twin: every expert gets as many rows as the busiest one, then one batched product.

    What it multiplies beyond real rows is its own affair: the cost of the case counts real rows only.
    """

    name = "torch-grouped-padded"

    def plan(self, state: State) -> Padded:  # type: ignore[override]
        x, loads = state["x"], state["offsets"].diff().long()
        experts = loads.numel()
        capacity = int(loads.max())
        expert = torch.arange(experts, device=x.device).repeat_interleave(loads)
        within = torch.arange(expert.numel(), device=x.device) - state["offsets"].long()[expert]
        buffer = torch.zeros((experts, capacity, x.shape[1]), dtype=x.dtype, device=x.device)
        return Padded(buffer, expert * capacity + within)

    def run(self, state: State, plan: Padded, out: Outputs) -> Tensor:  # type: ignore[override]
        used, answer = plan.slots.numel(), out[0]
        plan.buffer.view(-1, plan.buffer.shape[-1]).index_copy_(0, plan.slots, state["x"][:used])
        products = torch.bmm(plan.buffer, state["weight"].transpose(1, 2))
        answer[:used] = products.view(-1, answer.shape[1])[plan.slots]
        return answer


class TorchGroupedMm(PlainKernel):
    """torch.nn.functional.grouped_mm: bfloat16, strides of 16 bytes. Other widths are padded: the weight by `convert`,
    the rows by `run`."""

    name = "torch-grouped-mm"
    alignment = 8

    def __init__(self) -> None:
        self._product: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if self._product is None:
            raise ImportError("this torch has no grouped_mm")

    def convert(self, arguments: State) -> State:
        n, k = arguments["weight"].shape[1:]
        weight = torch.nn.functional.pad(arguments["weight"], (0, -k % self.alignment, 0, -n % self.alignment))
        return {**arguments, "weight": weight}

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        x, weight, answer = state["x"], state["weight"], out[0]
        if not answer.numel():
            return answer
        padding = weight.shape[2] - x.shape[1]
        if padding:
            x = torch.nn.functional.pad(x, (0, padding))
        product: Tensor = self._product(x, weight.transpose(1, 2), offs=state["offsets"][1:])
        return product[:, : answer.shape[1]]
