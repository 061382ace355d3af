"""What a server says of itself on /metrics, in the words of vLLM or SGLang."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kbench.targets.mock.engine import MockEngine


class _Collector:
    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        rows = _vllm(self._engine) if self._engine.settings.dialect == "vllm" else _sglang(self._engine)
        label = "model_name"
        for name, value, counts in rows:
            family = CounterMetricFamily if counts else GaugeMetricFamily
            metric = family(name, name, labels=[label])
            metric.add_metric([self._engine.settings.model], value)
            yield metric
        if self._engine.settings.dialect == "vllm":
            config = self._engine.settings.config
            info = GaugeMetricFamily("vllm:cache_config_info", "cache", labels=["block_size", "num_gpu_blocks"])
            info.add_metric([str(config.page_size), str(config.pages)], 1.0)
            yield info


def exposition(engine: MockEngine) -> bytes:
    """The text that a scrape reads."""
    registry = CollectorRegistry()
    registry.register(_Collector(engine))
    return generate_latest(registry)


Row = tuple[str, float, bool]
"""Name, value, and whether it only grows (its name then ends in _total on the wire)."""


def _vllm(engine: MockEngine) -> list[Row]:
    scheduler, counters = engine.scheduler, engine.scheduler.counters
    return [
        ("vllm:num_requests_running", len(scheduler.running), False),
        ("vllm:num_requests_waiting", len(scheduler.waiting), False),
        ("vllm:kv_cache_usage_perc", scheduler.pool.in_use / scheduler.config.pages, False),
        ("vllm:num_preemptions", counters.preemptions, True),
        ("vllm:prefix_cache_queries", counters.looked_up_tokens, True),
        ("vllm:prefix_cache_hits", counters.hit_tokens, True),
        ("vllm:prompt_tokens", engine.prompt_tokens, True),
        ("vllm:generation_tokens", engine.generated_tokens, True),
    ]


def _sglang(engine: MockEngine) -> list[Row]:
    """SGLang exports a hit *rate* and no count of preemptions: what it does not say stays unsaid."""
    scheduler, counters = engine.scheduler, engine.scheduler.counters
    pool, page = scheduler.pool, scheduler.config.page_size
    looked_up = counters.looked_up_tokens
    return [
        ("sglang:num_running_reqs", len(scheduler.running), False),
        ("sglang:num_queue_reqs", len(scheduler.waiting), False),
        ("sglang:token_usage", pool.in_use / scheduler.config.pages, False),
        ("sglang:num_used_tokens", pool.in_use * page, False),
        ("sglang:cache_hit_rate", counters.hit_tokens / looked_up if looked_up else 0.0, False),
        ("sglang:prompt_tokens", engine.prompt_tokens, True),
        ("sglang:generation_tokens", engine.generated_tokens, True),
    ]
