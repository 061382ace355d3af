"""The embedded engine's decode step at Llama-3-8B shapes beside vLLM's, graph and eager, and where its time goes.

    python benchmarks/engine_step.py --out results/h200/engine_step.json --md results/h200/engine_step.md

All ways of launching one point, and all points, take turns step by step in one process. Wall time of a whole step:
schedule, metadata, copies, layers, sampling, tokens on the host, bookkeeping. Kernels are told apart by a profiler pass
that comes last. On a CPU (`--device cpu --preset tiny`) the same runs with padded steps in place of graphs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kbench.catalog import ModelShape, parse_point
from kbench.clock.ceilings import device_name, measure
from kbench.engine.phases import NullClock, PhaseClock
from kbench.engine.runner import Runner
from kbench.measure.clean_step import clean_step
from kbench.measure.exec_batch import BatchState, open_runner
from kbench.measure.exec_correct import worst_row
from kbench.measure.step_modes import overlapped_us
from kbench.suite.schema import Arm, EngineSettings, ModelSettings
from kbench.timeline.classes import Classifier

VLLM_MS = {"1*1@127": 4.85, "1*1@4096": 5.03, "32*1@127": 5.44, "32*1@4096": 9.2}
"""vLLM 0.25.1 on the same chip, compiled, CUDA graphs, FlashAttention 3, page 16, greedy: measured apart from this, as
the slope between 8 and 136 generated tokens, where its scheduling overlaps with the device and the context is 72 tokens
longer on average (70 µs of KV traffic at batch 32)."""
VLLM_PRESET = "llama-3-8b"
ROUNDS = 12
GRAPH_STEPS, EAGER_STEPS = 6, 2
"""Steps of a point in a row, the first of which is dropped: another point ran before it."""
PROFILED_STEPS = 3
HOST_STEPS = 12


def open_points(args: argparse.Namespace) -> tuple[Runner, dict[str, BatchState]]:
    """One runner and, in one pool, a batch a point; only one is stepped at a time, and each restores itself."""
    points = {text: parse_point(text) for text in args.points}
    cuda = args.device == "cuda"
    arm = Arm(
        name="engine-step",
        model=ModelSettings(preset=args.preset, layers=args.layers, dtype="bfloat16" if cuda else "float32"),
        engine=EngineSettings(graph="graph", max_seqs=32),
        prefill="sdpa",
        decode="triton-paged" if cuda else "sdpa-gather",
        page_size=args.page_size,
        layout="NHD",
        seed=1,
        root=".",
    )
    runner = open_runner(arm, args.device, list(points.values()))
    states, first_id = {}, 0
    for text, point in points.items():
        states[text] = BatchState(runner, point, 1, first_id=first_id)
        states[text].fill(1)
        first_id += point.batch
    return runner, states


def warm(runner: Runner, states: dict[str, BatchState]) -> dict[str, dict[str, Any]]:
    """Capture everything, and compare a replayed step's logits with the eager step's."""
    found = {}
    for text, state in states.items():
        state.fill(1)
        logits, tokens, modes = [], [], []
        for eager in ("", "compared with its graph"):
            runner.force(eager=eager)
            for _ in range(3):
                state.restore()
                answer = state.step(NullClock())
            logits.append(runner.last_logits.clone())
            tokens.append(answer)
            modes.append(runner.last_step)
        runner.force()
        found[text] = {
            "mode": modes[0].mode,
            "reason": modes[0].reason,
            "padded_tokens": modes[0].padded_tokens,
            "same_tokens": tokens[0] == tokens[1],
            "bitwise": bool(torch.equal(logits[0], logits[1])),
            "rel_l2": worst_row(logits[0].double(), logits[1].double()),
        }
    return found


def timed(runner: Runner, states: dict[str, BatchState], rounds: int) -> dict[str, dict[str, list[int]]]:
    """Wall and device ns of every point and way, in turns. A step that was to be replayed and was not ends this."""
    taken: dict[str, dict[str, list[int]]] = {text: defaultdict(list) for text in states}
    for _ in range(rounds):
        for text, state in states.items():
            for way, steps in (("graph", GRAPH_STEPS), ("eager", EAGER_STEPS)):
                runner.force(eager="" if way == "graph" else "measured beside its graph")
                for count in range(steps + 1):
                    wall, on_device = clean_step(runner, state)
                    if way == "graph" and runner.last_step.mode == "eager":
                        raise SystemExit(f"{text} was not replayed: {runner.last_step.reason}")
                    if count:
                        taken[text][way].append(wall)
                        taken[text][way + "_device"].append(on_device)
            runner.force()
    return taken


def host_us(runner: Runner, state: BatchState, *, eager: str) -> dict[str, float]:
    """Host µs of each phase of a step, medians. Of a replayed step `forward` is the launch and the wait."""
    clock, stamps = PhaseClock(), []
    runner.force(eager=eager)
    for _ in range(HOST_STEPS):
        state.restore()
        runner.idle()
        state.step(clock)
        stamps.append(clock.take())
    runner.force()
    return {name: median(stamp.get(name, 0) for stamp in stamps) / 1e3 for name in stamps[-1]}


def launch_us(runner: Runner, state: BatchState) -> dict[str, float]:
    """Host µs of a step's two halves: until everything is launched, and from then until its tokens are there."""
    begun, ended = [], []
    for _ in range(HOST_STEPS):
        state.restore()
        runner.idle()
        first = perf_counter_ns()
        ticket = state.step_overlapped(None, NullClock())
        second = perf_counter_ns()
        runner.end(ticket, NullClock())
        begun.append(second - first)
        ended.append(perf_counter_ns() - second)
    return {"until launched": median(begun) / 1e3, "until the tokens are there": median(ended) / 1e3}


