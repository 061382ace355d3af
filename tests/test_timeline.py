"""Level 0 on traces that torch writes here, and on small hand-made ones for what only a GPU writes."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kbench.errors import UsageError
from kbench.timeline import CLASSES, GAPS, analyse, export, read_patterns, study
from kbench.timeline.export import PROCESS

Event = dict[str, Any]


def span(name: str, begin: float, end: float, cat: str = "user_annotation", **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": end - begin, "args": args}


def launch(correlation: int, begin: float, end: float, name: str = "cudaLaunchKernel") -> Event:
    cat = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
    return span(name, begin, end, cat, correlation=correlation)


def kernel(
    name: str, begin: float, end: float, correlation: int, stream: int = 7, cat: str = "kernel", **args: Any
) -> Event:
    return span(name, begin, end, cat, correlation=correlation, stream=stream, device=0, **args)


def trace(*events: Event) -> dict[str, Any]:
    return {"schemaVersion": 1, "traceEvents": list(events)}


def us(found: dict[str, Any]) -> dict[str, float]:
    return {name: item["us"] for name, item in found["classes"].items() if item["us"]}


def gaps(found: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in found["gaps"].items() if value}


def total_share(found: dict[str, Any]) -> float:
    return sum(item["share"] for item in found["classes"].values()) + sum(found["gaps"].values()) / found["step_us"]


# --------------------------------------------------------------------------------- real, CPU


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.set_num_threads(1)
    x = torch.randn(128, 256)
    heads = torch.randn(1, 4, 128, 64)
    cache = torch.zeros(512, 256)
    slots = torch.arange(128)

    def step(point: str) -> None:
        with record_function(f"kbench.step {point}"):
            with record_function("kbench.phase metadata"):
                torch.arange(64).cumsum(0)
            with record_function("kbench.phase kv_write"):
                cache.index_copy_(0, slots, x)
            with record_function("kbench.phase attention"):
                torch.softmax(heads @ heads.transpose(-1, -2), -1) @ heads
            with record_function("kbench.phase forward"):
                hidden = x
                for _ in range(8):
                    hidden = torch.nn.functional.linear(hidden, x[:128].T @ x)
                    hidden = torch.nn.functional.silu(hidden)
            with record_function("kbench.phase sample"):
                hidden.argmax(-1)

    for _ in range(3):
        step("4*32@128")
    # acc_events keeps torch quiet about cycles that are not there.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        for _ in range(3):
            step("4*32@128")
        step("1*1@127")
    path = tmp_path_factory.mktemp("trace") / "cpu.json.gz"
    recorded.export_chrome_trace(str(path))
    return path


def test_a_real_cpu_trace_closes_without_its_remainder(cpu_trace: Path) -> None:
    found = analyse(cpu_trace, expected_saving=0.22)
    assert found["device"] == "cpu"
    assert found["segmentation"] == "span kbench.step"
    assert found["steps"] == 4
    assert abs(found["closure"] - 1) <= 0.02
    # Phases lie inside their step and beside each other: whatever the machine does, they never add up to more.
    assert all(step["closure"] <= 1.001 for step in found["per_step"])
    assert found["classes"]["other"]["us"] == 0
    assert total_share(found) == pytest.approx(1, abs=1e-3)
    assert set(us(found)) >= {"attention", "gemm", "norm_rope_activation", "kv_write", "sampling", "metadata"}
    assert found["source"] == "cpu.json.gz"
    json.dumps(found, allow_nan=False)


def test_points_are_told_apart(cpu_trace: Path) -> None:
    found = analyse(cpu_trace)
    assert {item["point"]: item["steps"] for item in found["points"]} == {"4*32@128": 3, "1*1@127": 1}
    assert len(found["per_step"]) == 4


def test_the_median_step_of_a_point_stands_for_its_repeats_and_means_are_taken_elsewhere() -> None:
    """A step that lost the processor for a while is shown, and moves nothing."""
    spans = ((0, 100), (1000, 1110), (2000, 2990))
    events = [span("aten::mm", begin, begin + 90, "cpu_op") for begin, _ in spans]
    ours = analyse(trace(*(span("kbench.step 1*1@127", *pair) for pair in spans), *events))
    theirs = analyse(trace(*(span("ProfilerStep#1", *pair) for pair in spans), *events))
    assert (ours["step_us"], theirs["step_us"]) == (110, 400)
    assert ours["classes"]["gemm"]["share"] == pytest.approx(90 / 110)
    assert theirs["classes"]["gemm"]["share"] == pytest.approx(90 / 400)
    assert ours["steps"] == theirs["steps"] == 3
    assert [step["wall_us"] for step in ours["per_step"]] == [100, 110, 990]
    assert any("9.0 times the median" in warning for warning in ours["warnings"])


def test_a_long_hole_between_annotated_phases_is_unknown() -> None:
    phases = (span("kbench.phase attention", 10, 400), span("kbench.phase sample", 900, 1000))
    found = analyse(trace(span("kbench.step", 0, 1000), *phases, span("aten::mm", 20, 30, "cpu_op")))
    assert us(found) == {"attention": 390, "sampling": 100}
    assert gaps(found) == {"host_wait": 10, "unknown": 500}
    assert found["closure"] == pytest.approx(0.5)


def test_the_phase_of_an_operator_decides_over_its_name(cpu_trace: Path) -> None:
    classes = {(item["name"], item["class"]) for item in analyse(cpu_trace)["top"]}
    assert ("aten::bmm", "attention") in classes
    assert ("aten::mm", "gemm") in classes or ("aten::addmm", "gemm") in classes


def test_self_time_agrees_with_the_profilers_own() -> None:
    """Against torch's key_averages: the sum of self times is the operators' busy time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    x, heads = torch.randn(96, 96), torch.randn(1, 2, 64, 32)
    torch.mm(x, x)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        for _ in range(5):
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            torch.mm(x, x)
    theirs = sum(item.self_cpu_time_total for item in recorded.key_averages())
    events = [span(event.name, event.time_range.start, event.time_range.end, "cpu_op") for event in recorded.events()]
    found = analyse(trace(span("kbench.step", -1.0, max(item["ts"] + item["dur"] for item in events)), *events))
    assert found["busy_us"] == pytest.approx(theirs, rel=0.03)


