"""Inputs of paged attention for a point: values, pages, tables and poison.

Owns how a `Point` becomes tensors. Values are drawn by logical token, so two arms with the same seed see the same
queries, keys and values whatever their page size and layout. Pages are scattered by a seeded permutation, last pages
are partial where the point says so, and everything that must not be read holds NaN: the null page, unused pages, and
the unused slots of used pages. It does not know what a right answer is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from kbench.catalog import Point, parse_point
from kbench.ops import scores
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV
from kbench.ops.base import InputSettings

Kind = Literal["random", "needle", "one-hot", "rising"]
SPARE_PAGES = 8
"""Pages that belong to nobody, all NaN."""
FAR_ELEMENTS = 1 << 31
"""An element offset from here on does not fit into a signed 32-bit integer."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything one call needs. Several sets may share one `kv` pool, each with its own pages."""

    q: Tensor
    kv: PagedKV
    batch: AttentionBatch
    spec: AttentionSpec

    def tensors(self) -> tuple[Tensor, ...]:
        sinks = (self.spec.sinks,) if self.spec.sinks is not None else ()
        batch = self.batch
        return (self.q, self.kv.k, self.kv.v, batch.block_table, batch.seq_lens, batch.query_start, *sinks)


def build(
    point: Point,
    spec: AttentionSpec,
    settings: InputSettings,
    kind: Kind = "random",
    *,
    aliased: bool = False,
    padding: int = 0,
    far: bool = False,
) -> Inputs:
    """One set of inputs. `needle`: keys at the edges of what the last query sees take about half of its mass, so that a
    dropped page or a mask off by one is an error of order 1 at any context. `one-hot`: the last key takes all of it,
    with logits that overflow an exponential without a running maximum. `rising`: scores rise along the sequence, so
    that a running maximum moves in every tile and in every part. `aliased`: sequences share the pages of a common
    prefix. `padding`: so many sequences of one query token without any key follow, as in a batch padded to a captured
    size. `far`: pages lie beyond an offset of 2³¹ elements."""
    drawn = _Drawn.of(point.sequences + [(1, 0)] * padding, spec, settings, 1)
    return _build(drawn, kind, aliased=aliased, far=far)[0]


def build_sets(point: Point, spec: AttentionSpec, settings: InputSettings, sets: int) -> list[Inputs]:
    """`sets` independent random inputs in one pool, for timed calls that must not find their KV in a cache."""
    return _build(_Drawn.of(point.sequences, spec, settings, sets), "random")


def with_sinks(spec: AttentionSpec, context: int, settings: InputSettings) -> AttentionSpec:
    """Sinks that take about half of the mass of a query at `context`: left out, any answer is wrong."""
    visible = min(context, spec.window) if spec.window else context
    generator = torch.Generator(device=settings.device).manual_seed(settings.seed + 1)
    noise = torch.randn(spec.q_heads, generator=generator, device=settings.device, dtype=torch.float32)
    return replace(spec, sinks=math.log(max(1, visible)) + 0.5 + 0.5 * noise)


def far_bytes(settings: InputSettings) -> int:
    """Memory of a pool whose pages lie beyond 2³¹ elements, keys and values."""
    return 2 * (FAR_ELEMENTS + (1 << 24)) * settings.dtype.itemsize


@dataclass(frozen=True, slots=True)
class EdgeCase:
    """A small input on which paged attention tends to break. `axes`: what it changes of the layer."""

    name: str
    point: Point
    kind: Kind = "random"
    aliased: bool = False
    padding: int = 0
    far: bool = False
    axes: Mapping[str, int] = field(default_factory=dict)


def edge_cases(op: str, page_size: int, window: int = 0) -> tuple[EdgeCase, ...]:
    """Boundary lengths, full pages, shared prefixes, mixed lengths, extreme and rising logits, for either phase; with
    a window also windows of one key, of a page and its neighbours, and beyond the context."""
    page = page_size
    decode = op == "attention.decode"
    if decode:
        around = "+".join(f"1*1@{length}" for length in (1, page, page + 1, 3 * page + 5) + ((page - 1,) * (page > 1)))
        shared, full, one, long = f"3*1@{2 * page + 3}", f"2*1@{2 * page}", "1*1@1", "1*1@2083+1*1@517"
    else:
        around = f"1*1+1*3@{page + 2}+1*{page}+1*{page + 1}+1*2@{3 * page + 5}"
        shared, full, one, long = f"3*3@{2 * page + 3}", f"2*{page}@{2 * page}", "1*1", "1*37@1061+1*70"
    cases = [
        EdgeCase("one token", parse_point(one)),
        EdgeCase("lengths around a page", parse_point(around)),
        EdgeCase("all pages full", parse_point(full)),
        EdgeCase("shared prefix pages", parse_point(shared), aliased=True),
        EdgeCase("needle in the last page", parse_point(shared), kind="needle"),
        EdgeCase("one-hot logits", parse_point(shared), kind="one-hot"),
        EdgeCase("rising scores", parse_point(long), kind="rising"),
    ]
    if decode:
        cases.append(EdgeCase("padding rows without keys", parse_point(shared), padding=2))
    else:
        cases.append(EdgeCase("a chunk after a long prefix", parse_point(f"1*{page + 1}@{41 * page + 3}+1*1@517")))
    if window:
        wide = parse_point(f"{long}+{around}")
        for name, size in (("of one key", 1), ("of a page", page), ("of a page and one key", page + 1)):
            cases.append(EdgeCase(f"window {name}", wide, kind="needle", axes={"window": size}))
        cases.append(EdgeCase("window beyond the context", wide, axes={"window": 5_000}))
    return tuple(cases)


