"""Pools of pages for the operations that move keys and values: who has which page, and where a token lies.

Owns scattered pages, tables and slots. A slot is `page * page_size + offset`. It knows nothing of attention, and not
who moves what.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kbench.ops.base import InputSettings

SPARE_PAGES = 4
"""Pages that belong to nobody."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Which pages each sequence has, in order; page 0 is nobody's."""

    size: int
    count: int
    """Pages of the pool, the null page and the spare ones included."""
    owned: tuple[Tensor, ...]

    @classmethod
    def scattered(cls, lengths: list[int], size: int, generator: torch.Generator) -> Pages:
        """As many pages as each length needs, in random order."""
        needed = [-(-length // size) for length in lengths]
        total = sum(needed)
        order = torch.randperm(total + SPARE_PAGES, generator=generator, device=generator.device).cpu() + 1
        return cls(size, 1 + total + SPARE_PAGES, tuple(torch.split(order[:total], needed)))

    def of(self, index: int) -> Tensor:
        return self.owned[index]

    def slots(self, index: int, positions: Tensor) -> Tensor:
        """int64 slots of a sequence's tokens."""
        return self.owned[index][positions // self.size] * self.size + positions % self.size

    def table(self) -> Tensor:
        """int32 `[n, most pages]`; unused entries are the null page."""
        width = max((len(pages) for pages in self.owned), default=1)
        table = torch.zeros((len(self.owned), width), dtype=torch.int32)
        for row, pages in enumerate(self.owned):
            table[row, : len(pages)] = pages
        return table


def empty_pool(pages: int, page_size: int, form: tuple[int, ...], layout: str, settings: InputSettings) -> Tensor:
    """All NaN: NHD `[pages, page_size, kv_heads, head_dim]`, HND `[pages, kv_heads, page_size, head_dim]`."""
    heads, dim = form
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    return torch.full((pages, *inner, dim), float("nan"), dtype=settings.dtype, device=settings.device)


def scatter(pool: Tensor, slots: Tensor, rows: Tensor, page_size: int, layout: str) -> None:
    """Put `rows` `[tokens, kv_heads, head_dim]` into slots."""
    slots = slots.to(pool.device)
    page, offset = slots // page_size, slots % page_size
    if layout == "NHD":
        pool[page, offset] = rows
    else:
        pool[page, :, offset] = rows


def token_rows(table: Tensor, lengths: Tensor, page_size: int) -> Tensor:
    """Slots of all tokens, sequence by sequence."""
    rows = []
    for pages, length in zip(table.long(), lengths.tolist(), strict=True):
        positions = torch.arange(length, device=table.device)
        rows.append(pages[positions // page_size] * page_size + positions % page_size)
    return torch.cat(rows)