def test_a_plain_torch_trace_without_spans_is_clustered(tmp_path: Path) -> None:
    ops = [
        span("aten::mm", begin, begin + 90, "cpu_op") for start in (0, 5000, 10_000) for begin in (start, start + 100)
    ]
    found = analyse(trace(*ops))
    assert found["steps"] == 3
    assert found["segmentation"].startswith("a guess")
    assert any("guess" in warning for warning in found["warnings"])


# ----------------------------------------------------------------------------------- real, GPU

DATA = Path(__file__).parent / "data"


def test_a_trace_of_an_h200_with_eager_and_graph_steps() -> None:
    """Recorded there: the same body eager (phases annotated) and as a captured graph."""
    found = analyse(DATA / "h200-steps.json.gz", expected_saving=0.22)
    assert found["device"] == "cuda"
    assert found["closure"] == pytest.approx(1, abs=1e-6)
    eager, graph = found["points"]
    for point in (eager, graph):
        assert total_share(point) == pytest.approx(1, abs=1e-6)
        classes = us(point)
        assert classes["attention"] == pytest.approx(243, abs=2)
        assert classes["gemm"] == pytest.approx(42, abs=2)
        assert classes["sampling"] == pytest.approx(38, abs=1)
        assert classes["norm_rope_activation"] == pytest.approx(20, abs=1)
        assert point["busy_us"] == pytest.approx(349, abs=3)
    assert (eager["limit"], graph["limit"]) == ("host", "memory")
    assert us(eager)["kv_write"] > 0  # its phase says so; in a graph only the name is left
    assert graph["gaps"]["in_graph"] > 0
    assert graph["gaps"]["host_wait"] < eager["gaps"]["host_wait"]
    assert graph["largest_saving_us"] == pytest.approx(0.22 * us(graph)["attention"], abs=0.01)


