"""The contracts between operations and whoever computes them.

Owns the protocols only. Built-ins and plug-ins implement them alike; callers (the engine, level 1) know nothing else
about an implementation. What an implementation supports is declared in `kbench.catalog`, not here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV
from kbench.ops.base import Outputs


@runtime_checkable
class Attention(Protocol):
    """One implementation of `attention.decode` and/or `attention.prefill` over a paged KV cache.

    An instance may hold workspaces, never the result of a call: it is asked for many batches, in any order.
    """

    @property
    def name(self) -> str: ...

    def convert(self, kv: PagedKV) -> PagedKV:
        """The cache in the layout that `run` wants; the identity returns `kv` itself. Timed apart."""
        ...

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> object:
        """Metadata and workspaces for this batch, built once a step and used by all layers. Timed apart."""
        ...

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        """Attention of packed `q` `[tokens, q_heads, head_dim]` against `kv`.

        May fill and return `out` (same shape, dtype and device as `q`) or return another such tensor: the caller uses
        what is returned. Decode: every query length is 1. Prefill: ragged, causal with offset `kv_len - query_len`.
        Unused slots, unused pages and the null page may hold NaN. Inputs are not changed.
        """
        ...


@runtime_checkable
class TensorKernel(Protocol):
    """One implementation of an operation with named arguments (`kbench.ops.tensors`).

    Arguments are those that the operation lists, by name. An instance may hold workspaces, never the result of a call.
    """

    @property
    def name(self) -> str: ...

    def convert(self, arguments: dict[str, Any]) -> Any:
        """Arguments with weights in the layout that `run` wants; the identity returns them as they are. Timed apart."""
        ...

    def plan(self, state: Any) -> Any:
        """Metadata and workspaces for what `convert` returned. Timed apart."""
        ...

    def run(self, state: Any, plan: Any, out: Outputs) -> Tensor | Outputs:
        """The answer: `out`, filled, or other tensors of the same form. One output may be returned bare."""
        ...


class PlainKernel(ABC):
    """Base of implementations that convert and plan nothing: they write `run` alone."""

    name = "plain"

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    def plan(self, state: dict[str, Any]) -> None:
        return None

    @abstractmethod
    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor | Outputs:
        """As `TensorKernel.run`. Abstract: one that forgot it would be taken for one that says no."""
