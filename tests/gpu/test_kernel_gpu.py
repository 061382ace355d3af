"""Level 1 on a CUDA device: answers, capture, and graph time against profiler time."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

from gpu.compiled import compiled_or_skipped
from kbench.catalog import Case, implementation, implementations, parse_point
from kbench.clock.cuda import EventTimer, GraphTimer
from kbench.clock.device import DeviceClock, peak_bytes_per_us
from kbench.clock.profiler import profile_kernels
from kbench.clock.timer import prepared_timer
from kbench.kernels.registry import load
from kbench.measure.kernel import KernelTrial
from kbench.ops.attention import AttentionBatch, AttentionSpec
from kbench.ops.base import InputSettings
from kbench.ops.correctness import judge, standard
from kbench.ops.inputs import build
from kbench.protocol import Status
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings
from kernels.holding import hold

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

alone = pytest.mark.skipif(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="wants the device alone")

LLAMA = AttentionSpec(32, 8, 128)
SMALL = AttentionSpec(8, 2, 64)
PRACTICE = ("1*1@127", "1*1@4096", "32*1@127", "32*1@4096")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ON_CUDA = [
    pytest.param(impl.name, op, dtype, id=f"{impl.name}-{op}-{dtype}")
    for impl in implementations()
    if "cuda" in impl.devices and all(importlib.util.find_spec(package) for package in impl.requires)
    for op in impl.ops
    if op in ("attention.decode", "attention.prefill")
    for dtype in impl.dtypes
]


def settings(dtype: str, page: int = 16, layout: str = "NHD") -> InputSettings:
    return InputSettings(page, layout, DTYPES[dtype], torch.device("cuda"), 11)  # type: ignore[arg-type]


def trial(name: str, point: str, timer: str = "auto", **changes: Any) -> KernelTrial:
    fields: dict[str, Any] = {"page_size": 16, "layout": "NHD", "engine": EngineSettings(), "seed": 1} | changes
    model = ModelSettings(preset="llama-3-8b", dtype="bfloat16")
    arm = Arm(name="it", model=model, prefill="sdpa", decode=name, root=".", **fields)
    case = Case("kernel", "attention.decode", "llama-3-8b", point)
    return KernelTrial(case, arm, "cuda", Measure(window_steps=3, window_ms=20.0), 1, timer=timer)


def within(one: float, other: float, share: float = 0.03, floor_us: float = 0.3) -> bool:
    return abs(one - other) <= max(share * other, floor_us)


@pytest.mark.parametrize(("name", "op", "dtype"), ON_CUDA)
def test_every_implementation_reads_large_pages_in_its_other_layout(name: str, op: str, dtype: str) -> None:
    decode = op == "attention.decode"
    known = implementation(name)
    page, layout = max(64, known.page_multiple_of), known.layouts[-1]
    for spec, point in (
        (LLAMA, "3*1@127+1*1@1500" if decode else "1*60@300+1*200"),
        (SMALL, "2*1@515" if decode else "1*33@70"),
    ):
        with torch.inference_mode(), compiled_or_skipped(name):
            verdict = hold(load(name, op), op, parse_point(point), spec, settings(dtype, page, layout))
        assert verdict.status is Status.OK, verdict.message
        assert verdict.facts["null_models_killed"] == verdict.facts["null_models"] >= 5


@pytest.mark.parametrize("point", PRACTICE)
def test_the_triton_decode_is_right_on_the_practice_points(point: str) -> None:
    with torch.inference_mode():
        verdict = hold(
            load("triton-paged", "attention.decode"),
            "attention.decode",
            parse_point(point),
            LLAMA,
            settings("bfloat16"),
        )
    assert verdict.status is Status.OK, verdict.message


@pytest.mark.parametrize(
    "spec", [AttentionSpec(7, 1, 64), AttentionSpec(64, 8, 128), AttentionSpec(4, 4, 256)], ids=str
)
@pytest.mark.parametrize("page", [16, 48, 128])
def test_the_triton_decode_takes_odd_groups_and_pages(spec: AttentionSpec, page: int) -> None:
    for dtype in DTYPES:
        with torch.inference_mode():
            verdict = hold(
                load("triton-paged", "attention.decode"),
                "attention.decode",
                parse_point("2*1@700+1*1@33"),
                spec,
                settings(dtype, page),
            )
        assert verdict.status is Status.OK, verdict.message


def test_a_captured_triton_decode_follows_lengths_that_change_under_it() -> None:
    """Graph mode replays one launch for every step; a padding row of length 0 answers 0."""
    implementation_ = load("triton-paged", "attention.decode")
    inputs = build(parse_point("2*1@2000"), LLAMA, settings("bfloat16"))
    batch = inputs.batch
    plan = implementation_.plan(batch, LLAMA, inputs.kv)
    out = torch.empty_like(inputs.q)
    timer = GraphTimer(torch.device("cuda"))
    timer.prepare([lambda: implementation_.run(inputs.q, inputs.kv, plan, out)])
    batch.seq_lens.copy_(torch.tensor([700, 0], dtype=torch.int32))
    out.fill_(float("nan"))
    timer.round()
    tables = batch.block_table[:, : -(-700 // 16)].tolist()
    shorter = AttentionBatch.build([1, 1], [700, 0], [tables[0], []], "cuda")
    wanted = standard(type(inputs)(inputs.q, inputs.kv, shorter, LLAMA))
    assert judge(out, wanted).ok, judge(out, wanted).problem
    assert not bool(out[1].any())


@alone
@pytest.mark.parametrize("point", PRACTICE)
def test_graph_time_is_profiler_time(point: str) -> None:
    """A graph runs its calls back to back, so its partner is the span of their kernels on the device's timeline.

    First the undisturbed graph, then the very replay that the profiler saw: profiling may widen gaps, not the latter.
    """
    it = trial("triton-paged", point)
    outcome = it.prepare()
    assert outcome.status is Status.OK, outcome.message
    assert (outcome.facts["timer"], outcome.facts["cache"]) in {("graph", "cold"), ("graph", "serving")}
    assert outcome.facts["calls_per_round"] >= outcome.facts["cache_state"]["sets"]
    latencies = [it.window()[0] for _ in range(5)]
    assert all(value.clock == "graph" for value in latencies)
    assert not {"IMPOSSIBLE", "LAUNCH_BOUND"} & {flag for value in latencies for flag in value.flags}
    finish = it.finish()
    assert finish.status is Status.OK, finish.message
    facts = it.trace().facts
    keys = ("graph_us", "profiler_us", "profiler_sum_us", "graph_profiled_us", "profiler_span_us", "kernels")
    numbers = {key: facts[key] for key in keys}
    assert within(facts["graph_us"], facts["profiler_span_us"]), numbers
    assert within(facts["graph_profiled_us"], facts["profiler_span_us"]), numbers
    assert facts["selection"]["observed"] == "triton-paged", numbers
    assert any(implementation("triton-paged").expects_kernel in name for name in facts["kernels"])


@alone
@pytest.mark.parametrize("name", ["sdpa-gather", "blocked"])
def test_torch_decodes_are_timed_and_checked(name: str) -> None:
    it = trial(name, "4*1@500")
    outcome = it.prepare()
    assert outcome.status is Status.OK, outcome.message
    assert outcome.facts["timer"] in ("graph", "event")
    assert it.window()[0].value > 0
    finish = it.finish()
    assert finish.status is Status.OK, finish.message
    facts = it.trace().facts
    assert 0 < facts["profiler_us"] <= facts["profiler_span_us"]
    if outcome.facts["timer"] == "graph":
        assert within(facts["graph_profiled_us"], facts["profiler_span_us"]), facts


def test_a_call_that_cannot_be_captured_is_timed_by_events() -> None:
    values = torch.randn(1 << 22, device="cuda")
    seen: list[float] = []

    def reads_back() -> object:
        seen.append(float(values[0].item()))
        return values.mul(2)

    timer = prepared_timer([reads_back], torch.device("cuda"))
    assert timer.name == "event"
    assert timer.window(5, 1.0)[0] > 0
    assert timer.flags == ("LAUNCH_BOUND",), "it waits for the device: the blocker cannot hide that"
    assert torch.isfinite(torch.randn(8, device="cuda")).all(), "the failed capture is over for the generator too"


@alone
def test_graph_events_and_profiler_agree_on_a_copy() -> None:
    """256 MiB in, 256 MiB out: far above every cache and every launch cost."""
    device = torch.device("cuda")
    source = torch.randn(1 << 26, device=device)
    target = torch.empty_like(source)
    copy: Callable[[], object] = lambda: target.copy_(source)  # noqa: E731
    timers = [GraphTimer(device), EventTimer(device)]
    for timer in timers:
        timer.prepare([copy, copy])
    graph, event = (median(timer.window(20, 20.0)) for timer in timers)
    profile = profile_kernels(timers[0].witnessed, timers[0].round_calls, device)
    assert profile is not None
    assert within(graph, profile.busy_us) and within(event, profile.busy_us), (graph, event, profile)
    peak = peak_bytes_per_us(device)
    assert peak is None or 2 * source.numel() * 4 / graph < peak


def test_the_device_clock_reads_what_it_can() -> None:
    state = DeviceClock(torch.device("cuda")).read()
    if not state:
        pytest.skip("no NVML")
    assert state["sm_mhz"] > 100 and isinstance(state["throttle"], list)
