"""Rotary positions: the inverse frequencies of a model shape, and the tables of cos and sin.

Owns the four ways of `catalog.Rope` to stretch a context. Formulas: plain, Su et al. 2021; linear, Chen et al. 2023;
llama3, the rule published with Llama 3.1; yarn, Peng et al. 2023 (NTK by parts). It knows no weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kbench.catalog import ModelShape, Rope


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Radians a position, float32 `[rotary / 2]` on the CPU; `rotary` is `rope.share` of a head's elements."""
    rope = shape.rope
    rotary = rotary_dim(shape)
    plain = 1.0 / (shape.rope_theta ** (torch.arange(0, rotary, 2, dtype=torch.int64).float() / rotary))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_context * plain / (2 * math.pi)
        keep = ((turns - rope.low_turns) / (rope.high_turns - rope.low_turns)).clamp(0.0, 1.0)
        return (1 - keep) * plain / rope.factor + keep * plain
    if rope.kind == "yarn":
        keep = 1 - _yarn_ramp(rope, shape.rope_theta, rotary)
        return plain / rope.factor * (1 - keep) + plain * keep
    return plain


def rotary_dim(shape: ModelShape) -> int:
    """Elements of a head that turn."""
    return int(shape.head_dim * shape.rope.share)


def _yarn_ramp(rope: Rope, theta: float, rotary: int) -> Tensor:
    """0 for frequencies that stay, 1 for those that are stretched by the whole factor, float32 `[rotary / 2]`."""

    def dimension_that_turns(times: float) -> float:
        return rotary * math.log(rope.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    if low == high:
        high += 0.001  # a step, where a ramp would divide by zero
    return ((torch.arange(rotary // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)


def rotary_tables(shape: ModelShape, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of positions from 0 on, each `[positions, 1, rotary / 2]`, broadcast over heads."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(shape))
    cos, sin = (table * shape.rope.magnitude for table in (angles.cos(), angles.sin()))
    return cos.to(device, dtype).unsqueeze(1), sin.to(device, dtype).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `[tokens, heads, head_dim]`; the halves of the rotary part are paired, as Hugging Face does.

    `cos` and `sin` are the tokens' rows of the tables. Elements behind the rotary part are passed on.
    """
    rotary = 2 * cos.shape[-1]
    turning = heads if rotary == heads.shape[-1] else heads[..., :rotary]
    first, second = turning.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned if turning is heads else (*turned, heads[..., rotary:]), dim=-1)
