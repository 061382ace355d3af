"""What a trace is like, as one JSON-ready dictionary: rates, lengths, and how much a prefix cache could ever save.

Token hit ratio = prompt tokens in reused full pages / prompt tokens of all requests. A page is reused when an earlier
request, in file order, had it in its prompt or its (forced) output; reuse is contiguous from the first page, and stops
before the prompt's last token, which an engine must compute to answer. Mooncake's conversation trace reads 37.3 % at
512 tokens this way. Knows no engine: no batching, and no request that is still running when the next one comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from kbench.traces.columns import Int64s
from kbench.traces.content import PageKeys, owners
from kbench.traces.timing import timestamp_quantum_us
from kbench.traces.trace import Trace

DEFAULT_PAGE_SIZES = (16, 32, 64, 128, 256, 512)
CACHE_SHARES = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0)  # of everything that the trace ever holds


def default_page_sizes(trace: Trace) -> tuple[int, ...]:
    """Sizes at which the trace's reuse is exact."""
    size = trace.meta.block_tokens
    if trace.content_kind == "blocks" and size:
        return (size, 2 * size, 4 * size, 8 * size)
    return DEFAULT_PAGE_SIZES


def trace_info(trace: Trace, page_sizes: Sequence[int] | None = None) -> dict[str, Any]:
    """Facts about a trace, ready for JSON; what the trace does not tell is null.

    Raises TraceError for a page size that the trace cannot answer.
    """
    sizes = tuple(page_sizes) if page_sizes else default_page_sizes(trace)
    who = owners(trace)
    keys = {size: PageKeys(trace, size, who=who) for size in sizes}
    curve_size = trace.meta.block_tokens if trace.content_kind == "blocks" and trace.meta.block_tokens else sizes[0]
    return {
        "requests": len(trace),
        "sessions": int(np.unique(trace.session_id).size),
        "content": trace.content_kind,
        "sha256": trace.sha256,
        "source": {
            "name": trace.meta.source,
            "sha256": trace.meta.source_sha256,
            "licence": trace.meta.licence,
            "citation": trace.meta.citation,
            "importer": trace.meta.importer,
            "options": dict(trace.meta.options),
            "dropped": dict(trace.meta.dropped),
        },
        **_timing(trace),
        "input_tokens": _lengths(trace.input_tokens),
        "output_tokens": _lengths(trace.output_tokens),
        "infinite_cache_hit_ratio": {str(size): infinite_cache_hit_ratio(trace, keys[size]) for size in sizes},
        "lower_bound_page_sizes": [size for size in sizes if not keys[size].exact],
        "miss_ratio_curve": miss_ratio_curve(trace, PageKeys(trace, curve_size, who=who)),
    }


def _timing(trace: Trace) -> dict[str, Any]:
    """Of the recorded arrivals; a later turn that starts after its parent has none."""
    arrivals = trace.arrival_us.values[trace.arrival_us.known]
    gaps = np.diff(arrivals)
    duration_s = float(arrivals[-1] - arrivals[0]) / 1e6 if arrivals.size else 0.0
    return {
        "duration_s": duration_s,
        "request_rate_per_s": len(trace) / duration_s if duration_s else None,
        "inter_arrival_cv": float(gaps.std() / gaps.mean()) if gaps.size and gaps.mean() else None,
        "timestamp_quantum_us": timestamp_quantum_us(arrivals),
    }


def _lengths(values: Int64s) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99, "max": int(values.max())}


def infinite_cache_hit_ratio(trace: Trace, keys: PageKeys) -> float:
    """Token hit ratio when nothing is ever evicted: the ceiling for this page size."""
    pages = [keys.array(request) for request in range(len(trace))]
    counts = np.fromiter((each.size for each in pages), np.int64, len(pages))
    offsets = np.cumsum(counts) - counts
    flat = np.concatenate(pages)
    # The first occurrence of each key; a later one is a hit. A sequence never holds one key twice.
    _, first = np.unique(flat, return_index=True)
    seen = np.ones(flat.size, np.bool_)
    seen[first] = False
    usable = np.arange(flat.size) - np.repeat(offsets, counts) < np.repeat(_reusable_pages(trace, keys), counts)
    return float(np.count_nonzero(seen & usable) * keys.page_size / trace.input_tokens.sum())


def _reusable_pages(trace: Trace, keys: PageKeys) -> Int64s:
    """Full pages of each prompt that end before its last token."""
    return (trace.input_tokens - 1) // keys.page_size


def miss_ratio_curve(trace: Trace, keys: PageKeys, capacities_tokens: Sequence[int] | None = None) -> dict[str, Any]:
    """Token miss ratio of an LRU page cache by its size; without sizes, at shares of the trace's whole footprint.

    One request after another in file order. A request's last pages are the first of its own to go, as engines do it,
    so that what remains of it is a prefix.
    """
    pages = [keys(request) for request in range(len(trace))]
    footprint = len({key for each in pages for key in each}) * keys.page_size
    if capacities_tokens is None:
        capacities_tokens = sorted({max(keys.page_size, int(footprint * share)) for share in CACHE_SHARES})
    reusable, total = _reusable_pages(trace, keys).tolist(), int(trace.input_tokens.sum())
    nothing_repeats = footprint == sum(map(len, pages)) * keys.page_size
    points = []
    for capacity in capacities_tokens:
        hits = 0 if nothing_repeats else _lru_hits(pages, reusable, capacity // keys.page_size)
        points.append({"cache_tokens": int(capacity), "miss_ratio": 1.0 - hits * keys.page_size / total})
    return {"tokens_per_page": keys.page_size, "footprint_tokens": footprint, "points": points}


def _lru_hits(pages: Sequence[Sequence[int]], reusable: Sequence[int], capacity: int) -> int:
    cache: dict[int, None] = {}  # least recently used first
    hits = 0
    for keys, limit in zip(pages, reusable, strict=True):
        for key in keys[:limit]:
            if key not in cache:
                break
            hits += 1
        for key in reversed(keys):
            cache.pop(key, None)
            cache[key] = None
        for key in list(islice(cache, max(0, len(cache) - capacity))):
            del cache[key]
    return hits
