"""Paged attention: what the operation is, what its exact answer is and what it costs.

Owns the nouns that callers and implementations share (`AttentionSpec`, `PagedKV`, `AttentionBatch`), the float64
oracle, the same mathematics in the case's own dtype, and the cost from actual lengths. It does not know who computes
the operation, how inputs are made (`ops.inputs`) or when an answer is good enough (`ops.correctness`).

Conventions: page 0 is the null page, never allocated and never read; queries are packed ragged, `[tokens, q_heads,
head_dim]`; query `i` of a sequence with `query_len` new tokens and `kv_len` tokens after the step sees the keys
`0 .. kv_len - query_len + i` (causal, aligned to the end); a row that sees no key is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["NHD", "HND"]
NULL_PAGE = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Heads of one attention layer; `q_heads` is a multiple of `kv_heads` (GQA)."""

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of one layer, in pages. Page 0 is the null page.

    NHD: `k`, `v` are `[pages, page_size, kv_heads, head_dim]`; HND: `[pages, kv_heads, page_size, head_dim]`.
    """

    k: Tensor
    v: Tensor
    page_size: int
    layout: Layout

    @property
    def pages(self) -> int:
        return self.k.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's batch: lengths and tables on the device for kernels, the same lengths on the host for planning."""

    query_start: Tensor
    """int32 `[n + 1]`, device: where each sequence's query tokens start in the packed query."""
    seq_lens: Tensor
    """int32 `[n]`, device: KV length after the step; K and V of the new tokens are written already."""
    block_table: Tensor
    """int32 `[n, max_pages]`, device: pages of each sequence; unused entries point at the null page."""
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    max_query: int
    max_kv: int

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        tables: Sequence[Sequence[int]],
        device: torch.device | str,
    ) -> AttentionBatch:
        """Pack host lengths and ragged page lists into one batch on `device`."""
        width = max((len(table) for table in tables), default=1) or 1
        padded = [[*table, *[NULL_PAGE] * (width - len(table))] for table in tables]
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)
        return cls(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(list(kv_lens), dtype=torch.int32, device=device),
            block_table=torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(tables), width),
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            max_query=max(query_lens, default=0),
            max_kv=max(kv_lens, default=0),
        )

    @property
    def sequences(self) -> int:
        return len(self.kv_lens)

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def is_decode(self) -> bool:
        return self.max_query == 1 and min(self.query_lens, default=1) == 1

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """`(first packed row, query length, KV length)` of every sequence, in order."""
        row = 0
        for query_len, kv_len in zip(self.query_lens, self.kv_lens, strict=True):
            yield row, query_len, kv_len
            row += query_len


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call must do at least, from actual lengths: padding and page tails are nobody's work."""

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


def cost(batch: AttentionBatch, spec: AttentionSpec, itemsize: int) -> Cost:
    """Two multiply-adds per visible (query, key, head, element); Q, K and V read once, the output written once."""
    pairs = sum(
        query_len * (kv_len - query_len) + query_len * (query_len + 1) // 2
        for query_len, kv_len in zip(batch.query_lens, batch.kv_lens, strict=True)
    )
    rows = batch.tokens * spec.q_heads * spec.head_dim * itemsize
    kv = 2 * sum(batch.kv_lens) * spec.kv_heads * spec.head_dim * itemsize
    return Cost(flops=4 * pairs * spec.q_heads * spec.head_dim, bytes_read=rows + kv, bytes_written=rows)


def sequence_kv(kv: PagedKV, batch: AttentionBatch, index: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """The first `kv_len` keys and values of one sequence, gathered: two tensors `[kv_len, kv_heads, head_dim]`."""
    pages = batch.block_table[index, : -(-kv_len // kv.page_size)].long()

    def gather(stored: Tensor) -> Tensor:
        picked = stored.index_select(0, pages)
        if kv.layout == "HND":
            picked = picked.transpose(1, 2)
        return picked.flatten(0, 1)[:kv_len]

    return gather(kv.k), gather(kv.v)


def oracle(
    q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, *, shift: int = 0, drop_last_page: bool = False
) -> Tensor:
    """The exact answer, float64 `[tokens, q_heads, head_dim]`, in chunks that fit at any context.

    `shift` moves the causal limit and `drop_last_page` hides the last page: wrong answers on purpose, for null models.
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for index, (row, query_len, kv_len) in enumerate(batch.spans()):
        keys, values = sequence_kv(kv, batch, index, kv_len)
        seen = (-(-kv_len // kv.page_size) - 1) * kv.page_size if drop_last_page else kv_len
        limits = torch.arange(kv_len - query_len + 1, kv_len + 1, device=q.device) + shift
        rows = slice(row, row + query_len)
        out[rows] = _attend(q[rows], keys, values, limits.clamp(0, seen), spec, torch.float64)
    return out


def same_dtype(q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
    """The oracle's mathematics with every intermediate in `q.dtype`: what plain code in that type can achieve."""
    for index, (row, query_len, kv_len) in enumerate(batch.spans()):
        keys, values = sequence_kv(kv, batch, index, kv_len)
        limits = torch.arange(kv_len - query_len + 1, kv_len + 1, device=q.device)
        rows = slice(row, row + query_len)
        out[rows] = _attend(q[rows], keys, values, limits, spec, q.dtype)
    return out


_CHUNK_ELEMENTS = 1 << 23
"""Largest temporary, in elements: 64 MiB in float64."""


def _attend(q: Tensor, keys: Tensor, values: Tensor, limits: Tensor, spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
    """softmax(q kᵀ) v of one sequence, `q` `[rows, q_heads, d]`, row `i` seeing the first `limits[i]` keys."""
    rows, kv_len = q.shape[0], keys.shape[0]
    if kv_len == 0:
        return torch.zeros_like(q, dtype=dtype)
    grouped = q.reshape(rows, spec.kv_heads, spec.group, spec.head_dim)
    out = torch.empty(grouped.shape, dtype=dtype, device=q.device)
    heads = max(1, min(spec.kv_heads, _CHUNK_ELEMENTS // (kv_len * spec.head_dim)))
    for head in range(0, spec.kv_heads, heads):
        some = slice(head, head + heads)
        k = keys[:, some].to(dtype).permute(1, 2, 0)
        v = values[:, some].to(dtype).transpose(0, 1)
        height = max(1, _CHUNK_ELEMENTS // (kv_len * spec.group * k.shape[0]))
        for top in range(0, rows, height):
            part = slice(top, top + height)
            out[part, some] = _softmax_rows(grouped[part, some].to(dtype), k, v, limits[part], spec.scale)
    return out.reshape(q.shape)


def _softmax_rows(q: Tensor, k: Tensor, v: Tensor, limits: Tensor, scale: float) -> Tensor:
    """`q` `[rows, heads, group, d]`, `k` `[heads, d, keys]`, `v` `[heads, keys, d]`; rows that see no key are 0."""
    rows, heads, group, dim = q.shape
    stacked = q.transpose(0, 1).reshape(heads, rows * group, dim)
    scores = (stacked @ k * scale).reshape(heads, rows, group, -1)
    hidden = torch.arange(scores.shape[-1], device=q.device) >= limits[:, None]
    scores = scores.masked_fill(hidden[None, :, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).masked_fill((limits <= 0)[None, :, None, None], 0.0)
    mixed = weights.reshape(heads, rows * group, -1) @ v
    return mixed.reshape(heads, rows, group, dim).transpose(0, 1)
