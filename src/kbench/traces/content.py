"""Who owns a token: the content of every request, as keys for a prefix cache and as token ids.

Every token of a request's sequence (its prompt, then its forced output) has one owner:

- `streams`: the first `shared_tokens` belong to the shared stream; up to `prefix_tokens` whoever owns them in the first
  parent's sequence, its output included; the rest, and the request's own output, belong to the request itself;
- `blocks`: the tokens of a full block belong to the block; the partial tail and the output to the request itself;
- `tokens`: a token belongs to the first request in file order with the same tokens up to and including this one.

The owner of a token fixes everything before it, so (owner of a page's last token, page number) names the page's whole
prefix at any page size. With blocks, a block that differs counts as different from its first token on: pages smaller
than a block give a lower bound of the reuse. This module knows nothing of caches, engines or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbench.errors import TraceError
from kbench.traces.columns import Int64s
from kbench.traces.trace import MAX_SEQUENCE_TOKENS, Trace

PAGE_BITS = MAX_SEQUENCE_TOKENS.bit_length() - 1  # 24: a key is owner * 2**24 + page

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Range = tuple[int, int]  # (first token, owner)


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """For each request, ranges of tokens by owner: range `i` starts at `starts[i]` and ends where the next begins.

    An owner is a small integer: a request is its own id; then come shared streams, then blocks, in the order of their
    ids. The last range of a request runs to the end of its output.
    """

    offsets: Int64s
    starts: Int64s
    owners: Int64s

    def of(self, request: int) -> list[Range]:
        """The ranges of one request, first to last."""
        part = slice(self.offsets[request], self.offsets[request + 1])
        return list(zip(self.starts[part].tolist(), self.owners[part].tolist(), strict=True))

    def at(self, request: int, positions: Int64s) -> Int64s:
        """The owner of the token at each position."""
        part = slice(self.offsets[request], self.offsets[request + 1])
        return self.owners[part][np.searchsorted(self.starts[part], positions, side="right") - 1]


def owners(trace: Trace) -> Owners:
    """Who owns which tokens of each request's sequence."""
    if trace.content_kind == "blocks":
        return _block_owners(trace)
    ranges = _token_ranges(trace) if trace.content_kind == "tokens" else _stream_ranges(trace)
    counts = np.fromiter((len(each) for each in ranges), np.int64, len(ranges))
    flat = np.array([pair for each in ranges for pair in each], np.int64).reshape(-1, 2)
    return Owners(np.concatenate(([0], np.cumsum(counts))), flat[:, 0].copy(), flat[:, 1].copy())


def _cut(ranges: Sequence[Range], length: int) -> list[Range]:
    return [(start, owner) for start, owner in ranges if start < length]


def _stream_ranges(trace: Trace) -> list[list[Range]]:
    ids = np.unique(trace.shared_id.values[trace.shared_id.known])
    stream_of = {shared: len(trace) + index for index, shared in enumerate(ids.tolist())}
    ranges: list[list[Range]] = []
    for request in range(len(trace)):
        prefix, shared = trace.prefix_tokens.get(request) or 0, trace.shared_tokens.get(request) or 0
        if shared > prefix:
            own = [(0, stream_of[int(trace.shared_id.values[request])])]
        else:
            own = _cut(ranges[trace.parents(request)[0]], prefix) if prefix else []
        ranges.append([*own, (max(prefix, shared), request)])
    return ranges


def _block_owners(trace: Trace) -> Owners:
    size = trace.meta.block_tokens or 1
    _, dense = np.unique(trace.block_ids.values, return_inverse=True)
    counts = trace.block_ids.lengths
    offsets = np.concatenate(([0], np.cumsum(counts + 1)))
    last = offsets[1:] - 1
    rank = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts + 1)
    who = np.empty(offsets[-1], np.int64)
    who[last] = np.arange(len(trace))
    is_block = np.ones(offsets[-1], np.bool_)
    is_block[last] = False
    who[is_block] = len(trace) + dense
    return Owners(offsets, rank * size, who)


