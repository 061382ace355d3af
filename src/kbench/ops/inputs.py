"""Inputs of paged attention for a point: values, pages, tables and poison.

Owns how a `Point` becomes tensors. Values are drawn by logical token, so two arms with the same seed see the same
queries, keys and values whatever their page size and layout. Pages are scattered by a seeded permutation, last pages
are partial where the point says so, and everything that must not be read holds NaN: the null page, unused pages, and
the unused slots of used pages. It does not know what a right answer is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kbench.catalog import Point, parse_point
from kbench.ops.attention import AttentionBatch, AttentionSpec, Layout, PagedKV

Kind = Literal["random", "needle", "one-hot"]
SPARE_PAGES = 8
"""Pages that belong to nobody, all NaN."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything one call needs. Several sets may share one `kv` pool, each with its own pages."""

    q: Tensor
    kv: PagedKV
    batch: AttentionBatch
    spec: AttentionSpec

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q, self.kv.k, self.kv.v, self.batch.block_table, self.batch.seq_lens, self.batch.query_start)


@dataclass(frozen=True, slots=True)
class InputSettings:
    """What the values do not depend on (`page_size`, `layout`) and what they do (`dtype`, `device`, `seed`)."""

    page_size: int
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    seed: int


def build(
    point: Point, spec: AttentionSpec, settings: InputSettings, kind: Kind = "random", *, aliased: bool = False
) -> Inputs:
    """One set of inputs. `needle`: the last key of each sequence takes about half of the last query's mass, so that a
    dropped page or a mask off by one is an error of order 1 at any context. `one-hot`: it takes all of it, with logits
    that overflow an exponential without a running maximum. `aliased`: sequences share the pages of a common prefix."""
    return _build(point, spec, settings, 1, kind, aliased)[0]


def build_sets(point: Point, spec: AttentionSpec, settings: InputSettings, sets: int) -> list[Inputs]:
    """`sets` independent random inputs in one pool, for timed calls that must not find their KV in a cache."""
    return _build(point, spec, settings, sets, "random", False)


@dataclass(frozen=True, slots=True)
class EdgeCase:
    """A small input on which paged attention tends to break."""

    name: str
    point: Point
    kind: Kind = "random"
    aliased: bool = False


def edge_cases(op: str, page_size: int) -> tuple[EdgeCase, ...]:
    """Boundary lengths, full pages, shared prefixes, mixed lengths, extreme logits, for either phase."""
    page = page_size
    if op == "attention.decode":
        around = "+".join(f"1*1@{length}" for length in (1, page, page + 1, 3 * page + 5) + ((page - 1,) * (page > 1)))
        shared, full, one = f"3*1@{2 * page + 3}", f"2*1@{2 * page}", "1*1@1"
    else:
        around = f"1*1+1*3@{page + 2}+1*{page}+1*{page + 1}+1*2@{3 * page + 5}"
        shared, full, one = f"3*3@{2 * page + 3}", f"2*{page}@{2 * page}", "1*1"
    cases = (
        EdgeCase("one token", parse_point(one)),
        EdgeCase("lengths around a page", parse_point(around)),
        EdgeCase("all pages full", parse_point(full)),
        EdgeCase("shared prefix pages", parse_point(shared), aliased=True),
        EdgeCase("needle in the last page", parse_point(shared), kind="needle"),
        EdgeCase("one-hot logits", parse_point(shared), kind="one-hot"),
    )
    return cases


# ------------------------------------------------------------------------------------------- building


