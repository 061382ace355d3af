"""From a step plan to what a forward pass reads: token ids, positions, slots and one attention batch a phase.

Owns the split of a step into decode rows (one query token) and prefill rows, made once a step, and what stands in the
rows that a captured graph is padded with. Packed order: all decode rows, then all prefill rows, each in the order of
the plan. Where the bytes lie is `engine.arena`'s. It does not know the model or who computes attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kbench.engine.arena import Arena, PartPlaces, Places, places_of
from kbench.engine.core import NULL_PAGE, Request, Scheduled, StepPlan
from kbench.engine.inputs import Draw, Draws, StepInputs
from kbench.engine.kv import Slots
from kbench.engine.requests import TokenContent
from kbench.engine.sizes import PartSize, StepSize
from kbench.errors import MeasurementError
from kbench.ops.attention import AttentionBatch

NOT_FED = -1
_ROOM = 1 << 21
"""Entries of a block table that are made room for in advance, 8 MiB; a larger one makes the buffers grow."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan in packed order, and the tokens of its rows."""

    decodes: tuple[Scheduled, ...]
    prefills: tuple[Scheduled, ...]
    tokens: list[int]
    logit_rows: list[int]
    feed: tuple[tuple[int, int], ...] = ()
    """`(packed row, index among the tokens that the step before sampled)` of tokens that the host does not know yet."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Host side of one phase's batch; the device side is taken from the arena after the copy."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    size: PartSize


@dataclass(frozen=True, slots=True)
class Staged:
    """A step whose host buffer is filled."""

    size: StepSize
    decode: _Part | None
    prefill: _Part | None
    every_row: bool
    fed: bool
    drawn: bool


class _Row:
    """Pages of one request as an array, extended as pages are added, so that a step copies rows and not lists."""

    __slots__ = ("count", "epoch", "pages")

    def __init__(self) -> None:
        self.pages = np.zeros(16, dtype=np.int32)
        self.count = 0
        self.epoch = -1

    def of(self, request: Request) -> NDArray[np.int32]:
        if self.epoch != request.preemptions or self.count > len(request.pages):
            self.epoch = request.preemptions
            self.count = 0
        count = len(request.pages)
        if count > self.count:
            if count > self.pages.shape[0]:
                grown = np.zeros(2 * count, dtype=np.int32)
                grown[: self.count] = self.pages[: self.count]
                self.pages = grown
            self.pages[self.count : count] = request.pages[self.count :]
            self.count = count
        return self.pages[:count]


class MetadataBuilder:
    """Builds the inputs of one step at a time: `prepare` (lists), `stage` (host arrays), `upload` (device).

    `dummy_page` is where rows that only pad a captured graph write and read; none are padded without it.
    """

    def __init__(
        self,
        *,
        page_size: int,
        max_tokens: int,
        max_seqs: int,
        device: torch.device,
        dummy_page: int = NULL_PAGE,
        most_pages: int = 16,
    ) -> None:
        """`most_pages`: of one request; there is room for so many from the start, within reason."""
        self._page_size = page_size
        self._dummy_page = dummy_page
        self.max_seqs = max_seqs
        self.most_rows = 2 * max(max_tokens, max_seqs)
        """Rows of logits that a step has at most, those of padding included."""
        self._rows: dict[int, _Row] = {}
        room = PartSize(max_seqs, min(most_pages, max(16, _ROOM // max_seqs)))
        self.arena = Arena(places_of(StepSize(max_tokens, 2 * max_seqs, room, room)).bytes, device)

    def forget(self, request_id: int) -> None:
        """Drop what is kept about a request that left the engine."""
        self._rows.pop(request_id, None)

    def reset(self) -> None:
        self._rows.clear()

    def prepare(self, plan: StepPlan, pending: Mapping[int, int] | None = None) -> Prepared:
        """Order the plan's rows and collect their token ids.

        `pending`: requests whose last token is still on the device, and its index among those of the step before.
        """
        decodes = tuple(item for item in plan.scheduled if item.query_tokens == 1)
        prefills = tuple(item for item in plan.scheduled if item.query_tokens != 1)
        tokens: list[int] = []
        last_row: dict[int, int] = {}
        feed: list[tuple[int, int]] = []
        for item in (*decodes, *prefills):
            content = item.request.content
            if not isinstance(content, TokenContent):
                raise MeasurementError(f"request {item.request.request_id} has no token ids to compute")
            known = content.tokens
            if item.kv_tokens > len(known):
                if pending is None or item.request.request_id not in pending:
                    raise MeasurementError(f"request {item.request.request_id} has no token {len(known)} to compute")
                tokens += known[item.kv_tokens - item.query_tokens :]
                feed.append((len(tokens), pending[item.request.request_id]))
                tokens.append(0)
            else:
                tokens += known[item.kv_tokens - item.query_tokens : item.kv_tokens]
            last_row[item.request.request_id] = len(tokens) - 1
        rows = [last_row[item.request.request_id] for item in plan.scheduled if item.samples]
        return Prepared(decodes, prefills, tokens, rows, tuple(feed))

    def size_of(self, step: Prepared) -> StepSize:
        """The size of the step itself, nothing padded."""

        def part(items: Sequence[Scheduled]) -> PartSize:
            return PartSize(len(items), max((len(item.request.pages) for item in items), default=0))

        return StepSize(len(step.tokens), len(step.logit_rows), part(step.decodes), part(step.prefills))

    def stage(self, step: Prepared, size: StepSize | None = None, draws: Sequence[Draw] | None = None) -> Staged:
        """Fill the host buffer, laid out for `size` (default: the step's own), and pad what is left of it.

        `draws`: how the tokens are drawn, in the order of `StepPlan.sampling`, where the device does that.

        Padding decodes token 0 at position 0 of the dummy page, each row a sequence of one token; padding of the
        prefill part is rows of no sequence, and sequences of no row.
        """
        own = self.size_of(step)
        size = size or own
        places, arena = places_of(size), self.arena
        arena.begin(places.bytes)
        decodes, total = len(step.decodes), len(step.tokens)
        # A padded decode part moves the prefill rows: they begin where it ends.
        shift = size.decode.sequences - decodes
        tokens = arena.host(places.tokens)
        tokens[:decodes] = step.tokens[:decodes]
        tokens[decodes + shift : total + shift] = step.tokens[decodes:]
        rows = arena.host(places.logit_rows)
        rows[: own.logit_rows] = step.logit_rows
        if shift:
            rows[: own.logit_rows][rows[: own.logit_rows] >= decodes] += shift
        feed = arena.host(places.feed)
        feed[:] = NOT_FED
        for row, index in step.feed:
            feed[row if row < decodes else row + shift] = index
        pages = [self._rows.setdefault(item.request.request_id, _Row()).of(item.request) for item in step.decodes]
        tables = [self._rows.setdefault(item.request.request_id, _Row()).of(item.request) for item in step.prefills]
        self._place(step, pages, tables, size, total)
        if size != own:
            tokens[decodes : decodes + shift] = 0
            tokens[total + shift :] = 0
            rows[own.logit_rows :] = np.arange(own.logit_rows, size.logit_rows) if not step.prefills else 0
        in_order = not step.prefills and step.logit_rows == list(range(total))
        if draws is not None:
            # A graph of decodes alone computes the logits of every row.
            everyone = not size.prefill.sequences and size.logit_rows == size.tokens
            self._stage_draws(places, step.logit_rows if everyone else list(range(own.logit_rows)), draws)
        return Staged(
            size=size,
            decode=self._fill(places.decode, size.decode, step.decodes, pages, pad_query=1),
            prefill=self._fill(places.prefill, size.prefill, step.prefills, tables, pad_query=0),
            every_row=in_order and size.logit_rows == size.tokens,
            fed=bool(step.feed),
            drawn=draws is not None,
        )

    def _stage_draws(self, places: Places, rows: list[int], draws: Sequence[Draw]) -> None:
        arena = self.arena
        heat, top_p = (arena.host(place).view(np.float32) for place in (places.heat, places.top_p))
        top_k, noise = arena.host(places.top_k), arena.host(places.noise)
        for column, fill in ((heat, 0.0), (top_p, 1.0), (top_k, 0), (noise, 0)):
            column[:] = fill
        heat[rows], top_k[rows], top_p[rows], noise[rows] = zip(*draws, strict=True)

    def _draws(self, places: Places) -> Draws:
        device = self.arena.device
        return Draws(
            device(places.heat).view(torch.float32),
            device(places.top_k),
            device(places.top_p).view(torch.float32),
            device(places.noise),
        )

    def _place(
        self,
        step: Prepared,
        decode_pages: list[NDArray[np.int32]],
        prefill_pages: list[NDArray[np.int32]],
        size: StepSize,
        total: int,
    ) -> None:
        """Position and slot of every packed token; those of padding are the dummy page's first."""
        places, arena, page_size = places_of(size), self.arena, self._page_size
        positions = arena.host(places.positions)
        flat, page, offset = (arena.host(place) for place in (places.flat, places.page, places.offset))
        decodes, split = len(step.decodes), size.decode.sequences
        if decodes:
            own = positions[:decodes]
            own[:] = [item.kv_tokens - 1 for item in step.decodes]
            page[:decodes] = [row[at] for row, at in zip(decode_pages, (own // page_size).tolist(), strict=True)]
        start = split
        for item, row in zip(step.prefills, prefill_pages, strict=True):
            stop = start + item.query_tokens
            span = np.arange(item.kv_tokens - item.query_tokens, item.kv_tokens)
            positions[start:stop] = span
            page[start:stop] = row[span // page_size]
            start = stop
        for padding in (slice(decodes, split), slice(start, size.tokens)):
            positions[padding] = 0
            page[padding] = self._dummy_page
        np.remainder(positions, page_size, out=offset)
        np.multiply(page, page_size, out=flat)
        flat += offset

    def _fill(
        self,
        places: PartPlaces,
        size: PartSize,
        items: Sequence[Scheduled],
        rows: list[NDArray[np.int32]],
        *,
        pad_query: int,
    ) -> _Part | None:
        """One phase's batch; a sequence of padding has `pad_query` rows and one token, in the dummy page."""
        if not size.sequences:
            return None
        count, arena = len(items), self.arena
        query_lens = tuple(item.query_tokens for item in items)
        kv_lens = tuple(item.kv_tokens for item in items)
        starts, lens = arena.host(places.query_start), arena.host(places.seq_lens)
        starts[0] = 0
        starts[1 : count + 1] = np.cumsum(query_lens)
        starts[count + 1 :] = starts[count] + pad_query * np.arange(1, size.sequences - count + 1)
        lens[:count] = kv_lens
        lens[count:] = 1
        table = arena.host(places.block_table).reshape(size)
        table[:count] = NULL_PAGE
        for index, row in enumerate(rows):
            table[index, : row.shape[0]] = row
        if count < size.sequences:
            table[count:] = NULL_PAGE
            table[count:, 0] = self._dummy_page
        return _Part(query_lens, kv_lens, size)

    def upload(self, staged: Staged) -> StepInputs:
        """Copy to the device, without waiting, and say where everything is."""
        self.copy(staged)
        return self.inputs(staged)

    def copy(self, staged: Staged) -> None:
        self.arena.upload(places_of(staged.size).bytes)

    def inputs(self, staged: Staged) -> StepInputs:
        """Where a staged step lies on the device."""
        places, device = places_of(staged.size), self.arena.device
        return StepInputs(
            tokens=device(places.tokens),
            positions=device(places.positions),
            slots=Slots(device(places.flat), device(places.page), device(places.offset)),
            decode=self._batch(places.decode, staged.decode),
            prefill=self._batch(places.prefill, staged.prefill),
            decode_tokens=staged.size.decode.sequences,
            logit_rows=device(places.logit_rows),
            every_row=staged.every_row,
            draws=self._draws(places) if staged.drawn else None,
            feed=device(places.feed) if staged.fed else None,
        )

    def bounds(self, size: StepSize, *, drawn: bool = False) -> StepInputs:
        """The inputs of any step that is padded to `size`, for a graph to be captured over.

        Host lengths are bounds: `max_query` and `max_kv` are the longest that the size allows, `query_lens` and
        `kv_lens` say 1, so that an implementation which asks whether lengths differ is told that they may.
        """
        places, device = places_of(size), self.arena.device
        prefill_tokens = size.tokens - size.decode.sequences

        def part(own: PartPlaces, of: PartSize, longest: int) -> AttentionBatch | None:
            if not of.sequences:
                return None
            ones = (1,) * of.sequences
            return AttentionBatch(
                query_start=device(own.query_start),
                seq_lens=device(own.seq_lens),
                block_table=device(own.block_table).view(of),
                query_lens=ones,
                kv_lens=ones,
                max_query=longest,
                max_kv=of.width * self._page_size,
                bounded=True,
            )

        return StepInputs(
            tokens=device(places.tokens),
            positions=device(places.positions),
            slots=Slots(device(places.flat), device(places.page), device(places.offset)),
            decode=part(places.decode, size.decode, 1),
            prefill=part(places.prefill, size.prefill, prefill_tokens),
            decode_tokens=size.decode.sequences,
            logit_rows=device(places.logit_rows),
            every_row=not size.prefill.sequences,
            draws=self._draws(places) if drawn else None,
            feed=device(places.feed),
        )

    def _batch(self, places: PartPlaces, part: _Part | None) -> AttentionBatch | None:
        if part is None:
            return None
        device = self.arena.device
        return AttentionBatch(
            query_start=device(places.query_start),
            seq_lens=device(places.seq_lens),
            block_table=device(places.block_table).view(part.size),
            query_lens=part.query_lens,
            kv_lens=part.kv_lens,
            max_query=max(part.query_lens, default=0),
            max_kv=max(part.kv_lens, default=0),
        )
