"""What bounds a step: computation, memory, the host, or communication.

Owns the rule by which a class of work counts as compute or memory. A trace holds times, not bytes: the rule uses the
batch where the step's label tells it, and kernel names where it does not, and says which it used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kbench.catalog import Point, parse_point
from kbench.errors import UsageError

LIMITS = ("compute", "memory", "host", "collective")
RIDGE_TOKENS = {"cuda": 200, "cpu": 16}
"""Tokens from which a GEMM is bound by computation: about peak FLOP/s over bytes/s, in a 16-bit type (assumed)."""
RIDGE_QUERY = {"cuda": 50, "cpu": 4}
"""Query tokens a sequence from which attention is: the same over four query heads a KV head (assumed)."""

_MEMORY_NAMES = re.compile(r"gemv|split_?k|decode|paged|split_?kv|::mv$|addmv", re.IGNORECASE)
_VLLM_BATCH = re.compile(r"^prefill \d+ \((?P<context>\d+)\), decode \d+ \((?P<generation>\d+)\)$")


class Accounted(Protocol):
    @property
    def classes(self) -> dict[str, float]: ...
    @property
    def gaps(self) -> dict[str, float]: ...
    @property
    def names(self) -> dict[tuple[str, str], float]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    name: str
    us: dict[str, float]
    basis: str


def limits_of(kind: str, steps: Sequence[tuple[str, Accounted]]) -> Limits:
    """The largest of the four over `(label, account)` of some steps."""
    us = dict.fromkeys(LIMITS, 0.0)
    by_batch = 0
    for label, account in steps:
        bounds = _bounds_of_batch(label, kind)
        by_batch += bounds is not None
        for (name, work_class), value in account.names.items():
            us[_limit_of(name, work_class, bounds)] += value
        us["host"] += account.gaps.get("host_wait", 0.0)
        us["collective"] += account.gaps.get("collective_wait", 0.0)
    how = (
        f"GEMM and MoE compute-bound from {RIDGE_TOKENS[kind]} tokens a step, attention from {RIDGE_QUERY[kind]} query "
        "tokens a sequence (assumed ridge), all else memory-bound"
        if by_batch
        else "the batch is not in the trace: GEMM, MoE and attention count as compute unless a name says decode, gemv "
        "or split; all else memory"
    )
    basis = f"{how}; host = host_wait gaps and metadata; collective = exposed collectives and waits; largest wins"
    return Limits(max(LIMITS, key=lambda name: us[name]), us, basis)


def _limit_of(name: str, work_class: str, bounds: dict[str, str] | None) -> str:
    if work_class == "collective":
        return "collective"
    if work_class == "metadata":
        return "host"
    if work_class not in ("gemm", "moe", "attention"):
        return "memory"
    if bounds is not None:
        return bounds["attention" if work_class == "attention" else "gemm"]
    return "memory" if _MEMORY_NAMES.search(name) else "compute"


def _bounds_of_batch(label: str, kind: str) -> dict[str, str] | None:
    tokens_and_query = _batch(label)
    if tokens_and_query is None:
        return None
    tokens, query = tokens_and_query
    return {
        "gemm": "compute" if tokens >= RIDGE_TOKENS[kind] else "memory",
        "attention": "compute" if query >= RIDGE_QUERY[kind] else "memory",
    }


def _batch(label: str) -> tuple[float, float] | None:
    """Query tokens of the step, and query tokens a sequence weighted by the KV that they read."""
    if match := _VLLM_BATCH.search(label):
        context, generation = int(match["context"]), int(match["generation"])
        return context + generation, context if context > generation else 1
    if not label:
        return None
    try:
        point: Point = parse_point(label)
    except UsageError:
        return None
    work = sum(query * kv for query, kv in point.sequences)
    return point.query_tokens, work / point.kv_tokens