def _build(
    point: Point, spec: AttentionSpec, settings: InputSettings, sets: int, kind: Kind, aliased: bool
) -> list[Inputs]:
    sequences = point.sequences
    query_lens = [query for query, _ in sequences]
    kv_lens = [kv for _, kv in sequences]
    generator = torch.Generator(device=settings.device).manual_seed(settings.seed)

    def draw(tokens: int, heads: int) -> Tensor:
        shape = (tokens, heads, spec.head_dim)
        values = torch.randn(shape, generator=generator, device=settings.device, dtype=torch.float32)
        return values.to(settings.dtype)

    q = draw(sets * sum(query_lens), spec.q_heads)
    keys = draw(sets * sum(kv_lens), spec.kv_heads)
    values = draw(sets * sum(kv_lens), spec.kv_heads)
    shared_tokens = _shared_prefix(kv_lens, settings.page_size) if aliased else 0
    if shared_tokens:
        _copy_prefix(keys, values, kv_lens * sets, shared_tokens)
    if kind != "random":
        _plant_needles(q, keys, point, spec, headroom=0.0 if kind == "needle" else 200.0)
    tables = _tables(kv_lens * sets, settings, shared_tokens)
    kv = _store(keys, values, kv_lens * sets, tables, spec, settings)
    count, rows = len(sequences), sum(query_lens)
    return [
        Inputs(
            q=q[index * rows : (index + 1) * rows],
            kv=kv,
            batch=AttentionBatch.build(
                query_lens, kv_lens, tables[index * count : (index + 1) * count], settings.device
            ),
            spec=spec,
        )
        for index in range(sets)
    ]


def _shared_prefix(kv_lens: list[int], page_size: int) -> int:
    """Tokens of whole pages that every sequence can share without touching its last page."""
    return max(0, (min(kv_lens) - 1) // page_size) * page_size


def _copy_prefix(keys: Tensor, values: Tensor, kv_lens: list[int], tokens: int) -> None:
    start = 0
    for length in kv_lens:
        keys[start : start + tokens] = keys[:tokens].clone()
        values[start : start + tokens] = values[:tokens].clone()
        start += length


def _plant_needles(q: Tensor, keys: Tensor, point: Point, spec: AttentionSpec, headroom: float) -> None:
    """Turn the last key of each sequence towards the last query, with `headroom` above the mass of all others.

    The query before the last becomes equal to it, so that a mask which looks one key ahead finds the needle as well.
    """
    row = start = 0
    for query_len, kv_len in point.sequences:
        row, start = row + query_len, start + kv_len
        if query_len > 1:
            q[row - 2] = q[row - 1]
        if kv_len == 1:
            continue
        heads = q[row - 1].double().reshape(spec.kv_heads, spec.group, spec.head_dim)
        others = keys[start - kv_len : start - 1].double()
        mass = torch.stack(
            [torch.logsumexp(others[:, head] @ heads[head].T * spec.scale, dim=0) for head in range(spec.kv_heads)]
        )
        wanted = (mass + headroom) / spec.scale
        keys[start - 1] = (torch.linalg.pinv(heads) @ wanted[..., None])[..., 0].to(keys.dtype)


def _tables(kv_lens: list[int], settings: InputSettings, shared_tokens: int) -> list[list[int]]:
    page_size = settings.page_size
    shared = shared_tokens // page_size
    needed = [math.ceil(length / page_size) for length in kv_lens]
    total = sum(needed) - shared * (len(needed) - 1)
    shuffle = torch.Generator().manual_seed(settings.seed * 65_537 + page_size)
    order = (torch.randperm(total + SPARE_PAGES, generator=shuffle) + 1).tolist()
    tables: list[list[int]] = []
    taken = 0
    for count in needed:
        prefix = tables[0][:shared] if tables else []
        fresh = count - len(prefix)
        tables.append([*prefix, *order[taken : taken + fresh]])
        taken += fresh
    return tables


def _store(
    keys: Tensor,
    values: Tensor,
    kv_lens: list[int],
    tables: list[list[int]],
    spec: AttentionSpec,
    settings: InputSettings,
) -> PagedKV:
    size = settings.page_size
    pages = 1 + len({page for table in tables for page in table}) + SPARE_PAGES
    tokens = torch.cat([torch.arange(length) for length in kv_lens])
    page_of = torch.cat(
        [torch.tensor(table).repeat_interleave(size)[:length] for table, length in zip(tables, kv_lens, strict=True)]
    )
    where, offset = page_of.to(settings.device), (tokens % size).to(settings.device)

    def store(logical: Tensor) -> Tensor:
        inner = (size, spec.kv_heads) if settings.layout == "NHD" else (spec.kv_heads, size)
        stored = torch.full((pages, *inner, spec.head_dim), float("nan"), dtype=settings.dtype, device=settings.device)
        if settings.layout == "NHD":
            stored[where, offset] = logical
        else:
            stored[where, :, offset] = logical
        return stored

    return PagedKV(store(keys), store(values), size, settings.layout)
