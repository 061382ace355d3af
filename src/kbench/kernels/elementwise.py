"""RoPE, SiLU-mul and fp8 rows in plain torch and through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs

FP8_MAX = 448.0


class TorchRope(PlainKernel):
    """Rows of the tables by position, then the halves of each head, in float32."""

    name = "torch-rope"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        return rope(state["q"], state["k"], state["positions"], state["cos"], state["sin"], state["interleaved"])


class TorchSiluMul(PlainKernel):
    """torch.nn.functional.silu, then the product: two kernels."""

    name = "torch-silu-mul"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        return silu_mul(state["x"])


class TorchQuantFp8(PlainKernel):
    """Largest of each row, division, conversion, in float32."""

    name = "torch-quant-fp8"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        return quant_fp8(state["x"])


class Compiled(PlainKernel):
    """One of the functions below through torch.compile; the first call compiles."""

    def __init__(self, function: Callable[..., Any], *arguments: str) -> None:
        self._compiled = torch.compile(function, dynamic=True)
        self._function = function
        self._arguments = arguments

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Any:
        given = [state[name] for name in self._arguments]
        whole = all(not isinstance(value, Tensor) or value.numel() for value in given)
        return (self._compiled if whole else self._function)(*given)


class CompiledSiluMul(Compiled):
    name = "compiled-silu-mul"

    def __init__(self) -> None:
        super().__init__(silu_mul, "x")


class CompiledQuantFp8(Compiled):
    name = "compiled-quant-fp8"

    def __init__(self) -> None:
        super().__init__(quant_fp8, "x")


class CompiledRope(Compiled):
    name = "compiled-rope"

    def __init__(self) -> None:
        super().__init__(rope, "q", "k", "positions", "cos", "sin", "interleaved")


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Outputs:
    own_cos, own_sin = (table.index_select(0, positions)[:, None] for table in (cos, sin))
    return _turn(q, own_cos, own_sin, interleaved), _turn(k, own_cos, own_sin, interleaved)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    head = x[..., : 2 * half].float()
    if interleaved:
        first, second = head[..., ::2], head[..., 1::2]
    else:
        first, second = head[..., :half], head[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined.to(x.dtype), x[..., 2 * half :]), dim=-1)


def quant_fp8(x: Tensor) -> Outputs:
    wide = x.float()
    largest = wide.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    values = (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX)  # the conversion does not saturate everywhere
    return values.to(torch.float8_e4m3fn), scale
