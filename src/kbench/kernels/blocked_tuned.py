"""`blocked` with its tile as a tunable: how many bytes of K and V a step of the running softmax takes at once.

Small tiles stay in a core's cache and cost more calls; large ones cost fewer calls and more traffic. Which is better
depends on the core, the batch and the context: that is what the tuner is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.kernels.blocked import TILE_BYTES, BlockedDecode, BlockedPlan, Tile
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

CHOICES = (TILE_BYTES, 1 << 18, 1 << 19, 1 << 21, 1 << 23)
"""The rule of thumb of `blocked` first."""


class BlockedTunedDecode(BlockedDecode):
    """Decode by online softmax over tiles of `tile_bytes`."""

    name = "blocked-tuned"

    def __init__(self, tile_bytes: int = TILE_BYTES) -> None:
        self._tile_bytes = tile_bytes

    def configurations(self, shape: Resolved) -> list[dict[str, int]]:
        """Tiles up to the first that holds the whole cache: larger ones would be the same."""
        context = 0 if shape.point is None else shape.point.kv_tokens
        whole = 8 * context * shape.integer("kv_heads") * shape.integer("head_dim")  # K and V in float32
        kept = [size for size in CHOICES if size == TILE_BYTES or size // 2 < whole]
        return [{"tile_bytes": size} for size in kept]

    def with_configuration(self, configuration: Mapping[str, Any]) -> BlockedTunedDecode:
        return BlockedTunedDecode(int(configuration["tile_bytes"]))

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> BlockedPlan:
        device, size = batch.block_table.device, kv.page_size
        order = sorted(range(batch.sequences), key=lambda index: -batch.kv_lens[index])
        lengths = [batch.kv_lens[index] for index in order]
        on_device = torch.tensor(order, dtype=torch.int64, device=device)
        table = batch.block_table.index_select(0, on_device).long()
        ends = batch.seq_lens.index_select(0, on_device)
        page_bytes = 2 * size * spec.kv_heads * spec.head_dim * kv.k.element_size()
        tiles: list[Tile] = []
        start = 0
        while start < batch.max_kv:
            active = sum(length > start for length in lengths)
            width = min(max(1, self._tile_bytes // (page_bytes * active)), -(-(lengths[0] - start) // size))
            stop = start + width * size
            pages = table[:active, start // size : start // size + width].reshape(-1)
            tiles.append(Tile(active, pages, _hidden(ends[:active], lengths[active - 1], start, stop)))
            start = stop
        return BlockedPlan(spec, on_device, tuple(tiles))


def _hidden(ends: Tensor, shortest: int, start: int, stop: int) -> Tensor | None:
    """Where a tile's sequences have ended already; None where none has."""
    return torch.arange(start, stop, device=ends.device) >= ends[:, None] if shortest < stop else None
