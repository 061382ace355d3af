"""Statistics agree with a cache that is simulated page by page, and are ready for JSON."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.errors import TraceError
from kbench.traces.content import PageKeys, TokenSource
from kbench.traces.reuse import infinite_cache_hit_ratio, stack_distances
from kbench.traces.schema import RequestRow, Trace, TraceMeta, trace_from_rows
from kbench.traces.statistics import default_page_sizes, miss_ratio_curve, trace_info
from kbench.traces.synth import synthesise

from .conftest import META, block_traces, recorded_traces, stream_traces, token_traces


def simulated(trace: Trace, page_size: int, pages: int | None) -> float:
    """Token hit ratio of an LRU cache of `pages` pages that compares token ids; None for one without an end."""
    source = TokenSource(trace, 2**31 - 1, seed=5)
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for request in range(len(trace)):
        prompt = source.prompt(request)
        sequence = np.concatenate([prompt, source.output(request)])
        reusable = (prompt.size - 1) // page_size
        held = [sequence[: (page + 1) * page_size].tobytes() for page in range(sequence.size // page_size)]
        for prefix in held[:reusable]:
            if prefix not in cache:
                break
            hits += page_size
        for prefix in reversed(held):
            cache.pop(prefix, None)
            cache[prefix] = None
        while pages is not None and len(cache) > pages:
            cache.popitem(last=False)
    return hits / int(trace.input_tokens.sum())


@settings(max_examples=60, deadline=None)
@given(st.one_of(stream_traces(), block_traces(), recorded_traces()), st.sampled_from([1, 2, 4, 8]), st.integers(1, 30))
def test_hit_ratios_are_those_of_a_simulated_cache(trace: Trace, page_size: int, pages: int) -> None:
    assert infinite_cache_hit_ratio(trace, page_size) == pytest.approx(simulated(trace, page_size, None))
    (point,) = miss_ratio_curve(trace, page_size, [pages * page_size])["points"]
    assert point["miss_ratio"] == pytest.approx(1 - simulated(trace, page_size, pages))


def test_a_real_size_is_simulated_alike() -> None:
    trace = synthesise("prefix-heavy", 60, 2)
    assert infinite_cache_hit_ratio(trace, 64) == pytest.approx(simulated(trace, 64, None))
    curve = miss_ratio_curve(trace, 64, [1_024, 4_096, 16_384])
    expected = [1 - simulated(trace, 64, pages) for pages in (16, 64, 256)]
    assert [point["miss_ratio"] for point in curve["points"]] == pytest.approx(expected)
    least = curve["tokens_for_90_percent_of_hits"] // 64
    possible = simulated(trace, 64, None)
    assert simulated(trace, 64, least) >= 0.9 * possible > simulated(trace, 64, least - 1)


@settings(max_examples=60, deadline=None)
@given(st.one_of(stream_traces(), block_traces(), recorded_traces()), st.sampled_from([1, 2, 4]))
def test_the_footprint_is_the_number_of_different_pages(trace: Trace, page_size: int) -> None:
    keys = PageKeys(trace, page_size)
    different = {key for request in range(len(trace)) for key in keys(request)}
    assert stack_distances(trace, page_size).footprint_pages == len(different)


def test_a_whole_prompt_seen_before_still_computes_its_last_token() -> None:
    row = RequestRow(session_id=0, input_tokens=32, output_tokens=1, arrival_us=0, shared_id=1, shared_tokens=32)
    ratios = trace_info(trace_from_rows([row, row], META), [16, 31, 32])["infinite_cache_hit_ratio"]
    assert ratios == {"16": 16 / 64, "31": 31 / 64, "32": 0.0}


@settings(max_examples=25, deadline=None)
@given(st.one_of(stream_traces(), block_traces(), token_traces()))
def test_info_is_json_and_says_what_it_cannot_tell(trace: Trace) -> None:
    info = trace_info(trace)
    assert json.loads(json.dumps(info, allow_nan=False)) == info
    assert info["requests"] == len(trace)
    assert list(info["infinite_cache_hit_ratio"]) == [str(size) for size in default_page_sizes(trace)]
    arrivals = trace.arrival_us.values[trace.arrival_us.known]
    assert (info["request_rate_per_s"] is None) == (arrivals[0] == arrivals[-1])


def test_lengths_and_rates() -> None:
    times = [0, 1_000_000, 3_000_000, 4_000_000]
    rows = [
        RequestRow(session_id=index // 2, input_tokens=10 * (index + 1), output_tokens=2, arrival_us=time)
        for index, time in enumerate(times)
    ]
    info = trace_info(trace_from_rows(rows, META), [16])
    assert (info["sessions"], info["duration_s"], info["request_rate_per_s"]) == (2, 4.0, 1.0)
    assert info["input_tokens"] == pytest.approx(
        {"mean": 25.0, "p50": 25.0, "p90": 37.0, "p99": 39.7, "min": 10, "max": 40}
    )
    assert info["timestamp_quantum_us"] == 1_000_000
    assert info["inter_arrival_cv"] == pytest.approx(np.std([1, 2, 1]) / (4 / 3))


def test_smaller_pages_than_blocks_are_labelled_a_lower_bound() -> None:
    row = RequestRow(session_id=0, input_tokens=9, output_tokens=1, arrival_us=0, block_ids=[1, 2], tail_id=3)
    trace = trace_from_rows([row], TraceMeta(source="t", importer="t", block_tokens=4))
    assert trace_info(trace, [2, 4, 8])["lower_bound_page_sizes"] == [2]
    with pytest.raises(TraceError, match="a page of 6"):
        trace_info(trace, [6])
