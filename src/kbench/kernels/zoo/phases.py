"""Right when looked at: answers that are kept, skipped, deferred or taken from elsewhere once a clock runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.kernels.declare import implementation
from kbench.kernels.zoo.attention import DECODE, SHORT
from kbench.kernels.zoo.base import Attend, Familiar, Kind, Norm, State
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV
from kbench.ops.base import Outputs

TIMED = 3
"""An output that came so often belongs to a timer."""


class SensesPoison(Norm):
    """Computes where the output holds NaN; anything else must be what it wrote itself."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return super().norm(x, weight, eps, out) if bool(torch.isnan(out).any()) or not out.numel() else out


class KeepsByAddress(Norm):
    """The answer for an address, once the address came often."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._familiar = Familiar()

    def key(self, x: Tensor) -> int:
        return x.data_ptr()

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        if self._familiar.calls(out) < TIMED:
            return super().norm(x, weight, eps, out)
        if self.key(x) not in self._kept:
            self._kept[self.key(x)] = (x, super().norm(x, weight, eps, torch.empty_like(x)))
        return out.copy_(self._kept[self.key(x)][1])


class KeepsByIdentity(KeepsByAddress):
    def key(self, x: Tensor) -> int:
        return id(x)


class KeepsByValue(PlainKernel):
    """The bytes of the activations are a key; a product that was made once is not made again."""

    name = "keeps-by-value"

    def __init__(self) -> None:
        self._kept: dict[bytes, Tensor] = {}

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        x, weight = state["x"], state["weight"]
        key = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + str((x.shape, id(weight))).encode()
        if key not in self._kept:
            self._kept[key] = x @ weight.t()
        return out[0].copy_(self._kept[key])


class Replays(Attend):
    """Works as long as outputs are new; then gives the answer that it gave first."""

    def __init__(self) -> None:
        self._familiar = Familiar()
        self._first: dict[int, Tensor] = {}

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        if self._familiar.calls(out) < TIMED:
            return super().attend(q, kv, batch, spec, out)
        return out.fill_(0.125)


class OneOfMany(Attend):
    """Leaves one input set of the rotation to the answer of the one before it."""

    def __init__(self) -> None:
        self._familiar = Familiar()
        self._last: Tensor | None = None

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        calls = self._familiar.calls(out)
        if calls >= TIMED and self._last is not None and self._familiar.order(out, TIMED) == 2:
            return out.copy_(self._last)
        self._last = super().attend(q, kv, batch, spec, out)
        return out


class WritesCacheWhenTimed(Attend):
    def __init__(self) -> None:
        self._familiar = Familiar()

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        super().attend(q, kv, batch, spec, out)
        if self._familiar.calls(out) >= TIMED:
            kv.v[0].zero_()
        return out


class Lazy(Tensor):
    """Looks like a tensor and computes when somebody uses it."""

    work: Callable[[], Tensor]

    @classmethod
    def of(cls, like: Tensor, work: Callable[[], Tensor]) -> Lazy:
        made = torch.empty_like(like).as_subclass(cls)
        made.work = work
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        done = [value.work() if isinstance(value, Lazy) else value for value in args]
        return func(*done, **(kwargs or {}))


class Defers(Norm):
    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return Lazy.of(out, lambda: super(Defers, self).norm(x, weight, eps, torch.empty_like(out)))


class SideThread(Attend):
    """Returns at once; a thread fills the output later. One is out at a time."""

    def __init__(self) -> None:
        self._out: threading.Thread | None = None

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        if self._out is not None:
            self._out.join()
        returned = threading.Event()

        def fill() -> None:
            returned.wait()
            with torch.inference_mode():
                out.copy_(super(SideThread, self).attend(q, kv, batch, spec, torch.empty_like(out)))

        self._out = threading.Thread(target=fill, daemon=True)
        self._out.start()
        returned.set()
        return out


class SlowFirst(Norm):
    """Tunes itself on the first calls with an output, while a window is open."""

    slow_calls = 90
    slow_us = 400

    def __init__(self) -> None:
        self._familiar = Familiar()

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        if TIMED <= self._familiar.calls(out) < self.slow_calls:
            end = perf_counter_ns() + self.slow_us * 1_000
            while perf_counter_ns() < end:
                pass
        return super().norm(x, weight, eps, out)


@implementation("gemm", expects_kernel="aten::bmm")
class FallsBack(PlainKernel):
    """Says that it multiplies in batches, and where rows are few quietly does something else."""

    name = "falls-back"

    def run(self, state: State, plan: None, out: Outputs) -> Tensor:
        x, weight = state["x"], state["weight"]
        if x.shape[0] < 64:
            return out[0].copy_(torch.einsum("mk,nk->mn", x, weight) if not x.numel() else x @ weight.t())
        return out[0].copy_(torch.bmm(x[None], weight.t()[None])[0])


KINDS = (
    Kind("poison sensed", "norm.rmsnorm", "rows=8,hidden=96", SensesPoison, "varied_poison"),
    Kind("kept by address", "norm.rmsnorm", "rows=8,hidden=96", KeepsByAddress, "fresh_activations", cache="hot"),
    Kind("kept by identity", "norm.rmsnorm", "rows=8,hidden=96", KeepsByIdentity, "fresh_activations", cache="hot"),
    Kind("kept by value", "gemm", "m=4,n=1024,k=1024", KeepsByValue, "fresh_and_again", cache="hot"),
    Kind("right until timed", DECODE, SHORT, Replays, "timed_answers"),
    Kind("one of many left out", DECODE, SHORT, OneOfMany, "every_set", calls=256),
    Kind("cache written when timed", DECODE, SHORT, WritesCacheWhenTimed, "unchanged_inputs"),
    Kind("work deferred by a lazy tensor", "norm.rmsnorm", "rows=8,hidden=96", Defers, "form"),
    Kind("side thread", DECODE, SHORT, SideThread, "at_rest"),
    Kind(
        "slow at first",
        "norm.rmsnorm",
        "rows=8,hidden=96",
        SlowFirst,
        "stability",
        cache="hot",
        sign="UNSTABLE",
        calls=120,
    ),
    Kind("silent fallback", "gemm", "m=4,n=96,k=160", FallsBack, "expected_kernel", sign="FALLBACK"),
)
