"""What stands between the matrix products of a layer: in plain torch, and in as few kernels as there are dependencies.

Owns the two ways and the choice between them: `TorchOps` on the CPU, `TritonOps` on CUDA. They compute the same chain
of roundings, except that a rotation is rounded once where plain torch rounds each product. A decode step at small batch
is a chain of hundreds of short kernels, where each costs its launch and its tail and not its bytes: on CUDA a layer
beside its products and its attention is four kernels. It knows no attention and no pages but through `KVPool`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kbench.engine.inputs import Draws, StepInputs
from kbench.engine.kv import KVPool
from kbench.engine.rope import rotate

if TYPE_CHECKING:
    from kbench.engine.model import Layer


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step needs to rotate: tables of cos and sin, or (plain torch) their rows of the step's tokens."""

    cos: Tensor
    sin: Tensor


class StepOps(Protocol):
    """The parts of a forward pass that are no product and no attention. `hidden` is `[tokens, hidden]`."""

    def turn(self, inputs: StepInputs) -> Turn: ...

    def embed(self, inputs: StepInputs, table: Tensor, norm: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream and its norm. Tokens that only the device knows are taken from `sampled`."""
        ...

    def add_norm(self, change: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """residual + change, and the norm of it. May write into both arguments."""
        ...

    def place(
        self, layer: Layer, qkv: Tensor, inputs: StepInputs, turn: Turn, kv: KVPool, index: int, write: Phase
    ) -> Tensor:
        """Split `[tokens, (q + 2 kv) * head_dim]`, norm, rotate, write K and V inside `write`; the queries
        `[tokens, q_heads, head_dim]`."""
        ...

    def argmax(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """The first largest of each row, int64 `[rows]`; also put into `sampled[:rows]`."""
        ...

    @property
    def draws(self) -> bool:
        """Whether `draw` is there: a device's own way to draw, which can be captured."""
        ...

    def draw(self, logits: Tensor, draws: Draws, sampled: Tensor) -> Tensor:
        """As `argmax`, drawn as `engine.sampler.sample` draws where there are neither penalties nor masks."""
        ...


Phase = AbstractContextManager[object]


class TorchOps:
    """Plain torch, an operator after the other."""

    draws = False

    def __init__(self, heads: tuple[int, int, int], eps: float, tables: tuple[Tensor, Tensor]) -> None:
        """`heads`: q heads, KV heads, head_dim."""
        self._heads = heads
        self._eps = eps
        self._tables = tables

    def turn(self, inputs: StepInputs) -> Turn:
        cos, sin = self._tables
        return Turn(cos.index_select(0, inputs.positions), sin.index_select(0, inputs.positions))

    def embed(self, inputs: StepInputs, table: Tensor, norm: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        tokens = inputs.tokens
        if inputs.feed is not None:
            fed = sampled.index_select(0, inputs.feed.clamp_min(0)).to(tokens.dtype)
            tokens = torch.where(inputs.feed >= 0, fed, tokens)
        hidden = functional.embedding(tokens, table)
        return hidden, self._norm(hidden, norm)

    def add_norm(self, change: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + change
        return total, self._norm(total, weight)

    def place(
        self, layer: Layer, qkv: Tensor, inputs: StepInputs, turn: Turn, kv: KVPool, index: int, write: Phase
    ) -> Tensor:
        q_heads, kv_heads, dim = self._heads
        heads = qkv.view(qkv.shape[0], q_heads + 2 * kv_heads, dim)
        turning, v = heads[:, : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm(turning[:, :q_heads], layer.q_norm)
            k = self._norm(turning[:, q_heads:], layer.k_norm)
            turning = torch.cat((q, k), dim=1)
        turned = rotate(turning, turn.cos, turn.sin)
        q, k = turned[:, :q_heads].contiguous(), turned[:, q_heads:]
        with write:
            kv.write(index, inputs.slots, k, v)
        return q

    def argmax(self, logits: Tensor, sampled: Tensor) -> Tensor:
        tokens = logits.argmax(dim=-1)
        sampled[: tokens.shape[0]] = tokens
        return tokens

    def draw(self, logits: Tensor, draws: Draws, sampled: Tensor) -> Tensor:
        raise NotImplementedError("drawing on the CPU is engine.sampler's")

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._eps)


class TritonOps:
    """Our own kernels, through the kernel contract where one of level 1 is meant."""

    draws = True

    def __init__(self, heads: tuple[int, int, int], eps: float, tables: tuple[Tensor, Tensor]) -> None:
        from kbench.kernels.registry import load

        self._heads = heads
        self._eps = eps
        self._turn = Turn(*tables)
        self._add_norm: Any = load("triton-add-rmsnorm", "norm.add_rmsnorm")

    def turn(self, inputs: StepInputs) -> Turn:
        return self._turn

    def embed(self, inputs: StepInputs, table: Tensor, norm: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        from kbench.kernels.triton_step import embed_rms_norm

        return embed_rms_norm(inputs.tokens, table, norm, self._eps, feed=inputs.feed, sampled=sampled)

    def add_norm(self, change: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        # Each element of the sum is read and written by one thread: it may stand where the residual stood.
        normed = torch.empty_like(residual)
        self._add_norm.run(
            {"x": change, "residual": residual, "weight": weight, "eps": self._eps}, None, (normed, residual)
        )
        return residual, normed

    def place(
        self, layer: Layer, qkv: Tensor, inputs: StepInputs, turn: Turn, kv: KVPool, index: int, write: Phase
    ) -> Tensor:
        from kbench.kernels.triton_step import rope_kv_write

        q_heads, kv_heads, dim = self._heads
        norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
        tables = (turn.cos, turn.sin)
        with write:
            rope_kv_write(
                qkv,
                kv.layers[index],
                inputs.positions,
                inputs.slots.flat,
                tables,
                (q_heads, kv_heads),
                norms,
                self._eps,
            )
        return qkv.view(qkv.shape[0], q_heads + 2 * kv_heads, dim)[:, :q_heads]

    def argmax(self, logits: Tensor, sampled: Tensor) -> Tensor:
        from kbench.kernels.triton_step import argmax

        return argmax(logits, sampled)

    def draw(self, logits: Tensor, draws: Draws, sampled: Tensor) -> Tensor:
        from kbench.kernels.triton_step import draw

        return draw(logits, draws.heat, draws.top_k, draws.top_p, draws.noise, sampled)


def step_ops(device: torch.device, heads: tuple[int, int, int], eps: float, tables: tuple[Tensor, Tensor]) -> StepOps:
    """The fused kernels on CUDA, plain torch elsewhere."""
    return (TritonOps if device.type == "cuda" else TorchOps)(heads, eps, tables)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `[..., 2 * width]`, gate first: one kernel on CUDA."""
    if gate_up.device.type != "cuda":
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
    from kbench.kernels.triton_elementwise import TritonSiluMul

    rows = gate_up.reshape(-1, gate_up.shape[-1])
    out = torch.empty((rows.shape[0], rows.shape[1] // 2), dtype=rows.dtype, device=rows.device)
    return TritonSiluMul().run({"x": rows}, None, (out,)).view(*gate_up.shape[:-1], -1)