def test_a_trace_of_an_h200_whose_host_ran_ahead() -> None:
    """Forward spans as vLLM names them, kernels queued behind: steps are periods of the device, not of the host."""
    found = analyse(DATA / "h200-forward-spans.json.gz")
    assert found["steps"] == 4
    assert len(found["per_step"]) == 5
    assert any("profiler started" in warning for warning in found["warnings"])
    assert found["step_us"] == pytest.approx(550, abs=5)
    assert found["closure"] == pytest.approx(1, abs=1e-6)
    assert found["classes"]["sampling"]["share"] > 0.3
    assert found["gaps"]["host_wait"] < 0.02 * found["step_us"]


# --------------------------------------------------------------------------- other engines


def test_a_real_trace_of_vllm_on_a_cpu() -> None:
    """vLLM 0.32.0, SmolLM2 in bfloat16, eager, four requests: recorded by /start_profile; names and times kept."""
    found = analyse(DATA / "vllm-cpu-steps.json.gz", expected_saving=0.2)
    assert found["device"] == "cpu"
    assert [point["point"] for point in found["points"]] == [
        "prefill 1 (44), decode 0 (0)",
        "prefill 3 (174), decode 1 (1)",
        "prefill 0 (0), decode 4 (4)",
    ]
    assert [point["limit"] for point in found["points"]] == ["compute", "compute", "memory"]
    for part in (found, *found["points"]):
        assert part["named_share"] >= 0.95
        assert total_share(part) == pytest.approx(1, abs=1e-3)
        assert us(part).keys() >= {"attention", "gemm", "norm_rope_activation", "kv_write", "sampling", "copy"}
    assert found["largest_saving_us"] == pytest.approx(0.2 * us(found)["attention"], rel=1e-3)
    assert found["warnings"] == []


def test_an_engine_without_requests_is_in_no_step() -> None:
    """The last wait is a second: nobody asked for anything. An empty batch is no step either."""
    names = ["execute_context_0(0)_generation_2(2)"] * 5 + ["execute_context_0(0)_generation_0(0)"]
    begins = [0, 100, 200, 1_000_300, 1_000_400, 1_000_500]
    events = [span(name, begin, begin + 50) for name, begin in zip(names, begins, strict=True)]
    events += [span("aten::mm", begin + 1, begin + 60, "cpu_op") for begin in begins[:5]]
    found = analyse(trace(*events))
    assert [step["wall_us"] for step in found["per_step"]] == [100, 100, 60, 100]
    assert any("1 long waits" in warning for warning in found["warnings"])


def test_a_step_of_sglang_with_its_documented_kernels() -> None:
    """Eager prefill through cuLaunchKernelEx, decode as one graph launch, tensor parallel; names as SGLang has them."""
    prefill = [
        ("void flash::FlashAttnFwdSm90<bf16>", "attention"),
        ("_fwd_kernel_stage1", "attention"),
        ("void deep_gemm::fp8_gemm_kernel<7168u>", "gemm"),
        ("per_token_group_quant_8bit_kernel", "norm_rope_activation"),
        ("fused_moe_kernel", "moe"),
        ("moe_align_block_size_kernel", "moe"),
        ("create_flashinfer_kv_indices_triton", "metadata"),
        ("void cross_device_reduce_1stage<__nv_bfloat16, 8>", "collective"),
    ]
    decode = [
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<bf16>", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, bf16>", "norm_rope_activation"),
        ("void flashinfer::activation::act_and_mul_kernel<bf16>", "norm_rope_activation"),
        ("store_kvcache", "kv_write"),
        ("nvjet_tst_64x8_64x16_1x1_h_bz_TNT", "gemm"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collective"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>", "sampling"),
    ]
    events = [span("step[EXTEND bs=1 toks=900]", 0, 100), span("step[DECODE bs=4 toks=4]", 200, 220)]
    for index, (name, _) in enumerate(prefill):
        begin = 10.0 + 10 * index
        events += [
            launch(index + 1, begin - 5, begin - 4, "cuLaunchKernelEx"),
            kernel(name, begin, begin + 9, index + 1),
        ]
    events.append(launch(99, 205, 210, "cudaGraphLaunch"))
    events += [kernel(name, 215 + 10 * at, 224 + 10 * at, 99) for at, (name, _) in enumerate(decode)]
    events += [span("step[DECODE bs=4 toks=4]", 400, 420), launch(100, 405, 410), kernel("nvjet_a", 415, 420, 100)]
    found = analyse(trace(*events))
    assert found["segmentation"].endswith("span SGLang step")
    first, second = found["points"]
    for point, kernels in ((first, prefill), (second, decode)):
        wanted: dict[str, float] = {}
        for _, name in kernels:
            wanted[name] = wanted.get(name, 0.0) + 9
        assert us(point) == wanted
        assert point["named_share"] == 1
    assert second["gaps"]["in_graph"] == 7
    assert second["gaps"]["collective_wait"] == 0


