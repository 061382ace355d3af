"""What a trace is like, as one JSON-ready dictionary: rates, lengths, and how much a prefix cache could ever save.

Token hit ratio = prompt tokens in reused full pages / prompt tokens of all requests, as `reuse` defines it: Mooncake's
conversation trace reads 37.3 % at 512 tokens. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kbench.traces.columns import Int64s
from kbench.traces.content import Owners, PageKeys, owners
from kbench.traces.reuse import infinite_cache_hit_ratio, stack_distances
from kbench.traces.timing import timestamp_quantum_us
from kbench.traces.trace import Trace

DEFAULT_PAGE_SIZES = (16, 32, 64, 128, 256, 512)
CACHE_SHARES = (1 / 256, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of everything that the trace ever holds


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
    exact = {size: PageKeys(trace, size, who=who).exact for size in sizes}
    curve_size = trace.meta.block_tokens if trace.content_kind == "blocks" and trace.meta.block_tokens else sizes[0]
    return {
        "requests": len(trace),
        "sessions": int(np.unique(trace.session_id).size),
        "turns_per_session_max": int(trace.turn.max()) + 1,
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
        "infinite_cache_hit_ratio": {str(size): infinite_cache_hit_ratio(trace, size, who=who) for size in sizes},
        "lower_bound_page_sizes": [size for size in sizes if not exact[size]],
        "miss_ratio_curve": miss_ratio_curve(trace, curve_size, who=who),
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
    extremes = {"min": int(values.min()), "max": int(values.max())}
    return {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99, **extremes}


def miss_ratio_curve(
    trace: Trace, page_size: int, capacities_tokens: Sequence[int] | None = None, *, who: Owners | None = None
) -> dict[str, Any]:
    """Token miss ratio of an LRU page cache by its size; without sizes, at shares of the trace's whole footprint."""
    distances = stack_distances(trace, page_size, who=who)
    footprint = distances.footprint_pages * page_size
    if capacities_tokens is None:
        capacities_tokens = sorted({max(page_size, int(footprint * share)) for share in CACHE_SHARES})
    points = [
        {"cache_tokens": int(capacity), "miss_ratio": distances.miss_ratio(int(capacity) // page_size)}
        for capacity in capacities_tokens
    ]
    return {
        "tokens_per_page": page_size,
        "footprint_tokens": footprint,
        "tokens_for_90_percent_of_hits": distances.pages_for(0.9) * page_size,
        "points": points,
    }
