"""Rotary position embedding of queries and keys.

q `[tokens, q_heads, head_dim]`, k `[tokens, kv_heads, head_dim]`, positions int64 or int32 `[tokens]`, cos and sin
float32 `[positions, rotary / 2]`: of each head, the first `rotary` elements are turned pair by pair, the rest are left
as they are. Pairs are `(i, i + rotary / 2)`, or `(2i, 2i + 1)` where `interleaved`. Positions are those of the batch's
new tokens, `kv_len - query_len` on, plus `offset`; without a batch they count from `offset`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.errors import UsageError
from kbench.ops.base import Cost, Edge, InputSettings, Outputs
from kbench.ops.norm import draw
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, rows_cost


class Rope(TensorOp):
    """(q, k) turned by their positions, in new tensors."""

    arguments: ClassVar[tuple[str, ...]] = ("q", "k", "positions", "cos", "sin", "interleaved")
    names = ("q", "k")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        dim = shape.integer("head_dim")
        rotary = shape.integer("rotary") or dim
        if rotary % 2 or rotary > dim:
            raise UsageError(f"rope: rotary={rotary} of head_dim={dim}", remedy="an even number, at most head_dim")
        positions = _positions(shape, kind)
        index = torch.int32 if kind == "int32" else torch.int64
        cos, sin = tables(int(positions.max()) + 1 if len(positions) else 1, rotary, shape.number("theta"))
        tokens = len(positions)
        q, k = (draw((tokens, shape.integer(name), dim), settings, generator) for name in ("q_heads", "kv_heads"))
        if kind == "strided":  # as they come out of a fused projection
            heads = shape.integer("q_heads") + shape.integer("kv_heads")
            whole = draw((tokens, heads, dim), settings, generator)
            q, k = whole[:, : shape.integer("q_heads")], whole[:, shape.integer("q_heads") :]
        arguments = {
            "q": q,
            "k": k,
            "positions": positions.to(index).to(settings.device),
            "cos": cos.to(settings.device),
            "sin": sin.to(settings.device),
            "interleaved": bool(shape.integer("interleaved")),
        }
        roles: dict[str, Any] = {"q": "activation", "k": "activation", "positions": "metadata"}
        roles |= {"cos": "weight", "sin": "weight", "interleaved": "scalar"}
        return TensorInputs(shape, arguments, roles, settings.dtype)

    def exact(self, inputs: TensorInputs) -> Outputs:
        return self._turned(inputs, torch.float64)

    def plain(self, inputs: TensorInputs) -> Outputs:
        return self._turned(inputs, inputs.dtype)

    def _turned(self, inputs: TensorInputs, dtype: torch.dtype, **changed: Any) -> Outputs:
        given = {**inputs.arguments, **changed}
        angles = (given[name].to(dtype)[given["positions"].long()] for name in ("cos", "sin"))
        cos, sin = angles
        return tuple(rotate(given[name].to(dtype), cos, sin, given["interleaved"]) for name in ("q", "k"))

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        given, wide = own.inputs.arguments, torch.float64
        inputs, positions = own.inputs, own.inputs.arguments["positions"]
        rotary = 2 * given["cos"].shape[1]
        late = self._turned(inputs, wide, positions=(positions - 1).clamp_min(0))
        cut = tuple(value.clone() for value in own.expected)
        for value in cut:
            value[..., rotary:] = 0.0
        return {
            **super().wrong(own),
            "not turned": (given["q"].double(), given["k"].double()),
            "key not turned": (own.expected[0], given["k"].double()),
            "one position late": late,
            "turned the other way": self._turned(inputs, wide, sin=-given["sin"]),
            "the other pairs": self._turned(inputs, wide, interleaved=not given["interleaved"]),
            "rest of the head zeroed": cut,
        }

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        dim = shape.integer("head_dim")
        small = Resolved(shape.op, None, {**shape.axes, "tokens": 5, "rotary": 0})
        part = max(2, dim // 4 * 2)
        return (
            Edge("one token", small.with_axes(tokens=1, offset=7)),
            Edge("no token", small.with_axes(tokens=0)),
            Edge("int32 positions", small, "int32"),
            Edge("far positions", small.with_axes(offset=30_000)),
            Edge("half of the head", small.with_axes(rotary=part, offset=15)),
            Edge("two elements of the head", small.with_axes(rotary=2, offset=3)),
            Edge("interleaved pairs", small.with_axes(interleaved=1, offset=15)),
            Edge("odd heads", small.with_axes(q_heads=7, kv_heads=1, head_dim=80, offset=99)),
            Edge("positions in no order", small.with_axes(offset=4), "shuffled"),
            Edge("views of a fused projection", small.with_axes(offset=4), "strided"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        q, k, cos, sin = (inputs.arguments[name] for name in ("q", "k", "cos", "sin"))
        tokens = len(q)
        read = (q, k, inputs.arguments["positions"], cos[:1].expand(tokens, -1), sin[:1].expand(tokens, -1))
        turned = tokens * (q.shape[1] + k.shape[1]) * cos.shape[1]
        return rows_cost(6 * turned, read, (q, k))

    def streamed_bytes(self, inputs: TensorInputs) -> int:
        """All layers use the same rows of the tables: nothing of them is cold but in the first."""
        return 0

    def outputs(self, inputs: TensorInputs) -> Outputs:
        given = inputs.arguments
        return tuple(
            torch.empty(given[name].shape, dtype=given[name].dtype, device=given[name].device) for name in ("q", "k")
        )


def tables(positions: int, rotary: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin float32 `[positions, rotary / 2]` of position * theta^(-2i / rotary)."""
    steps = torch.arange(0, rotary, 2, dtype=torch.float64) / rotary
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * theta**-steps
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The definition, in the dtype of its arguments; `cos`, `sin` `[tokens, rotary / 2]`."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = head[..., ::2], head[..., 1::2]
    else:
        first, second = head[..., :half], head[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined, rest), dim=-1)


def _positions(shape: Resolved, kind: str) -> Tensor:
    offset = shape.integer("offset")
    if shape.point is not None:
        parts = [torch.arange(kv - query, kv) for query, kv in shape.point.sequences]
        positions = torch.cat(parts)
    else:
        positions = torch.arange(shape.integer("tokens"))
    if kind == "shuffled":
        positions = positions.flip(0) * 3
    return positions + offset
