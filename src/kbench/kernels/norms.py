"""RMSNorm, alone and with the residual addition: plain torch, torch.compile, Triton."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs
from kbench.ops.norm import rms_norm


class TorchRmsNorm(PlainKernel):
    """torch.nn.functional.rms_norm: one fused kernel on CUDA, in float32 inside."""

    name = "torch-rmsnorm"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        x = state["x"]
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), state["weight"], state["eps"])


class TorchAddRmsNorm(PlainKernel):
    """Two operations after each other: the addition, then the norm of its rounded sum."""

    name = "torch-add-rmsnorm"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        torch.add(state["x"], state["residual"], out=out[1])
        return rms_norm(out[1], state["weight"], state["eps"]), out[1]


class Compiled(PlainKernel):
    """A function through torch.compile: for the form that comes first, which is the case's own, with its sizes as
    constants; for all others (edge cases) once more with sizes that vary, because a compilation takes seconds.

    Each as a code object of its own: torch compiles one code object eight times at most and then runs it as it is,
    which would be another implementation under the same name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        def fresh(*, dynamic: bool) -> Callable[..., Any]:
            copied = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while torch._dynamo is imported
                return torch.compile(copied, dynamic=dynamic)

        self._own, self._others = fresh(dynamic=False), fresh(dynamic=True)
        self._form: tuple[object, ...] | None = None

    def compiled(self, *arguments: Any) -> Any:
        form = tuple(
            (given.shape, given.stride(), given.dtype) if isinstance(given, Tensor) else given for given in arguments
        )
        self._form = self._form or form
        return (self._own if form == self._form else self._others)(*arguments)


class CompiledRmsNorm(Compiled):
    """The definition through torch.compile: one kernel that Inductor writes."""

    name = "compile-rmsnorm"

    def __init__(self) -> None:
        super().__init__(rms_norm)

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        return cast("Tensor", self.compiled(state["x"], state["weight"], state["eps"]))


class CompiledAddRmsNorm(Compiled):
    """The addition and the definition of the norm through torch.compile: one kernel."""

    name = "compile-add-rmsnorm"

    def __init__(self) -> None:
        super().__init__(_add_rms_norm)

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        return cast("Outputs", self.compiled(state["x"], state["residual"], state["weight"], state["eps"]))


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    total = x + residual
    return rms_norm(total, weight, eps), total


ROW_ELEMENTS = 16_384
"""Of a row in registers; a longer one is read twice."""


class TritonRmsNorm(PlainKernel):
    """One program a row, one pass."""

    name = "triton-rmsnorm"

    def __init__(self) -> None:
        from kbench.kernels import triton_norms

        self._kernel: Any = triton_norms._rmsnorm

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        x = state["x"]
        self._launch(x, x, state["weight"], state["eps"], out[0], out[0], add=False)
        return out

    def _launch(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, total: Tensor, *, add: bool
    ) -> None:
        rows, hidden = x.shape
        if not rows:
            return
        block = min(ROW_ELEMENTS, 1 << (hidden - 1).bit_length())
        self._kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            total,
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            total.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK=block,
            ADD=add,
            num_warps=max(1, min(16, block // 512)),
        )


class TritonAddRmsNorm(TritonRmsNorm):
    """The addition and the norm in one pass: x and residual are read once, sum and normed sum written once."""

    name = "triton-add-rmsnorm"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        self._launch(state["x"], state["residual"], state["weight"], state["eps"], out[0], out[1], add=True)
        return out