@dataclass(slots=True)
class _Edge:
    """A run of tokens in the tree of known sequences, first brought in by `owner`."""

    tokens: NDArray[np.integer[Any]]
    owner: int
    children: dict[int, _Edge] = field(default_factory=dict)


def _token_ranges(trace: Trace) -> list[list[Range]]:
    root: dict[int, _Edge] = {}
    ranges: list[list[Range]] = []
    for request in range(len(trace)):
        known = [
            part for part in (trace.token_ids.get(request), trace.output_token_ids.get(request)) if part is not None
        ]
        walked, length = _insert(root, np.concatenate(known), request)
        # An output that is not recorded belongs to the request, even where the whole prompt is somebody else's.
        ranges.append([*_cut(walked, length), *([(length, request)] if walked[-1][1] != request else [])])
    return ranges


def _insert(children: dict[int, _Edge], tokens: NDArray[np.integer[Any]], request: int) -> tuple[list[Range], int]:
    """Walk and extend the tree; the ranges of `tokens` by owner, and its length."""
    walked: list[Range] = []
    at = 0
    while at < tokens.size:
        first = int(tokens[at])
        edge = children.get(first)
        if edge is None:
            children[first] = _Edge(tokens[at:], request)
            walked.append((at, request))
            break
        walked.append((at, edge.owner))
        span = min(edge.tokens.size, tokens.size - at)
        differs = edge.tokens[:span] != tokens[at : at + span]
        common = int(np.argmax(differs)) if differs.any() else span
        if common < edge.tokens.size:
            rest = _Edge(edge.tokens[common:], edge.owner, edge.children)
            edge.tokens, edge.children = edge.tokens[:common], {int(rest.tokens[0]): rest}
        children, at = edge.children, at + common
    return walked, int(tokens.size)


# --------------------------------------------------------------------------------------------- page keys


def check_page_size(trace: Trace, page_size: int) -> None:
    """Raise TraceError where `trace` cannot say which pages of this size are equal."""
    if page_size < 1:
        raise TraceError(f"a page of {page_size} tokens", file=trace.meta.source, field="page_size")
    size = trace.meta.block_tokens
    if trace.content_kind == "blocks" and size and page_size % size and size % page_size:
        what = f"content is known in blocks of {size} tokens: a page of {page_size} cannot be compared"
        remedy = f"use a multiple of {size} (exact) or a divisor of {size} (a lower bound of reuse)"
        raise TraceError(what, file=trace.meta.source, field="page_size", remedy=remedy)


class PageKeys:
    """Keys of the full pages of each request's sequence: equal exactly where everything up to the page's end is equal.

    `keys(request)[k]` is the key of page `k`, `owner * 2**24 + k`, for the `(input + output) // page_size` full pages;
    the first `input // page_size` lie inside the prompt. Computed for one request at a time, nothing is kept.
    """

    def __init__(self, trace: Trace, page_size: int, *, who: Owners | None = None) -> None:
        check_page_size(trace, page_size)
        self.page_size = page_size
        self._who = owners(trace) if who is None else who
        self._pages = (trace.input_tokens + trace.output_tokens) // page_size
        size = trace.meta.block_tokens
        # False: equal pages may count as different, because the trace is coarser than the page.
        self.exact = not (trace.content_kind == "blocks" and size is not None and page_size < size)

    def array(self, request: int) -> Int64s:
        pages = np.arange(self._pages[request], dtype=np.int64)
        return (self._who.at(request, (pages + 1) * self.page_size - 1) << PAGE_BITS) | pages

    def __call__(self, request: int) -> list[int]:
        keys: list[int] = self.array(request).tolist()
        return keys


