"""Sizes of a step, and the batch sizes that graphs are captured for. Plain numbers: whoever models an engine reads them
without torch."""

from __future__ import annotations

from typing import NamedTuple

SEQUENCES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Captured numbers of sequences of a phase: between two of them a batch is padded."""


class PartSize(NamedTuple):
    """Size of one phase's attention batch: sequences, and columns of its block table."""

    sequences: int = 0
    width: int = 0


class StepSize(NamedTuple):
    """Size of everything that a step uploads. Two steps of one size have the same layout."""

    tokens: int
    logit_rows: int
    decode: PartSize = PartSize()
    prefill: PartSize = PartSize()


def captured_sequences(max_seqs: int) -> tuple[int, ...]:
    """Captured batch sizes of an engine, its own limit included."""
    inside = tuple(size for size in SEQUENCES if size < max_seqs)
    return (*inside, max_seqs) if max_seqs <= SEQUENCES[-1] else inside
