"""A server's own metrics: scraped, and given one set of names whether vLLM or SGLang speaks.

Owns the table of names. What a server does not export is None, never zero. Counters count from the start of the
server, so only differences of two scrapes mean anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "cache_hit_rate": ("sglang:cache_hit_rate",),
}
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retractions_total", "sglang:num_retracted_reqs_total"),
    "looked_up_tokens": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "hit_tokens": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "sglang:cached_tokens_total",
    ),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "generated_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "admission_rejections": ("vllm:admission_rejections_total",),
    "computed_prompt_tokens": ("vllm:request_prefill_kv_computed_tokens_sum",),
}
SCRAPE_S = 5.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading, summed over a server's ranks and models; `values` has None for what was not exported."""

    at_ns: int
    values: Mapping[str, float | None]
    engine: str = ""
    """`vllm`, `sglang`, or empty: nothing known answered."""


def normalised(text: str, at_ns: int = 0) -> Scrape:
    """Read Prometheus text. Raises ValueError where it is none."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + float(sample.value)
    values = {
        name: next((found[alias] for alias in aliases if alias in found), None)
        for name, aliases in {**GAUGES, **COUNTERS}.items()
    }
    engine = next((name for name in ("vllm", "sglang") if any(key.startswith(f"{name}:") for key in found)), "")
    return Scrape(at_ns, values, engine)


async def scrape(session: aiohttp.ClientSession, url: str, at_ns: int = 0) -> Scrape | None:
    """None where the server gives no metrics."""
    try:
        async with asyncio.timeout(SCRAPE_S), session.get(url) as response:
            if response.status != 200:
                return None
            return normalised(await response.text(), at_ns)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, UnicodeDecodeError):
        return None


def grown(before: Scrape | None, after: Scrape | None) -> dict[str, float | None]:
    """How much each counter grew; None where it was not exported, or the server began anew in between."""

    def growth(name: str) -> float | None:
        if before is None or after is None:
            return None
        first, last = before.values.get(name), after.values.get(name)
        return last - first if first is not None and last is not None and last >= first else None

    return {name: growth(name) for name in COUNTERS}


def derived(counters: Mapping[str, float | None]) -> dict[str, Any]:
    """What follows from counters, and how: recompute where no server counts it.

    Every prompt token is looked up once, found or computed. What was computed beyond that was computed again.
    """
    prompt, hits, computed = (counters.get(name) for name in ("prompt_tokens", "hit_tokens", "computed_prompt_tokens"))
    looked_up = counters.get("looked_up_tokens") or prompt
    recomputed = None
    if prompt is not None and hits is not None and computed is not None:
        recomputed = max(0.0, computed - (prompt - hits))
    return {
        "hit_ratio": hits / looked_up if hits is not None and looked_up else None,
        "recomputed_tokens": recomputed,
        "recomputed_tokens_by": "derived: computed prompt tokens beyond those not found in the cache"
        if recomputed is not None
        else "unknown: the server does not say",
    }
