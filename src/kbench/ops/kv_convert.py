"""The same cache at another page size, or in the other layout. The contract is that of `ops.kv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.errors import UsageError
from kbench.ops.base import InputSettings, Layout, Outputs
from kbench.ops.kv import Move, batch_of, draw_rows
from kbench.ops.pools import Pages, empty_pool, scatter, token_rows
from kbench.ops.tensors import TensorInputs


class ConvertPages(Move):
    """k_from, v_from, table_from int32 `[n, pages]`, lengths int32 `[n]` → k_to, v_to at table_to, pages of
    `page_size_to` tokens. Target tables do not share pages."""

    arguments = (
        "k_from",
        "v_from",
        "table_from",
        "lengths",
        "k_to",
        "v_to",
        "table_to",
        "page_size_from",
        "page_size_to",
        "layout_from",
        "layout_to",
    )
    mistakes = ("last token left out", "one token late", "heads swapped")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        lengths = [kv for _, kv in batch_of(shape).sequences]
        form = (shape.integer("kv_heads"), shape.integer("head_dim"))
        size_to, layout_to = self.target(shape, settings)
        have = Pages.scattered(lengths, settings.page_size, generator)
        want = Pages.scattered(lengths, size_to, generator)
        arguments: dict[str, Any] = {}
        for name in ("k", "v"):
            pool = empty_pool(have.count, settings.page_size, form, settings.layout, settings)
            for index, length in enumerate(lengths):
                rows = draw_rows((length, *form), settings, generator)
                slots = have.slots(index, torch.arange(length))
                scatter(pool, slots, rows, settings.page_size, settings.layout)
            arguments[f"{name}_from"] = pool
            arguments[f"{name}_to"] = empty_pool(want.count, size_to, form, layout_to, settings)
        arguments |= {
            "table_from": have.table().to(settings.device),
            "table_to": want.table().to(settings.device),
            "lengths": torch.tensor(lengths, dtype=torch.int32, device=settings.device),
            "page_size_from": settings.page_size,
            "page_size_to": size_to,
            "layout_from": settings.layout,
            "layout_to": layout_to,
        }
        arguments = {name: arguments[name] for name in self.arguments}
        roles: dict[str, Any] = {name: _role(name) for name in arguments}
        initial = {name: arguments[name].clone() for name in ("k_to", "v_to")}
        return TensorInputs(shape, arguments, roles, settings.dtype, initial)

    def target(self, shape: Resolved, settings: InputSettings) -> tuple[int, Layout]:
        """Page size and layout of the target."""
        size = shape.integer("page_to")
        if size < 1:
            raise UsageError(f"{shape.op}: a page of {size} tokens", remedy="page_to is at least 1")
        return size, settings.layout

    def moved(self, inputs: TensorInputs, **wrong: Any) -> Outputs:
        given = inputs.arguments
        sources, targets = (
            token_rows(given[f"table_{side}"], given["lengths"], given[f"page_size_{side}"]) for side in ("from", "to")
        )
        if "last token left out" in wrong:
            sources, targets = sources[:-1], targets[:-1]
        if "one token late" in wrong:
            sources = sources.roll(1)
        pools = []
        for name in ("k", "v"):
            rows = gather(given[f"{name}_from"], sources, given["page_size_from"], given["layout_from"])
            rows = rows.flip(1) if "heads swapped" in wrong else rows
            pool = inputs.initial[f"{name}_to"].clone()
            scatter(pool, targets, rows, given["page_size_to"], given["layout_to"])
            pools.append(pool)
        return tuple(pools)

    def free(self, inputs: TensorInputs) -> Tensor:
        """Slots behind the end, in pages of the target tables."""
        given = inputs.arguments
        size, table = given["page_size_to"], given["table_to"].long()
        free = torch.zeros((len(given["k_to"]), size), dtype=torch.bool, device=table.device)
        free[table.reshape(-1)] = True
        free[0] = False
        used = token_rows(given["table_to"], given["lengths"], size)
        free.view(-1)[used] = False
        return free

    def tokens(self, inputs: TensorInputs) -> int:
        return int(inputs.arguments["lengths"].sum())


class ConvertLayout(ConvertPages):
    """The same as ConvertPages, at the same page size: NHD to HND or the other way round."""

    def target(self, shape: Resolved, settings: InputSettings) -> tuple[int, Layout]:
        return settings.page_size, "HND" if settings.layout == "NHD" else "NHD"


def gather(pool: Tensor, slots: Tensor, page_size: int, layout: str) -> Tensor:
    """Rows `[tokens, kv_heads, head_dim]` of slots."""
    page, offset = slots // page_size, slots % page_size
    return pool[page, offset] if layout == "NHD" else pool[page, :, offset]


def _role(name: str) -> str:
    if name.endswith("_to") and name[0] in "kv":
        return "inout"
    if name in ("k_from", "v_from"):
        return "kv"
    return "scalar" if name.startswith(("page_size", "layout")) else "metadata"
