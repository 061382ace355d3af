"""Which steps may be replayed from a captured CUDA graph, and the size that a step is padded to for it.

Owns the ladders of captured sizes and the rule of the four support levels. A pure function of sizes: it captures
nothing and knows no torch. What cannot be replayed is answered with the reason, in words.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kbench.catalog.capability import GraphSupport
from kbench.engine.sizes import PartSize, StepSize, captured_sequences

StepMode = Literal["eager", "graph", "padded"]
"""Launched kernel by kernel; replayed; or computed as a replay would, kernel by kernel (no device to capture on)."""

TOKENS = (16, 32, 64, 128, 256, 512)
"""Captured numbers of prefill tokens. Above the last a step is long enough to hide its launches."""
CONTEXTS = tuple(128 << step for step in range(14))
"""Tokens of context that a captured block table has room for: it fixes how far attention is split up."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """How one step was computed, and why not from a graph where it was not."""

    mode: StepMode
    reason: str = ""
    padded_tokens: int = 0
    """Rows that stand for nobody."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The captured sizes of one engine. `pages` bounds every block table; `decode` and `prefill` are what the
    implementations of the two phases support."""

    page_size: int
    pages: int
    max_seqs: int
    max_tokens: int
    decode: GraphSupport
    prefill: GraphSupport

    @property
    def sequences(self) -> tuple[int, ...]:
        """Captured batch sizes."""
        return captured_sequences(self.max_seqs)

    @property
    def widths(self) -> tuple[int, ...]:
        """Captured columns of a block table, up to the whole pool."""
        found = [-(-context // self.page_size) for context in CONTEXTS]
        return (*(width for width in dict.fromkeys(found) if width < self.pages), self.pages)

    def pad(self, size: StepSize, queries: Sequence[int], *, exact: bool = False) -> StepSize | str:
        """The captured size that holds a step of `size`, or why there is none. `queries`: lengths of its prefills.

        `exact`: as many sequences as there are, to measure what padding costs.
        """
        decodes, prefills = size.decode.sequences, size.prefill.sequences
        refusal = self._refusal(decodes, queries)
        if refusal:
            return refusal
        if not prefills:
            part = self._part(size.decode, exact)
            return part if isinstance(part, str) else StepSize(part.sequences, part.sequences, decode=part)
        tokens = size.tokens - decodes if exact else _up(TOKENS, size.tokens - decodes)
        if tokens is None:
            return f"{size.tokens - decodes} prefill tokens are above the ladder's {TOKENS[-1]}"
        decode, prefill = self._part(size.decode, exact), self._part(size.prefill, exact)
        for part in (decode, prefill):
            if isinstance(part, str):
                return part
        assert isinstance(decode, PartSize) and isinstance(prefill, PartSize)
        total = tokens + decode.sequences
        if total > self.max_tokens:
            return f"{total} padded tokens are above the budget of {self.max_tokens}"
        return StepSize(total, decode.sequences + prefill.sequences, decode, prefill)

    def _refusal(self, decodes: int, queries: Sequence[int]) -> str:
        if decodes and self.decode is GraphSupport.NEVER:
            return "the decode implementation cannot be captured"
        if not queries:
            return ""
        if self.prefill < GraphSupport.UNIFORM:
            return "the prefill implementation captures " + ("nothing" if not self.prefill else "single tokens only")
        mixed = bool(decodes) or len(set(queries)) > 1
        if mixed and self.prefill is not GraphSupport.ALWAYS:
            return "the prefill implementation captures batches of one query length only"
        return ""

    def _part(self, part: PartSize, exact: bool) -> PartSize | str:
        if not part.sequences:
            return PartSize()
        sequences = part.sequences if exact else _up(self.sequences, part.sequences)
        width = _up(self.widths, part.width)
        if sequences is None:
            return f"{part.sequences} sequences are above the ladder's {self.sequences[-1]}"
        assert width is not None, "no table is wider than the pool"
        return PartSize(sequences, width)


def _up(ladder: Sequence[int], value: int) -> int | None:
    """The next rung at or above `value`."""
    place = bisect_left(ladder, value)
    return ladder[place] if place < len(ladder) else None
