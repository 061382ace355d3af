"""What a cheat or a bug of the zoo is, and the honest halves that most of them share.

Owns `Kind` and two honest implementations to depart from. Nothing here knows how a kind is caught: its `defence` names
the one switch without which it must pass, and `kbench selftest` finds out whether that is so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV, same_dtype
from kbench.ops.base import Outputs

State = dict[str, Any]
Sign = Literal["status", "UNSTABLE", "FALLBACK"]
HEADS = "head_dim=32,kv_heads=2,q_heads=4"


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to be wrong, or to look fast. `defence`: the field of `Defences` that catches it."""

    name: str
    op: str
    shape: str
    make: Callable[[], Any]
    defence: str
    dtype: str = "float32"
    cache: Literal["serving", "hot"] = "serving"
    own_process: bool = False
    """It spoils the process for whoever comes after it."""
    sign: Sign = "status"
    """How it shows: the trial does not end with ok, a reading is flagged, or another kernel was seen."""
    calls: int = 64
    """Timed calls a window."""


class Attend:
    """Paged attention, honest: subclasses spoil `attend`."""

    name = "attend"

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> tuple[AttentionBatch, AttentionSpec]:
        return batch, spec

    def run(self, q: Tensor, kv: PagedKV, plan: tuple[AttentionBatch, AttentionSpec], out: Tensor) -> Any:
        return self.attend(q, kv, *plan, out)

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Any:
        return same_dtype(q, kv, batch, spec, out)


class Norm(PlainKernel):
    """RMSNorm, honest."""

    name = "norm"

    def run(self, state: State, plan: None, out: Outputs) -> Any:
        return self.norm(state["x"], state["weight"], state["eps"], out[0])

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Any:
        return out.copy_(torch.nn.functional.rms_norm(x, weight.shape, weight, eps))


class Familiar:
    """How often a call came with this very output: a timer reuses its outputs, a check makes new ones.

    Outputs that were seen are held, so that none is taken for another one.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[object, int]] = {}

    def calls(self, out: object) -> int:
        _, count = self._seen.get(id(out), (out, 0))
        self._seen[id(out)] = out, count + 1
        return count

    def order(self, out: object, least: int) -> int:
        """Place of this output among those that came at least so often; -1 for one that did not."""
        known = [key for key, (_, count) in self._seen.items() if count >= least]
        return known.index(id(out)) if id(out) in known else -1
