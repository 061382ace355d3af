"""Paged attention: what the operation is, what its exact answer is and what it costs.

Owns the nouns that callers and implementations share (`AttentionSpec`, `PagedKV`, `AttentionBatch`), the float64
oracle, the same mathematics in the case's own dtype, and the cost from actual lengths. It does not know who computes
the operation, how inputs are made (`ops.inputs`) or when an answer is good enough (`ops.correctness`).

Conventions: page 0 is the null page, never allocated and never read; queries are packed ragged, `[tokens, q_heads,
head_dim]`; query `i` of a sequence with `query_len` new tokens and `kv_len` tokens after the step sees the keys
`0 .. kv_len - query_len + i` (causal, aligned to the end), of these the last `window`; a row that sees no key is 0 and
its log-sum-exp is -inf (the sink's logit where there is a sink).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kbench.ops.base import Cost, Layout

NULL_PAGE = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer; `q_heads` is a multiple of `kv_heads` (GQA). The defaults are plain causal attention."""

    q_heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    """Keys that a query sees at most, its own among them; 0: all."""
    softcap: float = 0.0
    """Scaled scores s become softcap * tanh(s / softcap); 0: they stay."""
    sinks: Tensor | None = field(default=None, compare=False, repr=False)
    """float32 `[q_heads]`: a learned logit a head, neither scaled nor capped, that takes mass and gives no value."""
    lse: bool = False
    """Whether a call answers `(output, lse)`: float32 `[tokens, q_heads]`, the natural logarithm of the sum of the
    exponentials of all visible scores, and of the sink."""

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
    bounded: bool = False
    """For a captured graph: host lengths are bounds for any batch of this size, the device's count. `query_lens` and
    `kv_lens` are all 1 then, `max_query` and `max_kv` the longest that there may be."""

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


def first_visible(spec: AttentionSpec, position: int) -> int:
    """The first key that the query at `position` sees."""
    return max(0, position + 1 - spec.window) if spec.window else 0


def visible_tokens(batch: AttentionBatch, spec: AttentionSpec) -> int:
    """Cached tokens that some query sees: what a call must read."""
    return sum(
        kv_len - first_visible(spec, max(0, kv_len - query_len))
        for query_len, kv_len in zip(batch.query_lens, batch.kv_lens, strict=True)
    )


def visible_pairs(batch: AttentionBatch, spec: AttentionSpec) -> int:
    """Pairs of a query and a key that it sees."""
    pairs = 0
    for query_len, kv_len in zip(batch.query_lens, batch.kv_lens, strict=True):
        first = max(0, kv_len - query_len)  # position of the first query that sees anything
        full = min(kv_len, max(first, spec.window)) if spec.window else kv_len  # from here on the window is full
        pairs += (full * (full + 1) - first * (first + 1)) // 2 + (kv_len - full) * spec.window
    return pairs


def cost(batch: AttentionBatch, spec: AttentionSpec, itemsize: int) -> Cost:
    """Two multiply-adds per visible (query, key, head, element); Q, visible K and V read once, the output written."""
    rows = batch.tokens * spec.q_heads * spec.head_dim * itemsize
    kv = 2 * visible_tokens(batch, spec) * spec.kv_heads * spec.head_dim * itemsize
    sinks = 4 * spec.q_heads if spec.sinks is not None else 0
    return Cost(
        flops=4 * visible_pairs(batch, spec) * spec.q_heads * spec.head_dim,
        bytes_read=rows + kv + sinks,
        bytes_written=rows + (4 * batch.tokens * spec.q_heads if spec.lse else 0),
    )


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
    return oracle_lse(q, kv, batch, spec, shift=shift, drop_last_page=drop_last_page)[0]


def oracle_lse(
    q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, *, shift: int = 0, drop_last_page: bool = False
) -> tuple[Tensor, Tensor]:
    """As `oracle`, with the log-sum-exp, float64 `[tokens, q_heads]`."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    for index, (row, query_len, kv_len) in enumerate(batch.spans()):
        seen = (-(-kv_len // kv.page_size) - 1) * kv.page_size if drop_last_page else kv_len
        rows = slice(row, row + query_len)
        view = _Visible.of(query_len, kv_len, spec, q.device).moved(shift, max(0, seen))
        keys, values = sequence_kv(kv, batch, index, kv_len)
        out[rows], lse[rows] = _attend(q[rows], keys, values, view, spec, torch.float64)
    return out, lse


def same_dtype(q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
    """The oracle's mathematics with every intermediate in `q.dtype`: what plain code in that type can achieve."""
    return same_dtype_lse(q, kv, batch, spec, out)[0]


