"""Keys and values of one batch, copied out of their pages: for kernels that know no pages.

Owns the full conversion: what a batch holds, contiguous, sequences of equal lengths together. It serves level 1 alone,
which times `convert` apart; an engine that copied its cache in every step would be another engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV, sequence_kv

ONLY_KERNEL_LEVEL = "wants the keys and values of a batch in one contiguous tensor: level 1 only"


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with the same query and KV length."""

    query_len: int
    kv_len: int
    rows: Tensor | slice
    """Of the packed query: a slice where the group is the whole batch, else int64 `[count * query_len]`."""
    count: int
    k: Tensor
    """`[count, kv_heads, kv_len, head_dim]`"""
    v: Tensor


@dataclass(frozen=True, slots=True)
class ContiguousKV:
    groups: tuple[Group, ...]
    tokens: int

    @classmethod
    def of(cls, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec) -> ContiguousKV:
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for index, (row, query_len, kv_len) in enumerate(batch.spans()):
            if query_len:
                found.setdefault((query_len, kv_len), []).append((index, row))
        groups = []
        for (query_len, kv_len), members in found.items():
            count = len(members)
            k, v = (
                torch.empty((count, spec.kv_heads, kv_len, spec.head_dim), dtype=kv.k.dtype, device=kv.k.device)
                for _ in range(2)
            )
            for place, (index, _) in enumerate(members):
                keys, values = sequence_kv(kv, batch, index, kv_len)
                k[place].copy_(keys.transpose(0, 1))
                v[place].copy_(values.transpose(0, 1))
            rows: Tensor | slice = slice(0, batch.tokens)
            if len(found) > 1 or count * query_len != batch.tokens:
                places = [row + query for _, row in members for query in range(query_len)]
                rows = torch.tensor(places, dtype=torch.int64, device=kv.k.device)
            groups.append(Group(query_len, kv_len, rows, count, k, v))
        return cls(tuple(groups), batch.tokens)


class OnContiguousKV:
    """Base of implementations whose `run` gets a `ContiguousKV`."""

    name = ""

    def convert(self, kv: PagedKV) -> PagedKV:
        raise NotImplementedError(f"{self.name} {ONLY_KERNEL_LEVEL}")

    def convert_batch(self, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec) -> ContiguousKV:
        return ContiguousKV.of(kv, batch, spec)


def queries(q: Tensor, group: Group) -> Tensor:
    """The group's queries, `[count, q_heads, query_len, head_dim]`; a view where the group is the whole batch."""
    picked = q[group.rows] if isinstance(group.rows, slice) else q.index_select(0, group.rows)
    return picked.view(group.count, group.query_len, *q.shape[1:]).transpose(1, 2)


def put(out: Tensor, group: Group, answer: Tensor) -> None:
    """Store `[count, heads, query_len, …]` into packed rows."""
    packed = answer.transpose(1, 2).flatten(0, 1)
    if isinstance(group.rows, slice):
        out[group.rows].copy_(packed)
    else:
        out.index_copy_(0, group.rows, packed)
