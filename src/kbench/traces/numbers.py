"""Small whole numbers for the pages of a trace: equal exactly where `content.PageKeys` are, and with few gaps.

What is known of a page can then be kept in arrays. Owns the numbering; what a page's content is, `content` says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kbench.traces.columns import Int64s
from kbench.traces.content import Owners, check_page_size, owners
from kbench.traces.trace import Trace


class PageNumbers:
    """`of(request)[k]` numbers page `k` of the request, for its `(input + output) // page_size` full pages.

    Numbers are below `count`. Pages of an owner are numbered in a row; its tokens stand at one place in all requests.
    """

    def __init__(self, trace: Trace, page_size: int, *, who: Owners | None = None) -> None:
        check_page_size(trace, page_size)
        ranges = owners(trace) if who is None else who
        lengths = trace.input_tokens + trace.output_tokens
        last = ranges.offsets[1:] - 1
        # A range ends where the next one begins, the last one of a request where the request does.
        ends = np.append(ranges.starts[1:], 0)
        ends[last] = lengths
        most = np.repeat(lengths, np.diff(ranges.offsets))
        low = np.minimum(ranges.starts, most) // page_size
        high = np.maximum(np.minimum(ends, most) // page_size, low)
        self._offsets = ranges.offsets
        self._counts = high - low
        self._pages = lengths // page_size
        self.count, first = _in_a_row(ranges.owners, low, high)
        self._shift = first - low
        self._rising = np.arange(int(self._pages.max(initial=0)))
        self.own_output = _own_output(trace, ranges, last)

    def of(self, request: int) -> Int64s:
        """The numbers of the request's full pages, the first page first."""
        part = slice(self._offsets[request], self._offsets[request + 1])
        numbers: Int64s = self._shift[part].repeat(self._counts[part])
        numbers += self._rising[: len(numbers)]
        return numbers


def _in_a_row(who: Int64s, low: Int64s, high: Int64s) -> tuple[int, Int64s]:
    """How many numbers are needed, and the number of the first page of each range."""
    owned = int(who.max(initial=-1)) + 1
    first = np.full(owned, np.iinfo(np.int64).max)
    stop = np.zeros(owned, np.int64)
    np.minimum.at(first, who, low)
    np.maximum.at(stop, who, high)
    span = np.maximum(stop - first, 0)
    base = np.cumsum(span) - span
    return int(span.sum()), base[who] + low - first[who]


def _own_output(trace: Trace, ranges: Owners, last: Int64s) -> NDArray[np.bool_]:
    """Whether a request alone owns what comes after its prompt, as long as it runs.

    Recorded tokens may be equal to another's by chance, so there nobody else may use them at all. Elsewhere only
    children inherit an output, and they begin after it ended.
    """
    numbers = np.arange(len(trace))
    alone: NDArray[np.bool_] = (ranges.owners[last] == numbers) & (ranges.starts[last] <= trace.input_tokens)
    if trace.content_kind == "tokens":
        uses = np.bincount(ranges.owners, minlength=len(trace))
        alone &= uses[: len(trace)] == 1
    return alone