def far_edge(op: str) -> EdgeCase:
    """Only where there are gigabytes to spare: `far_bytes`."""
    point = parse_point("1*1@517+2*1@33" if op == "attention.decode" else "1*37@517+1*33")
    return EdgeCase("pages beyond 2^31 elements", point, far=True)


# ------------------------------------------------------------------------------------------- building


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Values by logical token, before they have pages."""

    sequences: list[tuple[int, int]]
    """Of one set."""
    sets: int
    q: Tensor
    keys: Tensor
    values: Tensor
    spec: AttentionSpec
    settings: InputSettings

    @property
    def kv_lens(self) -> list[int]:
        """Of all sets."""
        return [kv for _, kv in self.sequences] * self.sets

    @classmethod
    def of(cls, sequences: list[tuple[int, int]], spec: AttentionSpec, settings: InputSettings, sets: int) -> _Drawn:
        generator = torch.Generator(device=settings.device).manual_seed(settings.seed)

        def draw(tokens: int, heads: int) -> Tensor:
            shape = (sets * tokens, heads, spec.head_dim)
            values = torch.randn(shape, generator=generator, device=settings.device, dtype=torch.float32)
            return values.to(settings.dtype)

        queries, keys = (sum(pair[place] for pair in sequences) for place in (0, 1))
        q, k, v = draw(queries, spec.q_heads), draw(keys, spec.kv_heads), draw(keys, spec.kv_heads)
        return cls(sequences, sets, q, k, v, spec, settings)


def _build(drawn: _Drawn, kind: Kind, *, aliased: bool = False, far: bool = False) -> list[Inputs]:
    settings, spec = drawn.settings, drawn.spec
    shared_tokens = _shared_prefix(drawn.kv_lens, settings.page_size) if aliased else 0
    if shared_tokens:
        _copy_prefix(drawn.keys, drawn.values, drawn.kv_lens, shared_tokens)
    if kind == "rising":
        scores.plant_rise(drawn.q, drawn.keys, drawn.sequences, spec)
    elif kind != "random":
        scores.plant_needles(drawn.q, drawn.keys, drawn.sequences, spec, one_hot=kind == "one-hot")
    page_elements = settings.page_size * spec.kv_heads * spec.head_dim
    skipped = -(-FAR_ELEMENTS // page_elements) if far else 0
    tables = _tables(drawn.kv_lens, settings, shared_tokens, skipped)
    kv = _store(drawn, tables, skipped)
    count, rows = len(drawn.sequences), sum(query for query, _ in drawn.sequences)
    query_lens, kv_lens = [query for query, _ in drawn.sequences], [kv_len for _, kv_len in drawn.sequences]
    return [
        Inputs(
            q=drawn.q[index * rows : (index + 1) * rows],
            kv=kv,
            batch=AttentionBatch.build(
                query_lens, kv_lens, tables[index * count : (index + 1) * count], settings.device
            ),
            spec=spec,
        )
        for index in range(drawn.sets)
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


def _tables(kv_lens: list[int], settings: InputSettings, shared_tokens: int, skipped: int) -> list[list[int]]:
    page_size = settings.page_size
    shared = shared_tokens // page_size
    needed = [math.ceil(length / page_size) for length in kv_lens]
    total = sum(needed) - shared * (len(needed) - 1)
    shuffle = torch.Generator().manual_seed(settings.seed * 65_537 + page_size)
    order = (torch.randperm(total + SPARE_PAGES, generator=shuffle) + 1 + skipped).tolist()
    tables: list[list[int]] = []
    taken = 0
    for count in needed:
        prefix = tables[0][:shared] if tables else []
        fresh = count - len(prefix)
        tables.append([*prefix, *order[taken : taken + fresh]])
        taken += fresh
    return tables


def _store(drawn: _Drawn, tables: list[list[int]], skipped: int) -> PagedKV:
    """The pool: page 0, `skipped` pages, those of the tables and some spare ones; NaN wherever no token lies."""
    settings, spec, size = drawn.settings, drawn.spec, drawn.settings.page_size
    pages = 1 + skipped + len({page for table in tables for page in table}) + SPARE_PAGES
    tokens = torch.cat([torch.arange(length) for length in drawn.kv_lens])
    page_of = torch.cat(
        [
            torch.tensor(table, dtype=torch.int64).repeat_interleave(size)[:length]
            for table, length in zip(tables, drawn.kv_lens, strict=True)
        ]
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

    return PagedKV(store(drawn.keys), store(drawn.values), size, settings.layout)
