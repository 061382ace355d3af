"""The grid that recorded timestamps lie on, and spreading arrivals inside it.

A trace whose timestamps were rounded to 3 s replays as a burst every 3 s that nobody sent. Owns finding the grid and
undoing it, seeded; it never reorders requests.
"""

from __future__ import annotations

import numpy as np

from kbench.traces.columns import Int64s

LEAST_QUANTUM_US = 1_000  # below a millisecond, rounding makes no bursts
_GRID_TOLERANCE = 0.005  # of the quantum: Mooncake's 3 s marks are up to 3 ms off
_GRID_SHARE = 0.95  # of the steps between distinct arrivals


def timestamp_quantum_us(arrivals_us: Int64s) -> int:
    """The coarsest grid that the arrivals lie on, counted from the first: 3,000,000 for marks about 3 s apart.

    A grid may wobble: 95 % of the steps must be multiples of it within 0.5 % of it. Without one, the exact common
    divisor; 1 for fewer than two distinct arrivals.
    """
    steps = np.diff(np.unique(arrivals_us))
    if not steps.size:
        return 1
    exact = int(np.gcd.reduce(steps))
    # A grid's own step is among the short ones, unless most marks are empty; then the divisor finds it.
    ordered = np.sort(steps)
    for candidate in (int(ordered[ordered.size // 2]), int(ordered[ordered.size // 20])):
        multiples = np.rint(steps / candidate)
        off = np.abs(steps - multiples * candidate)
        on_grid = (multiples >= 1) & (off <= _GRID_TOLERANCE * candidate)
        if candidate > exact and steps.size >= 20 and on_grid.mean() >= _GRID_SHARE:
            return candidate
    return exact


def dejitter(arrivals_us: Int64s, quantum_us: int, seed: int) -> Int64s:
    """Spread each arrival uniformly over the quantum that it was rounded down to; the order of requests is kept.

    `arrivals_us` is sorted. The offsets are drawn from PCG64's raw output, so that no library version changes them.
    """
    raw = np.random.PCG64(seed).random_raw(arrivals_us.size)
    offsets = ((raw >> np.uint64(11)) % np.uint64(quantum_us)).astype(np.int64)
    # Request i takes the i-th time of all: the draws of one mark are sorted among themselves, and where a wobbling grid
    # puts two marks closer than a quantum the order still holds.
    spread = np.sort(arrivals_us + offsets)
    return spread - spread[0] if spread.size else spread