# ---------------------------------------------------------------------------------- written out


def tracks(path: Path) -> dict[str, list[Event]]:
    document = json.loads(gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes())
    own = [event for event in document["traceEvents"] if event["pid"] == PROCESS]
    titles = {event["tid"]: event["args"]["name"] for event in own if event["name"] == "thread_name"}
    assert any(event["name"] == "process_name" and event["args"] == {"name": "kbench"} for event in own)
    found: dict[str, list[Event]] = {title: [] for title in titles.values()}
    for event in own:
        if event["ph"] == "X":
            found[titles[event["tid"]]].append(event)
    return found


@pytest.mark.parametrize("name", ["h200-steps.json.gz", "h200-forward-spans.json.gz"])
def test_what_is_written_out_has_every_event_and_tracks_that_add_up(tmp_path: Path, name: str) -> None:
    found, out = study(DATA / name), tmp_path / "out.json.gz"
    added = export(found, out)
    before = json.loads(gzip.decompress((DATA / name).read_bytes()))["traceEvents"]
    after = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert after[: len(before)] == before
    assert len(after) == len(before) + added
    by_track = tracks(out)
    for title, events in by_track.items():
        # What Perfetto asks of a track: slices in order, apart or nested.
        for one, other in itertools.pairwise(events):
            assert other["ts"] >= one["ts"]
            apart = other["ts"] >= one["ts"] + one["dur"] - 1e-3
            assert apart or other["ts"] + other["dur"] <= one["ts"] + one["dur"] + 1e-3, title
    assert len(by_track["steps"]) == len(found.steps.windows)
    for title, part in (("classes of work", "classes"), ("gaps by cause", "gaps")):
        drawn = sum(event["dur"] for event in by_track[title])
        assert drawn == pytest.approx(sum(sum(getattr(each, part).values()) for each in found.accounts), rel=1e-6)
    # Read again it says the same: our own tracks are nobody's work.
    assert analyse(out) == {**analyse(DATA / name), "source": "out.json.gz"}


def test_phases_are_a_track(cpu_trace: Path, tmp_path: Path) -> None:
    export(study(cpu_trace), tmp_path / "out.json")
    names = [event["name"] for event in tracks(tmp_path / "out.json")["phases"]]
    assert names[:5] == ["metadata", "kv_write", "attention", "forward", "sample"]


def test_a_place_that_cannot_be_written_is_one_line(cpu_trace: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the trace"):
        export(study(cpu_trace), tmp_path / "none" / "out.json")


def test_classes_from_a_file_come_first_and_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "classes.toml"
    path.write_text('[classes]\nspeculation = "draft_"\nattention = "draft_attn|zorp"\n')
    events = [launch(1, 0, 1), kernel("draft_attn", 0, 40, 1), kernel("zorp", 40, 100, 1)]
    found = analyse(trace(span("kbench.step", 0, 100), *events), classes=read_patterns(path))
    assert us(found) == {"speculation": 40, "attention": 60}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[classes", "not TOML"),
        ("", "no \\[classes\\]"),
        ("[classes]\n", "no \\[classes\\]"),
        ("[other]\na = 'b'\n", "'other' is not understood"),
        ("[classes]\ngemm = 3\n", "classes.gemm is no text"),
        ("[classes]\ngemm = '('\n", "no regular expression"),
    ],
)
def test_a_bad_file_of_classes_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "classes.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_patterns(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot read the classes"):
        read_patterns(tmp_path / "gone.toml")


