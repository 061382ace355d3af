"""Which batches the steps of a replay had: a histogram of point-like buckets.

Owns the rounding. It imports no torch; the whole steps are in `steps.parquet`, this is what a decision needs of them,
and what kernels are measured at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def histogram(steps: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """`{point, calls, time_us}` of every bucket, the most time first; `steps` has columns of a replay's step log.

    A bucket is a batch in the grammar of points, its numbers the nearest powers of two: `8*1@1024` are decodes, a sum
    with `1*256@512` holds chunks of prompts too. Context is the mean over the sequences of a kind.
    """
    duration = np.asarray(steps["duration_us"], dtype=float)
    if not len(duration):
        return []
    decodes, contexts = (np.asarray(steps[name], dtype=float) for name in ("decode_seqs", "decode_context_tokens"))
    chunks, tokens, reached = (
        np.asarray(steps[name], dtype=float) for name in ("prefill_seqs", "prefill_tokens", "prefill_context_tokens")
    )
    query = _rounded(tokens, chunks)
    rows = np.stack(
        [
            _rounded(decodes, np.ones_like(decodes)),
            _rounded(contexts, decodes),
            _rounded(chunks, np.ones_like(chunks)),
            query,
            np.maximum(query, _rounded(reached, chunks)),
        ],
        axis=1,
    )
    distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    calls, time_us = np.bincount(inverse), np.bincount(inverse, weights=duration)
    found = [
        {"point": _point(row), "calls": int(count), "time_us": round(float(spent), 3)}
        for row, count, spent in zip(distinct.tolist(), calls.tolist(), time_us.tolist(), strict=True)
        if row[0] or row[2]
    ]
    return sorted(found, key=lambda item: (-item["time_us"], item["point"]))


def _rounded(total: NDArray[np.float64], count: NDArray[np.float64]) -> NDArray[np.int64]:
    """The nearest power of two to total / count; 0 where there is none."""
    mean = np.where(count > 0, total / np.maximum(count, 1.0), 0.0)
    return np.where(mean > 0, np.exp2(np.rint(np.log2(np.maximum(mean, 1.0)))), 0).astype(np.int64)


def _point(row: Sequence[int]) -> str:
    decodes, context, chunks, query, reached = row
    parts = [f"{decodes}*1@{context}"] if decodes else []
    return "+".join([*parts, f"{chunks}*{query}@{reached}"] if chunks else parts)
