"""Drift: shapes are tuned on the first part of a trace, and the later part is replayed under each policy.

Owns the arithmetic on a sequence of shapes and the measured times of every configuration. It times nothing: the trials
were made before, so that all policies are judged by the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kbench.kernels.tuner import POLICIES, Policy

OUTLIER = 3.0
"""A call that takes so many times as long as the rule of thumb at its shape is one that users notice."""


@dataclass(frozen=True, slots=True)
class Trials:
    """What the trials of one bucket said."""

    heuristic_us: float
    best_us: float
    spent_us: float
    """All of them together: what tuning at run time makes one call wait."""


@dataclass(slots=True)
class _Replay:
    calls: int = 0
    hits: int = 0
    misses: int = 0
    time_us: float = 0.0
    start_us: float = 0.0
    waited_us: float = 0.0
    outliers: int = 0


def drift(
    sequence: Sequence[str], trials: Mapping[str, Trials], *, first: float = 0.5, calls_a_step: int = 1
) -> dict[str, Any]:
    """Each policy over the later part of `sequence` (buckets in the order of time).

    `first`: share of the sequence that tuning may see. `calls_a_step`: layers, each of which calls the operation once
    a step; a trial is waited for once. Buckets without trials are left out and counted.
    """
    cut = int(len(sequence) * first)
    seen = {bucket for bucket in sequence[:cut] if bucket in trials}
    later = [bucket for bucket in sequence[cut:] if bucket in trials]
    policies = {policy: _replay(policy, seen, later, trials, calls_a_step) for policy in POLICIES}
    heuristic_us = policies["heuristic"].time_us
    new = {bucket for bucket in later if bucket not in seen}
    return {
        "steps": len(sequence),
        "first_steps": cut,
        "later_steps": len(later),
        "left_out_steps": len(sequence) - cut - len(later),
        "buckets_first": len(seen),
        "buckets_later": len(set(later)),
        "buckets_new": len(new),
        "policies": {
            policy: {
                "calls": found.calls,
                "hits": found.hits,
                "misses": found.misses,
                "miss_rate": found.misses / found.calls if found.calls else None,
                "kernel_us": found.time_us,
                "saving_over_heuristic": 1.0 - found.time_us / heuristic_us if heuristic_us > 0.0 else None,
                "start_us": found.start_us,
                "waited_us": found.waited_us,
                "outliers": found.outliers,
                "net_us": found.time_us + found.waited_us,
            }
            for policy, found in policies.items()
        },
        "heuristic_against_tuned": {
            bucket: {"heuristic_us": own.heuristic_us, "tuned_us": own.best_us, "ratio": own.best_us / own.heuristic_us}
            for bucket, own in sorted(trials.items())
        },
    }


def _replay(
    policy: Policy, seen: set[str], later: Sequence[str], trials: Mapping[str, Trials], calls_a_step: int
) -> _Replay:
    cache = set() if policy == "heuristic" else set(seen)
    found = _Replay()
    if policy == "warm-up":
        found.start_us = sum(trials[bucket].spent_us for bucket in seen)
    for bucket in later:
        own, waited = trials[bucket], 0.0
        known = bucket in cache
        found.calls += 1
        if policy != "heuristic":
            found.hits, found.misses = found.hits + known, found.misses + (not known)
        if policy == "live" and not known:
            waited, known = own.spent_us, True
            cache.add(bucket)
        kernel_us = calls_a_step * (own.best_us if known else own.heuristic_us)
        found.time_us += kernel_us
        found.waited_us += waited
        found.outliers += kernel_us + waited > OUTLIER * calls_a_step * own.heuristic_us
    return found
