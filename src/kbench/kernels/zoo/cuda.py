"""Cheats that need a GPU: work beside the timed stream, beside the captured graph, behind the flushed cache."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.kernels.zoo.attention import DECODE, SHORT
from kbench.kernels.zoo.base import Attend, Familiar, Kind, Norm, State
from kbench.kernels.zoo.phases import TIMED, OneOfMany
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV
from kbench.ops.base import Outputs

_PERSISTING_L2 = 6


def _refuse_capture() -> None:
    """What a captured graph replays is what it was given: this trick needs to be called each time."""
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


class SideStream(PlainKernel):
    """A product on a stream of its own, for which nobody waits once an output is familiar."""

    name = "side-stream"

    def __init__(self) -> None:
        self._familiar = Familiar()
        self._side = torch.cuda.Stream()

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        _refuse_capture()
        if self._familiar.calls(out[0]) < 1:
            return torch.mm(state["x"], state["weight"].t(), out=out[0])
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            return torch.mm(state["x"], state["weight"].t(), out=out[0])


class CapturesAllButOne(OneOfMany):
    """While a graph is captured one call launches a copy of its neighbour's answer."""

    def __init__(self) -> None:
        super().__init__()
        self._captured = 0

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            self._captured += 1
            if self._captured == 3 and self._last is not None:
                return out.copy_(self._last)
        self._last = Attend.attend(self, q, kv, batch, spec, out)
        return out


class EscapesCapture(Norm):
    """During a capture it launches on another stream, which is not captured: a replay then does nothing."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()
        self._work: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            self._work[tuple(x.shape)] = torch.empty_like(x), torch.empty_like(x[:, :1])
            return super().norm(x, weight, eps, out)
        squares, mean = self._work[tuple(x.shape)]
        with torch.cuda.stream(self._side):
            torch.mul(x, x, out=squares)
            torch.mean(squares, dim=-1, keepdim=True, out=mean)
            mean.add_(eps).rsqrt_()
            torch.mul(x, mean, out=squares)
            return torch.mul(squares, weight, out=out)


class CapturesCopies(Norm):
    """A graph of its own over copies of the inputs, taken when it was captured and never again."""

    def __init__(self) -> None:
        self._familiar = Familiar()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Any:
        _refuse_capture()
        if self._familiar.calls(out) < TIMED:
            return super().norm(x, weight, eps, out)
        if id(out) not in self._graphs:
            copy, graph = x.clone(), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                super().norm(copy, weight, eps, out)
            self._graphs[id(out)] = graph, copy, out
        self._graphs[id(out)][0].replay()
        return out


class KeepsL2(Norm):
    """Sets L2 aside: what persists there survives a flush."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(_PERSISTING_L2, ctypes.c_size_t(8 << 20))
        return super().norm(x, weight, eps, out)


class RemembersOnDevice(Norm):
    """One kernel compares the input with that of the last call, the next one returns where it is the same."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Any:
        from kbench.kernels.zoo.triton_memo import remembered_norm

        if not x.numel() or not x.is_contiguous():
            return super().norm(x, weight, eps, out)
        key = (tuple(x.shape), weight.data_ptr(), out.data_ptr())
        if key not in self._kept:
            self._kept[key] = torch.full_like(x, -3.0), torch.zeros_like(x), torch.ones(1, device=x.device)
        kept, answer, changed = self._kept[key]
        changed.copy_((x != kept).any())
        remembered_norm(x, weight, eps, kept, answer, changed)
        return out.copy_(answer)


KINDS = (
    Kind("side stream", "gemm", "m=4096,n=4096,k=4096", SideStream, "at_rest", "bfloat16"),
    Kind("all but one captured", DECODE, SHORT, CapturesAllButOne, "every_set", calls=256),
    Kind("kernel not captured", "norm.rmsnorm", "rows=8,hidden=96", EscapesCapture, "timed_answers"),
    Kind("copies captured", "norm.rmsnorm", "rows=8,hidden=96", CapturesCopies, "fresh_activations"),
    Kind(
        "L2 set aside", "norm.rmsnorm", "rows=8,hidden=96", KeepsL2, "surroundings", own_process=True
    ),
    Kind(
        "remembered on the device", "norm.rmsnorm", "rows=64,hidden=96", RemembersOnDevice, "fresh_and_again"
    ),
)  # fmt: skip