def floor_bytes(shape: ModelShape, text: str, itemsize: int) -> float:
    """Weights without the embedding table, and K and V of the context, each read once."""
    heads = 2 * (shape.q_heads + shape.kv_heads) * shape.head_dim * shape.hidden
    layer = heads + 3 * shape.hidden * shape.intermediate
    point = parse_point(text)
    context = sum(kv for _, kv in point.sequences)
    return itemsize * (shape.layers * layer + shape.vocab * shape.hidden) + context * shape.kv_bytes_per_token(itemsize)


def breakdown(runner: Runner, state: BatchState) -> dict[str, Any]:
    """Device µs a step by class and by kernel, of replayed steps under the profiler; gaps are what is left."""
    classifier, device = Classifier(), runner.device.type
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    classes: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    spans = 0.0
    for _ in range(PROFILED_STEPS):
        state.restore()
        runner.idle()
        with profile(activities=activities, acc_events=True) as profiler:
            state.step(NullClock())
            runner.idle()
        events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
        if not events:
            return {}
        spans += max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
        for event in events:
            took = event.time_range.end - event.time_range.start
            classes[classifier.kernel(event.name, "", None)] += took / PROFILED_STEPS
            kernels[event.name[:60]].append(took)
    span = spans / PROFILED_STEPS
    top = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:14]
    return {
        "span_us": span,
        "classes_us": dict(sorted(classes.items(), key=lambda item: -item[1])),
        "gaps_us": span - sum(classes.values()),
        "launches": sum(map(len, kernels.values())) / PROFILED_STEPS,
        "kernels": [
            {"name": name, "calls": len(times) / PROFILED_STEPS, "us": sum(times) / len(times)} for name, times in top
        ],
    }


def column(
    runner: Runner, text: str, times: dict[str, list[int]], overlapped: float, checks: dict[str, Any], rate: float
) -> dict[str, Any]:
    shape, itemsize = runner.shape, runner.pool.layers[0].k.element_size()
    moved = floor_bytes(shape, text, itemsize)
    graph_ms = median(times["graph"]) / 1e6
    found = {
        "point": text,
        "graph_ms": graph_ms,
        "eager_ms": median(times["eager"]) / 1e6,
        "vllm_ms": VLLM_MS.get(text) if shape.name == VLLM_PRESET and shape.layers == 32 else None,
        "overlapped_ms": overlapped / 1e3,
        "graph_device_ms": median(times["graph_device"]) / 1e6,
        "floor_gb": moved / 1e9,
        "bandwidth_gb_per_s": moved / graph_ms / 1e6,
    }
    if rate:
        found["bandwidth_share"] = moved / (graph_ms * 1e3) / rate
    return found | checks


