"""Queries and keys whose scores are made to measure.

Owns the planting of needles and of rising scores into drawn values, in place. What the kinds are for is told in
`ops.inputs`; it knows neither pages nor answers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kbench.ops.attention import AttentionSpec, first_visible

ONE_HOT_HEADROOM = 200.0
"""Above the mass of all other keys: an exponential of it overflows float32."""
NEAR_CAP = 0.98
"""A capped score reaches the cap nowhere; needles go so far."""
LIFT_OF_CAP = 0.76
"""With a soft cap, needles stand among scores that are lifted to this share of it, where it bends them (tanh of 1)."""
LIFT_SPREAD = 2.0
"""Of the lifted scores, as a multiple of the spread that was drawn."""
LIFT_RESERVE = 3.0
"""Room between the mass of all keys and the cap, for the needle."""
RISE = 24.0
"""From the first key to the last: far enough to move any maximum, near enough for half precision to follow."""
RISE_NOISE = 0.03
"""What is left of the random part of a score."""


def plant_needles(
    q: Tensor, keys: Tensor, sequences: list[tuple[int, int]], spec: AttentionSpec, *, one_hot: bool = False
) -> None:
    """Turn the keys at the edges of what the last query sees towards it, each with the mass of all others together.

    The edges: the last key, with a window also the first key in it and the last one before it, which nobody may see.
    The query before the last becomes equal to it, so that a mask which looks one key ahead finds the needle as well.
    """
    if spec.softcap and not one_hot:
        _lift(q, keys, max(kv_len for _, kv_len in sequences), spec)
    row = start = 0
    for query_len, kv_len in sequences:
        row, base, start = row + query_len, start, start + kv_len
        if query_len > 1:
            q[row - 2] = q[row - 1]
        if kv_len <= 1:
            continue
        heads = q[row - 1].double().reshape(spec.kv_heads, spec.group, spec.head_dim)
        first, last = first_visible(spec, kv_len - 1), kv_len - 1
        edged = not one_hot and 0 < spec.window <= kv_len
        needles = {last, first, *([first - 1] if first else [])} if edged else {last}
        among = [place for place in (first,) if place not in needles]
        others = keys[base + (among[0] if among else first + 1) : base + last].double()
        wanted = _mass(others, heads, spec) + (ONE_HOT_HEADROOM if one_hot else 0.0)
        key = (torch.linalg.pinv(heads) @ (_uncapped(wanted, spec) / spec.scale)[..., None])[..., 0]
        for place in needles:
            keys[base + place] = key.to(keys.dtype)


def _mass(others: Tensor, heads: Tensor, spec: AttentionSpec) -> Tensor:
    """log-sum-exp of the scores of `others` `[keys, kv_heads, d]` with `heads` `[kv_heads, group, d]`; 0 of none."""
    if not others.shape[0]:
        return heads.new_zeros(heads.shape[:2])
    columns = []
    for head in range(spec.kv_heads):
        scores = others[:, head] @ heads[head].T * spec.scale
        scores = spec.softcap * torch.tanh(scores / spec.softcap) if spec.softcap else scores
        columns.append(torch.logsumexp(scores, dim=0))
    return torch.stack(columns)


def _uncapped(score: Tensor, spec: AttentionSpec) -> Tensor:
    """What a soft cap turns into `score`."""
    if not spec.softcap:
        return score
    return spec.softcap * torch.atanh((score / spec.softcap).clamp(-NEAR_CAP, NEAR_CAP))


def plant_rise(q: Tensor, keys: Tensor, sequences: list[tuple[int, int]], spec: AttentionSpec) -> None:
    """Give every query the same share of one direction, and every key more of it than the key before."""
    _put(q, torch.full((q.shape[0],), float(1.0 / spec.scale), device=q.device), RISE_NOISE)
    steps = [
        torch.arange(kv_len, device=q.device) * (min(RISE, 0.25 * kv_len) / max(1, kv_len)) for _, kv_len in sequences
    ]
    _put(keys, torch.cat(steps).float(), 1.0)


def _lift(q: Tensor, keys: Tensor, context: int, spec: AttentionSpec) -> None:
    """Raise all scores to where the soft cap bends them, but leave room below the cap for a needle."""
    visible = min(context, spec.window) if spec.window else context
    level = min(LIFT_OF_CAP * spec.softcap, spec.softcap - math.log(max(1, visible)) - LIFT_RESERVE)
    if level <= 0:
        return
    lifted = spec.softcap * math.atanh(level / spec.softcap)
    _put(q, torch.full((q.shape[0],), float(1.0 / spec.scale), device=q.device), LIFT_SPREAD)
    _put(keys, torch.full((keys.shape[0],), lifted, device=q.device), 1.0)


def _put(values: Tensor, share: Tensor, keep: float) -> None:
    """Replace the part of `values` `[tokens, heads, d]` along one direction by `share`, scale the rest by `keep`."""
    dim = values.shape[-1]
    direction = torch.zeros(dim, dtype=torch.float32, device=values.device)
    direction[:: max(1, dim // 16)] = 1.0  # spread out: rounding of one element is not the whole score
    direction /= direction.norm()
    wide = values.float()
    across = wide - (wide @ direction)[..., None] * direction
    values.copy_(keep * across + share[:, None, None] * direction)
