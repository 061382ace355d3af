"""Presets are reproducible to the hash, favour no page size, and make what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.errors import UsageError
from kbench.traces.draw import Draw, Gaps, Span
from kbench.traces.schema import Trace, read_trace
from kbench.traces.statistics import trace_info
from kbench.traces.synth import PRESETS, synthesise

PINNED = {
    "chat": "033f535ea3d4fb87491a71699c6461619e511727e818cbd621233a5783525032",
    "long-context": "a6b8f3f32dec0a0bde7e1680fb07c33178ceeae48fed7f28cfa42604caa87827",
    "prefix-heavy": "156e20f3b6f61a938decf9ccbfea2b13318b2b3000f6cf0e11298dd0b3981ea0",
    "burst": "0878388cb1a552740b02276c9cdfd23cb6a2f7e9f8b13806f296ec55b8edd857",
    "rag": "5c163b268b98e4d1aeaab0fd6de11c66ec4c7ba3ed9365d4f3bae3e794d23ad9",
    "agentic": "a1f0ffae3930e7c27cc1e37a914ef76234c46cb30d02821bc262a5ec8fbaeabd",
    "shared-prefix": "e731ba2b62d9d2507099bb49ced1539531a26734acf427dea6fd5b1cb42d71ce",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_arguments_make_the_same_trace_for_ever(preset: str) -> None:
    assert synthesise(preset, 50, 1).sha256 == PINNED[preset]
    assert synthesise(preset, 50, 2).sha256 != PINNED[preset]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(PRESETS)),
    st.integers(1, 60),
    st.integers(0, 1000),
    st.sampled_from([0.05, 0.4, 1.0, 3.0]),
    st.none() | st.integers(32, 5_000),
)
def test_lengths_fill_no_pages_and_fit(preset: str, count: int, seed: int, scale: float, limit: int | None) -> None:
    trace = synthesise(preset, count, seed, scale=scale, max_context=limit)
    assert len(trace) == count
    top = limit or round(PRESETS[preset].max_context * scale)
    assert (trace.input_tokens + trace.output_tokens <= top).all()
    prefix, shared = trace.prefix_tokens, trace.shared_tokens
    for lengths in (trace.input_tokens, trace.output_tokens, prefix.values[prefix.known], shared.values[shared.known]):
        assert (lengths % 16 != 0).all()
    added = (trace.input_tokens - np.maximum(prefix.values, shared.values))[trace.turn > 0]
    assert (added > 0).all() and (added % 16 != 0).all()


def test_hits_depend_on_the_page_size() -> None:
    for preset in ("prefix-heavy", "chat", "rag", "agentic", "shared-prefix"):
        ratios = trace_info(synthesise(preset, 300, 1), [16, 64, 256])["infinite_cache_hit_ratio"]
        assert ratios["16"] > ratios["64"] > ratios["256"] > 0.5


def test_sessions_go_on_from_what_was_said() -> None:
    trace = synthesise("chat", 200, 1)
    later = np.flatnonzero(trace.turn > 0)
    assert later.size > 100
    for request in later.tolist():
        (parent,) = trace.parents(request)
        assert trace.prefix_tokens.get(request) == trace.input_tokens[parent] + trace.output_tokens[parent]
        assert trace.arrival_us.get(request) is None and (trace.think_us.get(request) or 0) > 0
        assert trace.session_id[request] == trace.session_id[parent]
    shared = trace.shared_id.values[trace.shared_id.known]
    sessions_of = {
        stream: set(trace.session_id[trace.shared_id.values == stream].tolist()) for stream in shared.tolist()
    }
    assert len(sessions_of) > 3 and max(map(len, sessions_of.values())) > 2


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        *(("gamma", cv) for cv in (0.5, 2.0, 4.0)),
        *(("weibull", cv) for cv in (0.3, 1.0, 2.5)),
        *(("bursty", cv) for cv in (1.5, 3.0)),
        ("poisson", 1.0),
    ],
)
def test_arrivals_have_the_asked_rate_and_variation(arrivals: str, cv: float) -> None:
    source = Gaps(Draw(7, 0), arrivals, cv)
    gaps = np.array([source.next() for _ in range(40_000)])
    assert gaps.mean() == pytest.approx(1.0, abs=0.1 if cv > 2 else 0.04)
    assert gaps.std() == pytest.approx(cv, rel=0.1)


def test_weibull_gaps_follow_the_distribution_that_scipy_knows() -> None:
    from scipy import stats

    draw = Draw(5, 0)
    for shape in (0.6, 1.0, 2.5):
        known = stats.weibull_min(shape)
        gaps = [draw.gap("weibull", float(known.std() / known.mean())) for _ in range(4_000)]
        assert stats.kstest(gaps, stats.weibull_min(shape, scale=1 / known.mean()).cdf).pvalue > 0.001


def test_bursty_gaps_come_in_phases_and_gamma_gaps_do_not() -> None:
    def dispersion(arrivals: str) -> float:
        """Variance over mean of the arrivals in windows of 50 mean gaps; renewal arrivals tend to CV² = 4."""
        source = Gaps(Draw(2, 0), arrivals, 2.0)
        times = np.cumsum([source.next() for _ in range(60_000)])
        counts = np.bincount((times // 50).astype(int))
        return float(counts.var() / counts.mean())

    assert dispersion("gamma") == pytest.approx(4.0, rel=0.25)
    assert dispersion("bursty") > 8.0


def test_gamma_gaps_follow_the_distribution_that_scipy_knows() -> None:
    from scipy import stats

    draw = Draw(3, 0)
    for shape in (0.3, 1.0, 4.0):
        sample = [draw.gamma(shape) for _ in range(4_000)]
        assert stats.kstest(sample, stats.gamma(shape).cdf).pvalue > 0.001
    assert stats.kstest([draw.normal() for _ in range(4_000)], "norm").pvalue > 0.001


def test_lengths_are_log_uniform_within_their_bounds() -> None:
    draw = Draw(1, 0)
    values = np.array([draw.between(Span(100, 1_600)) for _ in range(8_000)])
    assert values.min() >= 100 and values.max() <= 1_600
    counts, _ = np.histogram(values, bins=[100, 200, 400, 800, 1_601])
    assert counts.min() > 1_850 and counts.max() < 2_150


def test_the_rate_counts_requests() -> None:
    info = trace_info(synthesise("chat", 2_000, 1, rate_per_s=10.0), [16])
    assert info["request_rate_per_s"] == pytest.approx(10.0, rel=0.1)
    assert trace_info(synthesise("burst", 2_000, 1), [16])["inter_arrival_cv"] > 3.0
    assert synthesise("burst", 10, 1, arrivals="poisson").meta.options["cv"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "chatty"}, "unknown preset 'chatty' .*chat, long-context"),
        ({"requests": 0}, "requests = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"rate_per_s": 0.0}, "rate_per_s = 0.0"),
        ({"rate_per_s": float("nan")}, "rate_per_s = nan"),
        ({"arrivals": "weekly"}, "arrivals = 'weekly'"),
        ({"cv": 2.0}, "cv = 2.0 .*use gamma"),
        ({"arrivals": "bursty", "cv": 1.0}, "cv = 1.0 .*above 1 for bursty"),
        ({"arrivals": "weibull", "cv": 16.0}, "cv = 16.0 .*weibull"),
        ({"scale": 0.0}, "scale = 0.0"),
        ({"max_context": 8}, "max_context = 8"),
    ],
)
def test_options_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        synthesise(**{"preset": "chat", "requests": 3, "seed": 1, **arguments})


# --------------------------------------------------------------------------------------------- the files that ship

SHIPPED = Path(__file__).resolve().parents[2] / "traces"
FILES = {"chat": 600, "long-context": 200, "prefix-heavy": 300, "burst": 200}
THINK_SCALE = {"chat": 0.1}


def shipped(preset: str) -> Trace:
    return read_trace(SHIPPED / f"{preset}.parquet")


@pytest.mark.parametrize(("preset", "count"), FILES.items())
def test_a_shipped_trace_is_what_its_command_makes(preset: str, count: int) -> None:
    trace = shipped(preset)
    scale = THINK_SCALE.get(preset, 1.0)
    command = f"kbench trace synth {preset} --requests {count} --seed 1"
    assert trace.meta.options["command"] == command + (f" --think-scale {scale}" if scale != 1.0 else "")
    again = synthesise(preset, count, 1, think_scale=scale)
    assert (trace.sha256, trace.meta) == (again.sha256, again.meta)


def test_shipped_traces_hold_what_the_practice_claim_needs() -> None:
    long, chat = shipped("long-context"), shipped("chat")
    assert long.input_tokens.min() >= 1_200 and long.input_tokens.max() < 4_096
    assert (chat.input_tokens + chat.output_tokens).max() <= 2_048
    near = np.abs(chat.input_tokens - 127) <= 40
    assert near.sum() >= 10