def page_keys(trace: Trace, request: int, page_size: int) -> list[int]:
    """Keys of one request's pages. For many requests make one `PageKeys` and call it: the owners are found once."""
    return PageKeys(trace, page_size)(request)


# --------------------------------------------------------------------------------------------- token ids


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class TokenSource:
    """Token ids of each request, the same in every process: a function of trace, seed, owner and position.

    Recorded ids are used where the trace has them. Ids lie in `[0, vocab)`; two traces never share content by chance
    of equal ids, because the trace's hash salts the streams.
    """

    def __init__(self, trace: Trace, vocab: int, seed: int, *, who: Owners | None = None) -> None:
        if not 2 <= vocab <= 2**31 - 1:
            raise TraceError(f"a vocabulary of {vocab} tokens", file=trace.meta.source, field="vocab")
        self._trace, self._vocab = trace, vocab
        self._who = owners(trace) if who is None else who
        self._salt = (int(trace.sha256[:16], 16) ^ (seed * _GOLDEN)) & _MASK

    def prompt(self, request: int, outputs: Mapping[int, Sequence[int]] | None = None) -> NDArray[np.int32]:
        """The prompt's ids, int32 of shape `(input_tokens,)`.

        `outputs` maps a request to the tokens that it really said; where the prompt inherits from such an output it
        carries these, as far as they go. Recorded prompts are never altered.
        """
        length = int(self._trace.input_tokens[request])
        recorded = self._trace.token_ids.get(request)
        if recorded is not None:
            return self._recorded(request, recorded)
        tokens = self._stream(request, 0, length)
        for start, stop, owner in self._ranges(request, length):
            said = (outputs or {}).get(owner) if owner < request else None
            if said is not None:
                _overlay(tokens, start, stop, int(self._trace.input_tokens[owner]), said)
        return tokens

    def output(self, request: int) -> NDArray[np.int32]:
        """The forced output's ids, int32 of shape `(output_tokens,)`: what to feed where the model must not choose."""
        recorded = self._trace.output_token_ids.get(request)
        if recorded is not None:
            return self._recorded(request, recorded)
        start = int(self._trace.input_tokens[request])
        return self._stream(request, start, start + int(self._trace.output_tokens[request]))

    def _ranges(self, request: int, length: int) -> list[tuple[int, int, int]]:
        ranges = _cut(self._who.of(request), length)
        stops = [*(start for start, _ in ranges[1:]), length]
        return [(start, stop, owner) for (start, owner), stop in zip(ranges, stops, strict=True)]

    def _stream(self, request: int, start: int, stop: int) -> NDArray[np.int32]:
        positions = np.arange(start, stop, dtype=np.int64)
        who = self._who.at(request, positions).astype(np.uint64)
        base = _mix((who + np.uint64(1)) * np.uint64(_GOLDEN) ^ np.uint64(self._salt))
        values = _mix(base + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
        return ((values >> np.uint64(16)) % np.uint64(self._vocab)).astype(np.int32)

    def _recorded(self, request: int, tokens: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        if tokens.size and int(tokens.max()) >= self._vocab:
            what = f"request {request}: token id {int(tokens.max())} is outside a vocabulary of {self._vocab}"
            raise TraceError(what, file=self._trace.meta.source, line=request + 1, field="token_ids")
        return tokens.astype(np.int32)


def _overlay(tokens: NDArray[np.int32], start: int, stop: int, first: int, said: Sequence[int]) -> None:
    """Put what was said, which begins at position `first`, over `tokens[start:stop]`."""
    low, high = max(start, first), min(stop, first + len(said))
    if low < high:
        tokens[low:high] = said[low - first : high - first]


def token_ids(
    trace: Trace, request: int, vocab: int, seed: int, outputs: Mapping[int, Sequence[int]] | None = None
) -> NDArray[np.int32]:
    """One request's prompt ids. For many requests make one `TokenSource`: the owners are found once."""
    return TokenSource(trace, vocab, seed).prompt(request, outputs)
