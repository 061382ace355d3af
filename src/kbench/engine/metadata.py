"""From a step plan to what a forward pass reads: token ids, positions, slots and one attention batch a phase.

Owns the persistent host buffers (pinned on CUDA), their device twins and the split of a step into decode rows (one
query token) and prefill rows, made once a step. Packed order: all decode rows, then all prefill rows, each in the
order of the plan. It does not know the model or who computes attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kbench.engine.core import Request, Scheduled, StepPlan
from kbench.engine.kv import Slots
from kbench.engine.requests import TokenContent
from kbench.errors import MeasurementError
from kbench.ops.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device tensors of one step. They live in buffers that the next step overwrites."""

    tokens: Tensor
    """int32 `[tokens]`."""
    positions: Tensor
    """int32 `[tokens]`, from 0."""
    slots: Slots
    decode: AttentionBatch | None
    """The first `decode_tokens` packed rows; None when there are none."""
    prefill: AttentionBatch | None
    """The packed rows from `decode_tokens` on; None when there are none."""
    decode_tokens: int
    logit_rows: Tensor
    """int32: packed rows that yield a token, in the order of `StepPlan.sampling`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan in packed order, and the tokens of its rows."""

    decodes: tuple[Scheduled, ...]
    prefills: tuple[Scheduled, ...]
    tokens: list[int]
    logit_rows: list[int]

    @property
    def requests(self) -> int:
        return len(self.decodes) + len(self.prefills)


