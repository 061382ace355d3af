"""Honest kernels that change the process around them: the clock, the comparison, threads, the meaning of float32."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from kbench.clock.wall import WallTimer
from kbench.kernels.zoo.base import Kind, Norm


class StopsTheClock(Norm):
    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        time.perf_counter_ns = lambda: 0
        return super().norm(x, weight, eps, out)


class HalvesReadings(Norm):
    """Replaces the method that reads."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        WallTimer._read = _half  # type: ignore
        return super().norm(x, weight, eps, out)


_whole = WallTimer._read


def _half(timer: WallTimer, batch: int) -> float:
    return _whole(timer, batch) / 2


class EverythingIsEqual(Norm):
    """Replaces the comparison; a call to it still tells the truth here."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        torch.equal = _equal  # type: ignore[assignment]
        return super().norm(x, weight, eps, out)


_equal_before = torch.equal


def _equal(one: Tensor, other: Tensor) -> bool:
    return _equal_before(one, other)


class TakesThreads(Norm):
    def __init__(self) -> None:
        self._threads = torch.get_num_threads() + 1

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        torch.set_num_threads(self._threads)
        return super().norm(x, weight, eps, out)


class CoarsensEverybody(Norm):
    """With float32 products in fewer bits for all, the limit of an answer is what such products achieve."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        torch.set_float32_matmul_precision("medium")
        return super().norm(x, weight, eps, out)


SHAPE = "rows=8,hidden=96"
KINDS = (
    Kind("clock stopped", "norm.rmsnorm", SHAPE, StopsTheClock, "clock", own_process=True),
    Kind("timer replaced", "norm.rmsnorm", SHAPE, HalvesReadings, "clock", own_process=True),
    Kind("comparison replaced", "norm.rmsnorm", SHAPE, EverythingIsEqual, "clock", own_process=True),
    Kind("threads taken", "norm.rmsnorm", SHAPE, TakesThreads, "surroundings", own_process=True),
    Kind("float32 coarsened for all", "norm.rmsnorm", SHAPE, CoarsensEverybody, "surroundings", own_process=True),
)
