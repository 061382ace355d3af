r"""What choosing tokens takes of an engine step, over batch and context.

    python benchmarks/sampling_share.py --threads 1 --rounds 5 \
        --out results/cpu/sampling_share.json --md results/cpu/sampling_share.md
    python benchmarks/sampling_share.py --device cuda --preset llama-3-8b --batches 1,8,32,128 \
        --out results/h200/sampling_share.json --md results/h200/sampling_share.md

Greedy, a draw (temperature 0.8, top-k 50, top-p 0.95) and a grammar mask (one token in eight is allowed, greedy) take
turns on the same batch, step by step in one process. The whole step has nothing stamped inside: on CUDA wall time,
replayed from a graph where the draw is part of it; on a CPU processor time, eager. `more than greedy` is what a way of
choosing costs there. `sample` and `logits copy` are phases of an eager step, in device time on CUDA, in wall time on a
CPU; shares are of the sum of that step's phases. Medians.

`cpus_used` below the threads of a CPU run says that others had the processor: phases are long by that much.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from kbench.catalog import parse_point
from kbench.catalog.attributes import StepAttributes
from kbench.clock.ceilings import device_name
from kbench.engine.phases import DevicePhaseClock, NullClock, PhaseClock
from kbench.engine.runner import Runner
from kbench.measure.clean_step import clean_step
from kbench.measure.exec_batch import BatchState, KeptWeights, open_runner
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

WAYS: tuple[Literal["greedy", "topkp", "grammar"], ...] = ("greedy", "topkp", "grammar")
WARM_STEPS = 3


def open_all(args: argparse.Namespace, batch: int, context: int) -> tuple[Runner, dict[str, BatchState]]:
    """A runner with a pool for one batch, and the batch once a way: their tokens differ in how they are chosen only."""
    cuda = args.device == "cuda"
    point = parse_point(f"{batch}*1@{context}")
    arm = Arm(
        name="sampling-share",
        model=ModelSettings(preset=args.preset, layers=args.layers, dtype="bfloat16" if cuda else "float32"),
        engine=EngineSettings(graph="graph" if cuda else "eager", max_seqs=max(32, batch)),
        prefill="sdpa",
        decode="triton-paged" if cuda else "sdpa-gather",
        page_size=16,
        layout="NHD",
        seed=1,
        root=".",
    )
    runner = open_runner(arm, args.device, [point], args.kept)
    states = {}
    for index, way in enumerate(WAYS):
        states[way] = BatchState(runner, point, 1, first_id=index * batch, attributes=StepAttributes(sampling=way))
        states[way].fill(1)
    return runner, states


def processor_ns(state: BatchState) -> int:
    """Processor time of one step: on a shared machine the wall clock counts what others compute, too."""
    state.restore()
    begin = time.process_time_ns()
    state.step(NullClock())
    return time.process_time_ns() - begin


def measured(runner: Runner, states: dict[str, BatchState], rounds: int) -> Iterator[dict[str, Any]]:
    """One row a way."""
    walls: dict[str, list[int]] = defaultdict(list)
    phases: dict[str, list[dict[str, int]]] = defaultdict(list)
    modes = {}
    clock = DevicePhaseClock() if runner.device.type == "cuda" else PhaseClock()
    for turn in range(rounds + WARM_STEPS):
        for way, state in states.items():
            runner.force()
            wall = clean_step(runner, state)[0] if runner.device.type == "cuda" else processor_ns(state)
            modes[way] = runner.last_step.mode
            runner.force(eager="phases are told apart")
            state.restore()
            runner.idle()
            state.step(clock)
            stamps = clock.take()
            if turn >= WARM_STEPS:
                walls[way].append(wall)
                phases[way].append(stamps)
    greedy_us = median(walls["greedy"]) / 1e3
    for way in states:
        step_us = median(walls[way]) / 1e3
        middle = {name: median(stamps.get(name, 0) for stamps in phases[way]) / 1e3 for name in phases[way][0]}
        phased_us = median(sum(stamps.values()) for stamps in phases[way]) / 1e3
        yield {
            "sampling": way,
            "launched": modes[way],
            "step_us": step_us,
            "more_than_greedy_us": step_us - greedy_us,
            "more_than_greedy_share": (step_us - greedy_us) / step_us,
            "phased_step_us": phased_us,
            "sample_us": middle["sample"],
            "sample_share": middle["sample"] / phased_us,
            "logits_copy_us": middle["logits_copy"],
            "logits_copy_share": middle["logits_copy"] / phased_us,
        }


def table(document: dict[str, Any]) -> str:
    """The rows as Markdown."""
    where = f"{document['preset']}, {document['layers']} layers, vocabulary {document['vocab']:,}, {document['dtype']}"
    lines = [
        f"# Sampling's share of a decode step: {where}, {document['device_name']}",
        "",
        f"`{document['command']}`;",
        f"medians. A step is clean {'wall' if document['device'] == 'cuda' else 'processor'} time; `sample` and",
        "`logits copy` are phases of an eager step, shares are of the sum of its phases. "
        f"{document['threads']} thread(s) had {document['cpus_used']:.2f} processors.",
        "",
        "| batch × context | chosen by | launched | step, ms | more than greedy "
        "| sample, µs | share | logits copy, µs | share |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['batch']} × {row['context']:,} | {row['sampling']} | {row['launched']} | {row['step_us'] / 1e3:.3f} "
        f"| {row['more_than_greedy_share']:.1%} | {row['sample_us']:.0f} | {row['sample_share']:.1%} "
        f"| {row['logits_copy_us']:.0f} | {row['logits_copy_share']:.1%} |"
        for row in document["rows"]
    ]
    return "\n".join(lines) + "\n"


def whole(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", type=whole, default=[1, 8, 32])
    parser.add_argument("--contexts", type=whole, default=[127, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--md", type=Path)
    parser.add_argument("--json", action="store_true", help="the document on stdout")
    args = parser.parse_args()
    args.kept = KeptWeights()
    torch.set_num_threads(args.threads)
    rows = []
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for batch in args.batches:
        for context in args.contexts:
            runner, states = open_all(args, batch, context)
            rows += [{"batch": batch, "context": context, **row} for row in measured(runner, states, args.rounds)]
            decoder = runner.decoder
            del runner, states
    document = {
        "schema": "kbench.sampling_share/1",
        "command": f"python benchmarks/sampling_share.py --device {args.device} --preset {args.preset} "
        f"--threads {args.threads} --rounds {args.rounds}",
        "preset": args.preset,
        "layers": decoder.shape.layers,
        "vocab": decoder.shape.vocab,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "device": args.device,
        "device_name": device_name(decoder.device),
        "rounds": args.rounds,
        "threads": args.threads,
        "torch": torch.__version__,
        "cpus_used": (time.process_time() - cpu_s) / (time.perf_counter() - wall_s),
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.md:
        args.md.write_text(table(document), encoding="utf-8")
    print(json.dumps(document) if args.json else table(document), end="")


if __name__ == "__main__":
    main()