@dataclass(frozen=True, slots=True)
class _Part:
    """Host side of one phase's batch; the device side is taken from the buffers after the copy."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True)
class Staged:
    """A step whose host buffers are filled."""

    tokens: int
    logit_rows: int
    decode_tokens: int
    decode: _Part | None
    prefill: _Part | None


class _Buffer:
    """A host buffer and its device twin; grows, never shrinks. On the CPU both are one tensor."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._make(size)

    def _make(self, size: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = torch.zeros(size, dtype=self._dtype, pin_memory=pinned)
        self._device_twin = torch.zeros(size, dtype=self._dtype, device=self._device) if pinned else self._host
        self.array: NDArray[Any] = self._host.numpy()

    def reserve(self, size: int) -> NDArray[Any]:
        """The host array, at least `size` long; earlier contents may be lost."""
        if size > self.array.shape[0]:
            self._make(max(size, 2 * self.array.shape[0]))
        return self.array

    def upload(self, size: int) -> Tensor:
        """The first `size` entries on the device, copied without waiting."""
        twin = self._device_twin[:size]
        if self._device_twin is not self._host:
            twin.copy_(self._host[:size], non_blocking=True)
        return twin


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


class _PartBuffers:
    """Buffers of one phase's attention batch."""

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self.query_start = _Buffer(max_seqs + 1, torch.int32, device)
        self.seq_lens = _Buffer(max_seqs, torch.int32, device)
        self.block_table = _Buffer(max_seqs * 16, torch.int32, device)

    def fill(self, items: Sequence[Scheduled], rows: list[NDArray[np.int32]]) -> _Part:
        count = len(items)
        query_lens = tuple(item.query_tokens for item in items)
        kv_lens = tuple(item.kv_tokens for item in items)
        starts = self.query_start.reserve(count + 1)
        starts[0] = 0
        starts[1 : count + 1] = np.cumsum(query_lens)
        self.seq_lens.reserve(count)[:count] = kv_lens
        width = max(row.shape[0] for row in rows)
        table = self.block_table.reserve(count * width)[: count * width].reshape(count, width)
        table[:] = 0
        for index, row in enumerate(rows):
            table[index, : row.shape[0]] = row
        return _Part(query_lens, kv_lens, width)

    def upload(self, part: _Part) -> AttentionBatch:
        count = len(part.query_lens)
        return AttentionBatch(
            query_start=self.query_start.upload(count + 1),
            seq_lens=self.seq_lens.upload(count),
            block_table=self.block_table.upload(count * part.width).view(count, part.width),
            query_lens=part.query_lens,
            kv_lens=part.kv_lens,
            max_query=max(part.query_lens),
            max_kv=max(part.kv_lens),
        )


class MetadataBuilder:
    """Builds the inputs of one step at a time: `prepare` (lists), `stage` (host arrays), `upload` (device)."""

    def __init__(self, *, page_size: int, max_tokens: int, max_seqs: int, device: torch.device) -> None:
        self._page_size = page_size
        self._rows: dict[int, _Row] = {}
        self._tokens = _Buffer(max_tokens, torch.int32, device)
        self._positions = _Buffer(max_tokens, torch.int32, device)
        self._logit_rows = _Buffer(max_seqs, torch.int32, device)
        self._slots = tuple(_Buffer(max_tokens, torch.int64, device) for _ in range(3))
        self._decode = _PartBuffers(max_seqs, device)
        self._prefill = _PartBuffers(max_seqs, device)
        self._in_flight: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._in_flight = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._uploaded = False

    def forget(self, request_id: int) -> None:
        """Drop what is kept about a request that left the engine."""
        self._rows.pop(request_id, None)

    def reset(self) -> None:
        self._rows.clear()

    def prepare(self, plan: StepPlan) -> Prepared:
        """Order the plan's rows and collect their token ids."""
        decodes = tuple(item for item in plan.scheduled if item.query_tokens == 1)
        prefills = tuple(item for item in plan.scheduled if item.query_tokens != 1)
        tokens: list[int] = []
        last_row: dict[int, int] = {}
        for item in (*decodes, *prefills):
            content = item.request.content
            if not isinstance(content, TokenContent):
                raise MeasurementError(f"request {item.request.request_id} has no token ids to compute")
            tokens += content.tokens[item.kv_tokens - item.query_tokens : item.kv_tokens]
            last_row[item.request.request_id] = len(tokens) - 1
        rows = [last_row[item.request.request_id] for item in plan.scheduled if item.samples]
        return Prepared(decodes, prefills, tokens, rows)

    def stage(self, step: Prepared) -> Staged:
        """Fill the host buffers, after an earlier copy out of them has ended."""
        if self._in_flight is not None and self._uploaded:
            self._in_flight.synchronize()
        count = len(step.tokens)
        self._tokens.reserve(count)[:count] = step.tokens
        self._logit_rows.reserve(len(step.logit_rows))[: len(step.logit_rows)] = step.logit_rows
        items = (*step.decodes, *step.prefills)
        rows = [self._rows.setdefault(item.request.request_id, _Row()).of(item.request) for item in items]
        self._place(items, rows, count)
        split = len(step.decodes)
        return Staged(
            tokens=count,
            logit_rows=len(step.logit_rows),
            decode_tokens=split,
            decode=self._decode.fill(items[:split], rows[:split]) if split else None,
            prefill=self._prefill.fill(items[split:], rows[split:]) if step.prefills else None,
        )

    def _place(self, items: Sequence[Scheduled], rows: list[NDArray[np.int32]], count: int) -> None:
        """Position and slot of every packed token."""
        positions = self._positions.reserve(count)
        flat, page, offset = (buffer.reserve(count) for buffer in self._slots)
        start = 0
        for item, row in zip(items, rows, strict=True):
            if item.query_tokens == 1:
                position = item.kv_tokens - 1
                positions[start] = position
                page[start] = row[position // self._page_size]
                start += 1
                continue
            stop = start + item.query_tokens
            span = np.arange(item.kv_tokens - item.query_tokens, item.kv_tokens)
            positions[start:stop] = span
            page[start:stop] = row[span // self._page_size]
            start = stop
        np.remainder(positions[:count], self._page_size, out=offset[:count])
        np.multiply(page[:count], self._page_size, out=flat[:count])
        flat[:count] += offset[:count]

    def upload(self, staged: Staged) -> StepInputs:
        """Copy the filled part of the buffers to the device, without waiting."""
        flat, page, offset = (buffer.upload(staged.tokens) for buffer in self._slots)
        inputs = StepInputs(
            tokens=self._tokens.upload(staged.tokens),
            positions=self._positions.upload(staged.tokens),
            slots=Slots(flat, page, offset),
            decode=self._decode.upload(staged.decode) if staged.decode is not None else None,
            prefill=self._prefill.upload(staged.prefill) if staged.prefill is not None else None,
            decode_tokens=staged.decode_tokens,
            logit_rows=self._logit_rows.upload(staged.logit_rows),
        )
        if self._in_flight is not None:
            self._in_flight.record()
            self._uploaded = True
        return inputs