def markdown(document: dict[str, Any]) -> str:
    columns = document["columns"]
    lines = [
        "# The engine's decode step beside vLLM's",
        "",
        f"{document['device']}, {document['model']}, {document['layers']} layers, page {document['page_size']}, "
        f"torch {document['torch']}. Made by `{document['command']}`.",
        "",
        "| point | graph ms | overlapped ms | vLLM ms | eager ms | graph, device ms | floor GB | GB/s | share of read "
        "ceiling | graph = eager |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for item in columns:
        share = f"{item['bandwidth_share']:.0%}" if "bandwidth_share" in item else "unknown"
        vllm = "unknown" if item["vllm_ms"] is None else f"{item['vllm_ms']:.2f}"
        same = "bitwise" if item["bitwise"] else f"rel L2 {item['rel_l2']:.1e}"
        lines.append(
            f"| {item['point'].replace('*', chr(92) + '*')} | {item['graph_ms']:.3f} | {item['overlapped_ms']:.3f} | "
            f"{vllm} | {item['eager_ms']:.3f} | {item['graph_device_ms']:.3f} | {item['floor_gb']:.2f} | "
            f"{item['bandwidth_gb_per_s']:.0f} | {share} | {same} |"
        )
    lines += [
        "",
        "- **graph ms**: wall time of one synchronised step, host work and sampling included; medians.",
        "- **overlapped ms**: the host prepares the next step while the device computes; how vLLM was measured.",
        "- **vLLM ms**: version 0.25.1, compiled, on the same chip, not in this run; its context is 72 tokens longer "
        "on average, which is worth 70 µs at batch 32.",
        "- **floor GB**: weights without the embedding table, and K and V, each read once.",
        "",
    ]
    if document["breakdown"]:
        names = list(dict.fromkeys(name for part in document["breakdown"].values() for name in part["classes_us"]))
        lines += ["Device µs a step, under the profiler, by class (a replayed step):", ""]
        lines.append("| point | " + " | ".join(names) + " | gaps | launches | sampling's share |")
        lines.append("| --- " * (len(names) + 4) + "|")
        for text, part in document["breakdown"].items():
            values = [f"{part['classes_us'].get(name, 0.0):.0f}" for name in names]
            share = part["classes_us"].get("sampling", 0.0) / part["span_us"]
            lines.append(
                f"| {text.replace('*', chr(92) + '*')} | " + " | ".join(values) + f" | {part['gaps_us']:.0f} | "
                f"{part['launches']:.0f} | {share:.1%} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--md", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default=VLLM_PRESET)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--points", nargs="+", default=list(VLLM_MS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-profile", action="store_true", help="leave out the profiler pass")
    args = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

    runner, states = open_points(args)
    say("weights and batches are there")
    checks = warm(runner, states)
    assert runner.graphs is not None
    say(f"captured: {runner.graphs.captures} in {runner.graphs.capture_ns / 1e9:.2f} s; {checks}")
    taken = timed(runner, states, args.rounds)
    overlapped = {text: overlapped_us(runner, state) for text, state in states.items()}
    host = {
        text: {
            "graph": host_us(runner, state, eager="") | launch_us(runner, state),
            "eager": host_us(runner, state, eager="measured beside its graph"),
        }
        for text, state in states.items()
    }
    say("timed")
    cuda = args.device == "cuda"
    reached = measure(runner.device, scale=1.0 if cuda else 0.1) if not args.no_profile else None
    rate = reached.read_bytes_per_us if reached is not None else 0.0
    columns = [column(runner, text, taken[text], overlapped[text], checks[text], rate) for text in states]
    parts = {} if args.no_profile else {text: breakdown(runner, state) for text, state in states.items()}
    parts = {text: part for text, part in parts.items() if part}
    say("profiled")
    document = {
        "columns": columns,
        "device": device_name(runner.device),
        "model": runner.shape.name,
        "layers": runner.shape.layers,
        "page_size": args.page_size,
        "torch": torch.__version__,
        "read_ceiling_gb_per_s": rate / 1e3,
        "command": " ".join(["python benchmarks/engine_step.py", *sys.argv[1:]]),
        "host_us": host,
        "breakdown": parts,
    }
    text = markdown(document)
    print(text)
    for part, ways in host.items():
        for way, spans in ways.items():
            print(f"{part} {way}, host us: " + "; ".join(f"{name} {us:.0f}" for name, us in spans.items()))
    for part, found in parts.items():
        print(f"{part}: " + "; ".join(f"{k['name'][:44]} {k['calls']:.0f} x {k['us']:.2f}" for k in found["kernels"]))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1, allow_nan=False, default=_plain) + "\n")
    if args.md:
        args.md.write_text(text)
    say("done")


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else str(value)


if __name__ == "__main__":
    main()
