"""Decode that streams the cache: tiles of pages with a running maximum and sum, the batch in step.

The gathered tensor is never built. A tile is a few pages of every sequence, copied into a scratch that fits in a core's
cache and used up at once. Sequences are visited from long to short, so that a tile holds only those that reach it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

TILE_BYTES = 1 << 20
"""K and V of a tile: half of the 2 MiB second-level cache of a current server core; scores and sums take the rest."""


@dataclass(frozen=True, slots=True)
class Tile:
    active: int
    """The longest `active` sequences reach this tile."""
    pages: Tensor
    """int64 `[active * width]`: their pages."""
    hidden: Tensor | None
    """bool `[active, tokens]`, True where a sequence ended; None where none ends in this tile."""


@dataclass(frozen=True, slots=True)
class BlockedPlan:
    spec: AttentionSpec
    order: Tensor
    """int64 `[n]`: sequences from long to short."""
    tiles: tuple[Tile, ...]


class BlockedDecode:
    """Decode by online softmax over tiles; sums are float32 whatever the cache's dtype."""

    name = "blocked"

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> BlockedPlan:
        device, size = batch.block_table.device, kv.page_size
        order = sorted(range(batch.sequences), key=lambda index: -batch.kv_lens[index])
        lengths = [batch.kv_lens[index] for index in order]
        on_device = torch.tensor(order, dtype=torch.int64, device=device)
        table = batch.block_table.index_select(0, on_device).long()
        ends = batch.seq_lens.index_select(0, on_device)
        page_bytes = 2 * size * spec.kv_heads * spec.head_dim * kv.k.element_size()
        tiles, start = [], 0
        while start < batch.max_kv:
            active = sum(length > start for length in lengths)
            width = max(1, TILE_BYTES // (page_bytes * active))
            first = start // size
            width = min(width, -(-lengths[0] // size) - first)
            pages = table[:active, first : first + width].reshape(-1)
            stop = start + width * size
            hidden = None
            if lengths[active - 1] < stop:
                hidden = torch.arange(start, stop, device=device) >= ends[:active, None]
            tiles.append(Tile(active, pages, hidden))
            start = stop
        return BlockedPlan(spec, on_device, tuple(tiles))

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, BlockedPlan)
        spec, n = plan.spec, q.shape[0]
        ordered = q.index_select(0, plan.order).reshape(n, spec.kv_heads, spec.group, spec.head_dim)
        query = ordered.float().mul_(spec.scale)
        largest = query.new_full((n, spec.kv_heads, spec.group, 1), float("-inf"))
        total = torch.zeros_like(largest)
        mixed = torch.zeros_like(query)
        for tile in plan.tiles:
            reached = slice(0, tile.active)
            self._absorb(tile, query[reached], kv, largest[reached], total[reached], mixed[reached])
        mixed.div_(total.clamp_min_(torch.finfo(torch.float32).tiny))
        out[plan.order] = mixed.reshape(q.shape).to(out.dtype)
        return out

    @staticmethod
    def _absorb(tile: Tile, query: Tensor, kv: PagedKV, largest: Tensor, total: Tensor, mixed: Tensor) -> None:
        """Fold one tile into the running maximum, sum and weighted values of the sequences that reach it, in place."""
        keys = _heads(kv.k.index_select(0, tile.pages), kv.layout, tile.active)
        values = _heads(kv.v.index_select(0, tile.pages), kv.layout, tile.active)
        if tile.hidden is not None:
            values.masked_fill_(tile.hidden[:, None, :, None], 0.0)
        scores = query @ keys.transpose(2, 3)
        if tile.hidden is not None:
            scores.masked_fill_(tile.hidden[:, None, None, :], float("-inf"))
        peak = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        fade = torch.exp(largest - peak)
        total.mul_(fade).add_(weights.sum(dim=-1, keepdim=True))
        mixed.mul_(fade).add_(weights @ values)
        largest.copy_(peak)


def _heads(tile: Tensor, layout: str, sequences: int) -> Tensor:
    """Pages of a tile as float32 `[sequences, kv_heads, tokens, head_dim]`; a view where the layout allows it."""
    if layout == "NHD":
        _, size, heads, dim = tile.shape
        return tile.view(sequences, -1, heads, dim).float().transpose(1, 2)
    _, heads, size, dim = tile.shape
    grouped = tile.view(sequences, -1, heads, size, dim).float()
    return grouped.transpose(1, 2).reshape(sequences, heads, -1, dim)