# ------------------------------------------------------------------------------ hand-made, GPU


def test_a_first_step_that_works_longer_is_not_left_out() -> None:
    starts = (0, 1000, 1100, 1200)
    steps = [span("ProfilerStep#1", begin, end) for begin, end in zip(starts, (*starts[1:], 1300), strict=True)]
    prefill = [span("aten::mm", 0, 900, "cpu_op")]
    decodes = [span("aten::mm", begin, begin + 90, "cpu_op") for begin in starts[1:]]
    assert analyse(trace(*steps, *prefill, *decodes))["steps"] == 4
    waited = [span("aten::mm", 900, 990, "cpu_op")]
    assert analyse(trace(*steps, *waited, *decodes))["steps"] == 3


def test_eager_kernels_get_their_class_from_the_launching_operator_and_phase() -> None:
    found = analyse(
        trace(
            span("kbench.step 32*1@4096", 0, 100),
            span("kbench.phase attention", 0, 20),
            span("kbench.phase forward", 20, 60),
            span("aten::mul", 21, 30, "cpu_op"),
            launch(1, 1, 5),
            launch(2, 22, 25),
            launch(3, 31, 34, "cuLaunchKernelEx"),
            launch(4, 35, 36, "cudaMemcpyAsync"),
            kernel("void at::native::unrolled_elementwise_kernel<foo>", 6, 40, 1),
            kernel("void at::native::vectorized_elementwise_kernel<4>", 41, 51, 2),
            kernel("_fused_moe_kernel", 51, 71, 3),
            kernel("Memcpy DtoH (Device -> Pinned)", 72, 80, 4, cat="gpu_memcpy"),
        )
    )
    assert us(found) == {"attention": 34, "norm_rope_activation": 10, "moe": 20, "copy": 8}
    assert found["step_us"] == 100
    assert found["busy_us"] == 72
    # Before the first kernel and after the last nothing was queued; between, one engine waited for the other.
    assert gaps(found) == {"host_wait": 26, "stream_dependency": 2}
    assert found["closure"] == 1
    assert found["limit"] == "memory"  # a decode batch of 32
    assert found["phases"] == {"attention": 20, "forward": 40}


def test_one_graph_launch_owns_many_kernels() -> None:
    found = analyse(
        trace(
            span("kbench.step 8*1@100", 0, 60),
            launch(9, 1, 6, "cudaGraphLaunch"),
            kernel("flash_fwd_splitkv_kernel", 10, 30, 9, **{"graph node id": 3}),
            kernel("nvjet_tst_128x8", 31, 51, 9, **{"graph node id": 4}),
        ),
        expected_saving=0.22,
    )
    assert us(found) == {"attention": 20, "gemm": 20}
    assert gaps(found) == {"host_wait": 19, "in_graph": 1}
    assert found["closure"] == 1
    assert found["largest_saving_us"] == pytest.approx(20 * 0.22)
    assert found["largest_saving_as_rate_us"] == pytest.approx(20 * (1 - 1 / 1.22), abs=1e-3)


def test_a_late_launch_is_the_hosts_gap_and_a_queued_one_is_not() -> None:
    def gap_of(begin: float, end: float, next_begin: float) -> dict[str, float]:
        return gaps(
            analyse(
                trace(
                    span("kbench.step", 0, 200),
                    launch(1, 0, 1),
                    launch(2, begin, end),
                    kernel("gemm_a", 0, 100, 1),
                    kernel("gemm_b", next_begin, 200, 2),
                )
            )
        )

    assert gap_of(150, 155, 160) == {"host_wait": 60}
    assert gap_of(10, 15, 101) == {"stream_dependency": 1}
    assert gap_of(10, 15, 160) == {"unknown": 60}


