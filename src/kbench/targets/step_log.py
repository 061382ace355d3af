"""What every step of a virtual replay was, kept by runs of equal steps and written out as columns when they are read.

Owns the rows of `STEP_COLUMNS`. Steps in a run differ by a token a sequence and by the pages taken: that and their
times is all that is kept of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kbench.engine.costs import StepShape
from kbench.targets.base import STEP_COLUMNS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIELDS = 16
"""Steps, start, two growths, the shape's six, preempted, waiting, evictable, blank, used, work's growth.

A run's state is that before its first step: growths are of every step, the first included.
"""


class StepLog(Mapping[str, Sequence[float]]):
    """Steps in order, and their columns once somebody reads one. `pages` and `page_size` are those of the pool."""

    def __init__(self, pages: int, page_size: int) -> None:
        self._pages = pages
        self._page_size = page_size
        self._runs = array("q")
        self._durations = array("q")
        self._taken = array("q")
        self._columns: dict[str, Sequence[float]] | None = None

    def __getitem__(self, name: str) -> Sequence[float]:
        if self._columns is None:
            self._columns = self._expanded()
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(STEP_COLUMNS)

    def __len__(self) -> int:
        return len(STEP_COLUMNS)

    def step(
        self,
        start_ns: int,
        duration_ns: int,
        shape: StepShape,
        preempted: int,
        waiting: int,
        evictable: int,
        blank: int,
        slack: int,
    ) -> None:
        """One step, with the pool as it is during it."""
        used = (self._pages - evictable - blank) * self._page_size - slack
        self._runs.extend(
            (
                1,
                start_ns,
                0,
                0,
                shape.decode_seqs,
                shape.decode_context_tokens,
                shape.prefill_tokens,
                shape.prefill_seqs,
                shape.prefill_work,
                shape.prefill_context_tokens,
                preempted,
                waiting,
                evictable,
                blank,
                used,
                0,
            )
        )
        self._durations.append(duration_ns)
        self._taken.append(0)

    def run(
        self,
        start_ns: int,
        durations_ns: Sequence[int],
        taken: array[int],
        seqs: int,
        context: int,
        waiting: int,
        evictable: int,
        blank: int,
        used: int,
        chunk: int = 0,
        computed: int = 0,
    ) -> None:
        """Steps of `seqs` decodes each, with the context and the pool before the first; `taken` are each step's pages.

        Each step also computes a `chunk` of a prompt that had `computed` tokens before, where there is one.
        """
        run = (len(taken), start_ns, seqs, chunk, seqs, context, chunk, int(chunk > 0), chunk * computed, computed)
        self._runs.extend((*run, 0, waiting, evictable, blank, used, chunk * chunk))
        self._durations.extend(durations_ns)
        self._taken.extend(taken)

    def _expanded(self) -> dict[str, Sequence[float]]:
        """`STEP_COLUMNS`, times in microseconds."""
        import numpy as np

        runs = np.array(self._runs, np.int64).reshape(-1, _FIELDS).T.copy()
        durations, taken = np.array(self._durations, np.int64), np.array(self._taken, np.int64)
        counts = runs[0]
        first = counts.cumsum() - counts

        def spread(of_run: NDArray[np.int64]) -> NDArray[np.int64]:
            return of_run.repeat(counts)

        def within(values: NDArray[np.int64]) -> NDArray[np.int64]:
            """Running sums that begin again with each run, this step included."""
            sums = np.append(0, values.cumsum())
            within_run: NDArray[np.int64] = sums[1:] - spread(sums[first])
            return within_run

        taken = within(taken)
        nth = np.arange(1, len(durations) + 1) - spread(first)
        of_decodes, of_chunks = spread(runs[2]) * nth, spread(runs[3]) * nth
        short = np.maximum(taken - spread(runs[13]), 0)  # pages that had to be evicted
        evictable, blank = spread(runs[12]) - short, spread(runs[13]) - taken + short
        values: tuple[NDArray[Any], ...] = (
            (spread(runs[1]) + within(durations) - durations) / 1_000,
            durations / 1_000,
            spread(runs[4]),
            spread(runs[5]) + of_decodes,
            spread(runs[6]),
            spread(runs[7]),
            spread(runs[8]) + spread(runs[15]) * nth,
            spread(runs[9]) + of_chunks,
            spread(runs[10]),
            spread(runs[11]),
            self._pages - evictable - blank,
            evictable,
            blank,
            spread(runs[14]) + of_decodes + of_chunks,
        )
        return {name: _plain(column) for name, column in zip(STEP_COLUMNS, values, strict=True)}


def _plain(column: NDArray[Any]) -> Sequence[float]:
    """An array of the standard library: compared as a whole, and 8 bytes a value."""
    plain = array("d" if column.dtype.kind == "f" else "q")
    plain.frombytes(column.tobytes())
    return plain
