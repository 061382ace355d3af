"""What a forward pass and the sampler read of one step: device tensors, in buffers that the next step overwrites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kbench.engine.kv import Slots
from kbench.ops.attention import AttentionBatch


class Draw(NamedTuple):
    """How a row's token is drawn: `noise` is `engine.sampler.noise_state`. The defaults are greedy."""

    heat: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    noise: int = 0


@dataclass(frozen=True, slots=True)
class Draws:
    """The same for all rows of logits, `[rows]` each: float32, int32, float32, int64."""

    heat: Tensor
    top_k: Tensor
    top_p: Tensor
    noise: Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device tensors of one step. They live in buffers that the next step overwrites."""

    tokens: Tensor
    """int32 `[tokens]`."""
    positions: Tensor
    """int32 `[tokens]`, from 0."""
    slots: Slots
    decode: AttentionBatch | None
    """The first `decode_tokens` packed rows; None when there are none."""
    prefill: AttentionBatch | None
    """The packed rows from `decode_tokens` on; None when there are none."""
    decode_tokens: int
    logit_rows: Tensor
    """int32: packed rows that yield a token, in the order of `StepPlan.sampling`."""
    every_row: bool = False
    """`logit_rows` counts all rows in packed order."""
    draws: Draws | None = None
    """How the device draws each row's token; None where it does not."""
    feed: Tensor | None = None
    """int32 `[tokens]`: where it is not negative, the token is the one that the step before sampled at this index; None
    where all tokens are known to the host."""