def test_an_event_wait_between_launches_is_a_stream_dependency() -> None:
    found = analyse(
        trace(
            span("kbench.step", 0, 200),
            launch(1, 0, 1),
            span("cudaStreamWaitEvent", 3, 4, "cuda_runtime", correlation=77),
            launch(2, 10, 15),
            kernel("gemm_a", 0, 100, 1),
            kernel("gemm_b", 160, 200, 2),
        )
    )
    assert gaps(found) == {"stream_dependency": 60}


def test_only_the_exposed_part_of_a_collective_counts() -> None:
    found = analyse(
        trace(
            span("kbench.step", 0, 100),
            launch(1, 0, 1),
            launch(2, 0, 1),
            launch(3, 2, 3),
            kernel("ncclDevKernel_AllReduce_Sum_bf16", 0, 80, 1, stream=20),
            kernel("sm90_xmma_gemm_bf16", 0, 30, 2),
            kernel("sm90_xmma_gemm_bf16", 90, 100, 3),
        )
    )
    assert us(found) == {"gemm": 40, "collective": 50}
    assert gaps(found) == {"collective_wait": 10}
    assert found["limit"] == "collective"


def test_a_step_that_waits_for_its_host_says_so() -> None:
    found = analyse(trace(span("kbench.step 1*1@127", 0, 100), launch(1, 80, 85), kernel("gemm_kernel", 86, 90, 1)))
    assert found["limit"] == "host"
    assert gaps(found) == {"host_wait": 96}


def test_a_large_prefill_is_bound_by_computation() -> None:
    found = analyse(trace(span("kbench.step 1*4096", 0, 100), launch(1, 0, 1), kernel("nvjet_hsh_256", 1, 100, 1)))
    assert found["limit"] == "compute"
    assert "ridge" in found["limit_basis"]


def test_forward_spans_of_vllm_become_periods() -> None:
    """Sampling after the forward span, and the host's work before the next, belong to the step."""
    events: list[Event] = []
    for index in range(3):
        start = 1000.0 * index
        events += [
            span("gpu_model_runner: forward", start, start + 100),
            launch(10 * index + 1, start + 1, start + 2),
            launch(10 * index + 2, start + 200, start + 201),
            kernel("unified_attention_kernel", start + 10, start + 400, 10 * index + 1),
            kernel("argmax_kernel", start + 400, start + 450, 10 * index + 2),
        ]
    found = analyse(trace(*events))
    assert found["steps"] == 2
    assert found["step_us"] == 1000
    assert us(found) == {"attention": 390, "sampling": 50}
    assert gaps(found) == {"host_wait": 560}
    assert "forward" in found["segmentation"]


@pytest.mark.parametrize("name", ["step[DECODE bs=4 toks=4]", "execute_context_0(0)_generation_4(4)", "ProfilerStep#3"])
def test_other_engines_spans_are_steps(name: str) -> None:
    found = analyse(trace(span(name, 0, 50), span("aten::mm", 1, 49, "cpu_op"), span("noise", 60, 90)))
    assert found["steps"] == 1
    assert found["step_us"] == 50
    assert us(found) == {"gemm": 48}


def test_an_unknown_kernel_is_shown_and_opens_the_closure() -> None:
    events = trace(span("kbench.step", 0, 100), launch(1, 0, 1), kernel("zorp", 0, 100, 1))
    found = analyse(events)
    assert us(found) == {"other": 100}
    assert found["closure"] == 0
    assert any("patterns" in warning for warning in found["warnings"])
    mine = analyse(events, classes={"fused_block": "^zorp"})
    assert us(mine) == {"fused_block": 100}
    assert mine["closure"] == 1


