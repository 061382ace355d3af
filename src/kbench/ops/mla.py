"""Absorbed multi-head latent attention against a paged latent cache (DeepSeek-V3, Kimi-K2), one query token a sequence.

The cache holds one row a token, `[latent | rope]`, that all heads share: the whole row is the key, its latent part is
the value. The up-projections are absorbed into the query before and the output after, and are not part of this.

Contract: page 0 is the null page; unused slots and pages may hold NaN; a sequence without keys answers 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved, parse_point
from kbench.errors import UsageError
from kbench.ops.base import Cost, Edge, InputSettings, Outputs
from kbench.ops.norm import draw
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard

NOPE_HEAD_DIM = 128
"""Elements of a head that take no position, before they are absorbed: the scale is that of the original head size."""
SPARE_PAGES = 4


class MlaDecode(TensorOp):
    """q_latent `[n, heads, latent]`, q_rope `[n, heads, rope]`, cache `[pages, page_size, latent + rope]`, block_table
    int32 `[n, pages of the longest]`, seq_lens int32 `[n]`, scale → `[n, heads, latent]`."""

    kinds = ("random", "needle")
    arguments: ClassVar[tuple[str, ...]] = ("q_latent", "q_rope", "cache", "block_table", "seq_lens", "scale")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        if shape.point is None:
            raise UsageError(f"{shape.op} needs a batch", remedy="write e.g. 32*1@4096")
        heads, latent, rope = (shape.integer(name) for name in ("heads", "latent", "rope"))
        lengths = [kv_len for _, kv_len in shape.point.sequences] + [0] * int(options.get("padding", 0))
        scale = float((NOPE_HEAD_DIM + rope) ** -0.5)
        q = draw((len(lengths), heads, latent + rope), settings, generator)
        rows = [draw((length, latent + rope), settings, generator) for length in lengths]
        if kind == "needle":
            for index, own in enumerate(rows):
                _plant_needle(q[index], own, scale)
        cache, table = _store(rows, latent + rope, settings)
        arguments = {
            "q_latent": q[..., :latent].contiguous(),
            "q_rope": q[..., latent:].contiguous(),
            "cache": cache,
            "block_table": table,
            "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=settings.device),
            "scale": scale,
        }
        return TensorInputs(
            shape,
            arguments,
            {
                "q_latent": "activation",
                "q_rope": "activation",
                "cache": "kv",
                "block_table": "metadata",
                "seq_lens": "metadata",
                "scale": "scalar",
            },
            settings.dtype,
        )

    def exact(self, inputs: TensorInputs) -> Outputs:
        return (attend(inputs.arguments, torch.float64),)

    def plain(self, inputs: TensorInputs) -> Outputs:
        return (attend(inputs.arguments, inputs.dtype),)

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        given = own.inputs.arguments
        lengths, page = given["seq_lens"], given["cache"].shape[1]
        whole_pages = ((lengths + page - 1) // page - 1).clamp_min(0) * page
        no_rope = {**given, "q_rope": torch.zeros_like(given["q_rope"])}
        models = {
            **super().wrong(own),
            "dropped last page": (attend({**given, "seq_lens": whole_pages}, torch.float64),),
            "mask one short": (attend({**given, "seq_lens": (lengths - 1).clamp_min(0)}, torch.float64),),
            "rope part left out": (attend(no_rope, torch.float64),),
        }
        if own.expected[0].shape[1] > 1:
            models["heads rotated"] = (own.expected[0].roll(1, dims=1),)
        return models

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        page = settings.page_size
        small = shape.with_axes(heads=min(16, shape.integer("heads")))

        def at(name: str, point: str, kind: str = "random", wanted: Resolved = small, **options: int) -> Edge:
            return Edge(name, Resolved(shape.op, parse_point(point), wanted.axes), kind, options)

        around = "+".join(f"1*1@{length}" for length in sorted({1, max(1, page - 1), page, page + 1, 3 * page + 5}))
        return (
            at("one token", "1*1"),
            at("lengths around a page", around),
            at("all pages full", f"2*1@{2 * page}"),
            at("needle in the last page", f"2*1@{2 * page + 3}+1*1@517", "needle"),
            at("padding rows without keys", f"2*1@{page + 3}", padding=2),
            at("one head", f"2*1@{2 * page + 3}", wanted=shape.with_axes(heads=1)),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        """A multiply-add an element of the whole row for the score, another an element of its latent part."""
        given = inputs.arguments
        q_latent, q_rope, cache = given["q_latent"], given["q_rope"], given["cache"]
        tokens, width, heads = _tokens(inputs), cache.shape[2], q_latent.shape[1]
        item = cache.element_size()
        return Cost(
            flops=2 * tokens * heads * (width + q_latent.shape[2]),
            bytes_read=(tokens * width + q_latent.numel() + q_rope.numel()) * item,
            bytes_written=q_latent.numel() * item,
        )

    def streamed_bytes(self, inputs: TensorInputs) -> int:
        cache = inputs.arguments["cache"]
        return int(_tokens(inputs) * cache.shape[2] * cache.element_size())

    def outputs(self, inputs: TensorInputs) -> Outputs:
        return (torch.empty_like(inputs.arguments["q_latent"]),)


def _tokens(inputs: TensorInputs) -> int:
    return int(inputs.arguments["seq_lens"].sum())


def attend(given: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """The definition with every intermediate in `dtype`, one sequence at a time."""
    q_latent, q_rope = given["q_latent"].to(dtype), given["q_rope"].to(dtype)
    out = torch.zeros_like(q_latent)
    latent = q_latent.shape[2]
    for index, rows in sequences(given):
        if rows.shape[0]:
            wide = rows.to(dtype)
            scores = (q_latent[index] @ wide[:, :latent].T + q_rope[index] @ wide[:, latent:].T) * given["scale"]
            out[index] = torch.softmax(scores, dim=-1) @ wide[:, :latent]
    return out


def sequences(given: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """Number and cached rows `[length, latent + rope]` of every sequence, gathered."""
    cache, table = given["cache"], given["block_table"]
    for index, length in enumerate(given["seq_lens"].tolist()):
        pages = table[index, : -(-length // cache.shape[1])].long()
        yield index, cache.index_select(0, pages).flatten(0, 1)[:length]


def _plant_needle(q: Tensor, rows: Tensor, scale: float) -> None:
    """Turn the last cached row towards all heads, with the mass of all others together."""
    if rows.shape[0] <= 1:
        return
    heads = q.double()
    mass = torch.logsumexp(heads @ rows[:-1].double().T * scale, dim=-1)
    rows[-1] = (torch.linalg.pinv(heads) @ (mass / scale)).to(rows.dtype)


def _store(rows: list[Tensor], width: int, settings: InputSettings) -> tuple[Tensor, Tensor]:
    """Scattered pages, NaN wherever no token lies, and the table of them."""
    size, device = settings.page_size, settings.device
    needed = [-(-own.shape[0] // size) for own in rows]
    shuffle = torch.Generator().manual_seed(settings.seed * 65_537 + size)
    order = (torch.randperm(sum(needed) + SPARE_PAGES, generator=shuffle) + 1).to(torch.int32)
    cache = torch.full((len(order) + 1, size, width), float("nan"), dtype=settings.dtype, device=device)
    table = torch.zeros((len(rows), max(1, *needed)), dtype=torch.int32)
    taken = 0
    for index, (own, count) in enumerate(zip(rows, needed, strict=True)):
        pages = order[taken : taken + count]
        table[index, :count] = pages
        taken += count
        tokens = torch.arange(own.shape[0])
        where = pages.long()[tokens // size]
        cache[where.to(device), (tokens % size).to(device)] = own
    return cache, table.to(device)
