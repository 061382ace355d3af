"""The paged KV cache: one pool of K and V a layer, at any page size and in either layout.

Owns the tensors, the write of new tokens' K and V, and the snapshot of the slots that a step writes. Page 0 is the
null page: never allocated, unused table entries point at it. The last page is the dummy page: never allocated either,
it takes what rows that only pad a step write. It does not know which request owns a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kbench.catalog import ModelShape
from kbench.errors import UsageError
from kbench.ops.attention import PagedKV
from kbench.ops.base import Layout

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Slots:
    """Where a step's tokens go, one entry a token, int64 on the device: `flat` = `page` * page_size + `offset`."""

    flat: Tensor
    page: Tensor
    offset: Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """K and V of some slots in every layer, `[layers, 2, tokens, kv_heads, head_dim]`."""

    slots: Slots
    values: Tensor


class KVPool:
    """K and V of all layers. `pages` are usable pages; the null page and the dummy page are added."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        pages: int,
        page_size: int,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        tail = (page_size, shape.kv_heads) if layout == "NHD" else (shape.kv_heads, page_size)
        size = (pages + 2, *tail, shape.head_dim)
        fill = float("nan") if poison else 0.0
        self.pages = pages
        self.dummy_page = pages + 1
        self.page_size = page_size
        self.layout = layout
        self.layers: tuple[PagedKV, ...] = tuple(
            PagedKV(
                k=torch.full(size, fill, dtype=dtype, device=device),
                v=torch.full(size, fill, dtype=dtype, device=device),
                page_size=page_size,
                layout=layout,
            )
            for _ in range(shape.layers)
        )
        # Views with the token axis before the head axis, made once: writing then needs no branch and no copy.
        self._views = tuple(
            tuple(t if layout == "NHD" else t.permute(0, 2, 1, 3) for t in (layer.k, layer.v)) for layer in self.layers
        )

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.k, layer.v))

    def write(self, layer: int, slots: Slots, k: Tensor, v: Tensor) -> None:
        """Store `[tokens, kv_heads, head_dim]` new keys and values. Slots outside the dummy page are distinct."""
        keys, values = self._views[layer]
        if self.layout == "NHD":
            keys.flatten(0, 1).index_copy_(0, slots.flat, k)
            values.flatten(0, 1).index_copy_(0, slots.flat, v)
        else:
            where = (slots.page, slots.offset)
            keys.index_put_(where, k)
            values.index_put_(where, v)

    def poison(self) -> None:
        """Fill everything with NaN: what is read without having been written shows in the output."""
        for layer in self.layers:
            layer.k.fill_(float("nan"))
            layer.v.fill_(float("nan"))

    def clear(self) -> None:
        for layer in self.layers:
            layer.k.zero_()
            layer.v.zero_()

    def fill_random(self, slots: Slots, generator: torch.Generator) -> None:
        """Unit normal keys and values in `slots` of every layer, the same for any page size and layout.

        Drawn layer by layer in the order of `slots`, on the generator's device.
        """
        for index, layer in enumerate(self.layers):
            heads, dim = (layer.k.shape[2 if self.layout == "NHD" else 1], layer.k.shape[3])
            size = (slots.flat.shape[0], heads, dim)
            for target in (0, 1):
                drawn = torch.randn(size, generator=generator, device=generator.device, dtype=torch.float32)
                self._views[index][target].index_put_((slots.page, slots.offset), drawn.to(layer.k))

    def snapshot(self, slots: Slots) -> Snapshot:
        """What `slots` hold now; `restore` puts it back, so that a step can be repeated from the same state."""
        rows = [torch.stack([view[slots.page, slots.offset] for view in pair]) for pair in self._views]
        return Snapshot(slots, torch.stack(rows))

    def restore(self, snapshot: Snapshot) -> None:
        where = (snapshot.slots.page, snapshot.slots.offset)
        for index, pair in enumerate(self._views):
            for target, view in enumerate(pair):
                view.index_put_(where, snapshot.values[index, target])


def torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UsageError(f"no dtype {name!r}", remedy=f"one of {', '.join(DTYPES)}")
    return DTYPES[name]