def test_a_callers_pattern_comes_before_the_built_in_ones() -> None:
    events = trace(span("kbench.step", 0, 10), launch(1, 0, 1), kernel("my_paged_gemm", 0, 10, 1))
    assert us(analyse(events)) == {"attention": 10}
    assert us(analyse(events, classes=[("gemm", "paged_gemm")])) == {"gemm": 10}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<foo>>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<bf16>", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("_paged_decode_split", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<bf16>", "kv_write"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "gemm"),
        ("ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x5_tn", "gemm"),
        ("void gemvx::kernel<int, int, __nv_bfloat16>", "gemm"),
        ("fused_moe_kernel", "moe"),
        ("void vllm::moe::topkGatingSoftmax<4>", "moe"),
        ("void vllm::rms_norm_kernel<bf16>", "norm_rope_activation"),
        ("void vllm::rotary_embedding_kernel<bf16>", "norm_rope_activation"),
        ("void vllm::act_and_mul_kernel<silu>", "norm_rope_activation"),
        ("triton_poi_fused_add_mul_silu_0", "norm_rope_activation"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4>", "sampling"),
        ("void at::native::reduce_kernel<ArgMaxOps>", "sampling"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel", "sampling"),
        ("ncclDevKernel_AllGather_RING_LL", "collective"),
        ("void vllm::cross_device_reduce_1stage<bf16, 2>", "collective"),
        ("void at::native::index_elementwise_kernel<128>", "copy"),
        ("Memset (Device)", "copy"),
        ("flash::prepare_varlen_num_blocks_kernel", "metadata"),
        ("void relayout_kv_pages", "conversion"),
    ],
)
def test_kernel_names_of_real_engines(name: str, expected: str) -> None:
    found = analyse(trace(span("kbench.step", 0, 10), launch(1, 0, 1, "cudaGraphLaunch"), kernel(name, 0, 10, 1)))
    assert us(found) == {expected: 10}


def test_several_devices_in_one_trace_the_busiest_is_read() -> None:
    second = kernel("gemm", 0, 10, 2)
    second["args"]["device"] = 1
    found = analyse(trace(span("kbench.step", 0, 100), launch(1, 0, 1), kernel("flash", 0, 100, 1), second))
    assert us(found) == {"attention": 100}


def test_classes_and_gaps_are_always_all_there() -> None:
    found = analyse(trace(span("kbench.step", 0, 10), span("aten::mm", 0, 10, "cpu_op")))
    assert tuple(found["classes"]) == CLASSES
    assert tuple(found["gaps"]) == GAPS
    assert found["largest_saving_us"] is None


# ------------------------------------------------------------------------------------ bad input


def bad(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(UsageError) as caught:
        analyse(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


GOOD = json.dumps(trace(span("kbench.step", 0, 10), span("aten::mm", 0, 10, "cpu_op"))).encode()


def test_a_cut_off_trace_is_one_clear_line(tmp_path: Path) -> None:
    assert "cut off" in bad(tmp_path / "t.json", GOOD[:-20])
    assert "cut off" in bad(tmp_path / "t.json.gz", gzip.compress(GOOD)[:-12])


def test_a_gzip_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    path.write_bytes(gzip.compress(GOOD))
    assert analyse(path)["steps"] == 1


@pytest.mark.parametrize("cut", range(0, len(GOOD) - 1, 23))
def test_no_cut_escapes_as_anything_but_a_usage_error(tmp_path: Path, cut: int) -> None:
    bad(tmp_path / "t.json", GOOD[:cut])


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "empty"),
        (b"\xff\xfe\x00", "not"),
        (b"[1, 2]", "not an object"),
        (b"{}", "traceEvents"),
        (b'{"traceEvents": 3}', "traceEvents"),
        (b'{"traceEvents": []}', "no event"),
        (b'"text"', "traceEvents"),
        (b"[" * 100_000, "not"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": "soon", "dur": 1}]}', "'ts'"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1}]}', "'dur'"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": NaN, "dur": 1}]}', "'ts'"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": -1}]}', "negative"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1}]}', "neither"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 1,'
         b' "args": {"correlation": 4}}]}', "no kernel"),
    ],
)  # fmt: skip
def test_malformed_traces(tmp_path: Path, raw: bytes, word: str) -> None:
    assert word in bad(tmp_path / "t.json", raw)


def test_no_file_and_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        analyse(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot read"):
        analyse(tmp_path)
    with pytest.raises(UsageError, match="expected_saving"):
        analyse(json.loads(GOOD), expected_saving=22.0)
    with pytest.raises(UsageError, match="regular expression"):
        analyse(json.loads(GOOD), classes={"gemm": "("})


def test_reading_needs_no_torch() -> None:
    code = "import sys, kbench.timeline; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
