"""One host buffer and its device twin for all integers that a step uploads: a single copy a step.

Owns where each part of a step's inputs lies (`Places`, a pure function of `StepSize`) and that a copy in flight is
never overwritten. Because places depend on sizes alone, a captured graph of a size finds its inputs where it found them
when it was captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kbench.engine.sizes import PartSize, StepSize

ALIGNMENT = 16
"""Bytes: what a vector load wants."""


class Place(NamedTuple):
    """Bytes from `start` on, holding `integers` of them."""

    start: int
    integers: int
    wide: bool
    """int64, else int32."""

    @property
    def stop(self) -> int:
        return self.start + self.integers * (8 if self.wide else 4)


@dataclass(frozen=True, slots=True)
class PartPlaces:
    query_start: Place
    seq_lens: Place
    block_table: Place


@dataclass(frozen=True, slots=True)
class Places:
    """Where each part of a step lies."""

    tokens: Place
    positions: Place
    feed: Place
    flat: Place
    page: Place
    offset: Place
    logit_rows: Place
    heat: Place
    top_k: Place
    top_p: Place
    noise: Place
    decode: PartPlaces
    prefill: PartPlaces
    bytes: int


@lru_cache(maxsize=512)
def places_of(size: StepSize) -> Places:
    end = 0

    def take(count: int, *, wide: bool = False) -> Place:
        nonlocal end
        place = Place(end, count, wide)
        end = -(-place.stop // ALIGNMENT) * ALIGNMENT
        return place

    def part(own: PartSize) -> PartPlaces:
        starts = own.sequences + 1 if own.sequences else 0
        return PartPlaces(take(starts), take(own.sequences), take(own.sequences * own.width))

    tokens, positions, feed = (take(size.tokens) for _ in range(3))
    flat, page, offset = (take(size.tokens, wide=True) for _ in range(3))
    rows, heat, top_k, top_p = (take(size.logit_rows) for _ in range(4))
    noise, decode, prefill = take(size.logit_rows, wide=True), part(size.decode), part(size.prefill)
    return Places(tokens, positions, feed, flat, page, offset, rows, heat, top_k, top_p, noise, decode, prefill, end)


class Arena:
    """Two pinned host buffers in turn and one device twin on CUDA; one tensor that is all three on the CPU.

    Two, because with steps queued behind each other the copy of the last one may still wait for its turn.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """`size` in bytes. It grows where a step needs more; `generation` then changes, for who keeps views."""
        self._device = device
        self._turn = 0
        self.generation = 0
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._make(size)

    def _make(self, size: int) -> None:
        on_cuda = self._device.type == "cuda"
        hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2 if on_cuda else 1)]
        self._hosts = (hosts[0], hosts[-1])
        self._arrays = (hosts[0].numpy(), hosts[-1].numpy())
        self._twin = torch.zeros(size, dtype=torch.uint8, device=self._device) if on_cuda else hosts[0]

    def begin(self, size: int) -> None:
        """Turn to the buffer that was used longer ago, once it was copied, with room for `size` bytes."""
        if size > self._twin.shape[0]:
            for event in self._copied:
                if event is not None:
                    event.synchronize()
            self._make(2 * size)
            self._copied = [None, None]
            self.generation += 1
        self._turn ^= 1
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()

    def host(self, place: Place) -> NDArray[Any]:
        """The host's side of a place, to be written."""
        return self._arrays[self._turn][place.start : place.stop].view(np.int64 if place.wide else np.int32)

    def upload(self, size: int) -> None:
        """Copy the first `size` bytes to the device, without waiting."""
        if self._device.type != "cuda":
            return
        self._twin[:size].copy_(self._hosts[self._turn][:size], non_blocking=True)
        event = self._copied[self._turn]
        if event is None:
            event = self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

    def device(self, place: Place) -> Tensor:
        """The device's side of a place; a view that the next steps overwrite."""
        return self._twin[place.start : place.stop].view(torch.int64 if place.wide else torch.int32)