def same_dtype_lse(
    q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor
) -> tuple[Tensor, Tensor]:
    """As `same_dtype`, with the log-sum-exp in float32."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for index, (row, query_len, kv_len) in enumerate(batch.spans()):
        keys, values = sequence_kv(kv, batch, index, kv_len)
        rows = slice(row, row + query_len)
        view = _Visible.of(query_len, kv_len, spec, q.device)
        out[rows], lse[rows] = _attend(q[rows], keys, values, view, spec, q.dtype)
    return out, lse


@dataclass(frozen=True, slots=True)
class _Visible:
    """Row `i` sees the keys `lows[i] .. highs[i] - 1`; all of them lie in `first .. last - 1`."""

    lows: Tensor
    highs: Tensor
    first: int
    last: int

    @classmethod
    def of(cls, query_len: int, kv_len: int, spec: AttentionSpec, device: torch.device) -> _Visible:
        highs = torch.arange(kv_len - query_len + 1, kv_len + 1, device=device)
        lows = (highs - spec.window).clamp_min(0) if spec.window else torch.zeros_like(highs)
        return cls(lows, highs.clamp_min(0), first_visible(spec, max(0, kv_len - query_len)), kv_len)

    def moved(self, shift: int, seen: int) -> _Visible:
        """The causal limit moved, and no key from `seen` on."""
        return _Visible(self.lows, (self.highs + shift).clamp(0, seen), self.first, self.last)

    def rows(self, part: slice) -> _Visible:
        return _Visible(self.lows[part], self.highs[part], self.first, self.last)


_CHUNK_ELEMENTS = 1 << 23
"""Largest temporary, in elements: 64 MiB in float64."""


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, view: _Visible, spec: AttentionSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ) v of one sequence, `q` `[rows, q_heads, d]`, and the log-sum-exp `[rows, q_heads]`."""
    rows, tokens = q.shape[0], view.last - view.first
    grouped = q.reshape(rows, spec.kv_heads, spec.group, spec.head_dim)
    sinks = spec.sinks.reshape(spec.kv_heads, spec.group) if spec.sinks is not None else None
    out = torch.zeros(grouped.shape, dtype=dtype, device=q.device)
    lse = torch.empty(grouped.shape[:3], dtype=dtype, device=q.device)
    if tokens <= 0 or not rows:
        lse.copy_(sinks.expand(lse.shape) if sinks is not None else lse.new_full((), float("-inf")))
        return out.reshape(q.shape), lse.reshape(rows, spec.q_heads)
    keys, values = keys[view.first : view.last], values[view.first : view.last]
    heads = max(1, min(spec.kv_heads, _CHUNK_ELEMENTS // (tokens * spec.head_dim)))
    for head in range(0, spec.kv_heads, heads):
        some = slice(head, head + heads)
        k = keys[:, some].to(dtype).permute(1, 2, 0)
        v = values[:, some].to(dtype).transpose(0, 1)
        sink = sinks[some].to(dtype) if sinks is not None else None
        height = max(1, _CHUNK_ELEMENTS // (tokens * spec.group * k.shape[0]))
        for top in range(0, rows, height):
            part = slice(top, top + height)
            out[part, some], lse[part, some] = _softmax_rows(
                grouped[part, some].to(dtype), k, v, view.rows(part), spec, sink
            )
    return out.reshape(q.shape), lse.reshape(rows, spec.q_heads)


def _softmax_rows(
    q: Tensor, k: Tensor, v: Tensor, view: _Visible, spec: AttentionSpec, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`q` `[rows, heads, group, d]`, `k` `[heads, d, keys]`, `v` `[heads, keys, d]`; rows that see no key are 0."""
    rows, heads, group, dim = q.shape
    stacked = q.transpose(0, 1).reshape(heads, rows * group, dim)
    scores = (stacked @ k * spec.scale).reshape(heads, rows, group, -1)
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    place = torch.arange(view.first, view.last, device=q.device)
    hidden = (place >= view.highs[:, None]) | (place < view.lows[:, None])
    scores = scores.masked_fill(hidden[None, :, None, :], float("-inf"))
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, :, None].expand(heads, rows, group, 1)), dim=-1)
    nothing = hidden.all(dim=-1)[None, :, None, None]
    weights = torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0)[..., : v.shape[1]]
    mixed = weights.reshape(heads, rows * group, -1) @ v
    lse = torch.logsumexp(scores, dim=-1).transpose(0, 1)
    return mixed.reshape(heads, rows, group, dim).transpose(0, 1), lse
