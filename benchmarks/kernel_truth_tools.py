"""Other people's timers, as they ship, for `kernel_truth.py`.

Owns one function a tool: a call without arguments → µs by that tool, with the tool's own defaults where it has any and
its median where it offers one. Each names the cache state that it brings about. A tool that does not import is absent,
with the reason. nvbench resets the device when it ends, so it runs in a child process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

Call = Callable[[], object]
Read = Callable[[Call], dict[str, float]]
NVBENCH_LIMIT_S = 200


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    state: str
    """The cache state that it brings about: `hot` (same buffers back to back) or `flush` (before each call)."""
    read: Read
    """A call → µs by the names that stand in the table."""
    profiles: bool = False
    """It uses CUPTI itself: only where a profiler has run anyway."""


def available() -> tuple[list[Tool], dict[str, str]]:
    """The tools that import here, and why the others do not."""
    tools, absent = [], {}
    for name, make in (("triton", _triton), ("torch.utils.benchmark", _torch), ("flashinfer", _flashinfer)):
        try:
            tools += make()
        except Exception as error:  # noqa: BLE001 - a package that is broken in its own way is an absent one
            absent[name] = f"{type(error).__name__}: {error}"[:300]
    return tools, absent


def _triton() -> list[Tool]:
    from triton.testing import do_bench, do_bench_cudagraph

    def flushed(call: Call) -> dict[str, float]:
        readings = [1_000 * value for value in do_bench(call, return_mode="all")]
        return {"do_bench": median(readings), "do_bench, mean (default)": fmean(readings)}

    def graph(call: Call) -> dict[str, float]:
        return {"do_bench_cudagraph": 1_000 * do_bench_cudagraph(call, return_mode="median")}

    return [Tool("do_bench", "flush", flushed), Tool("do_bench_cudagraph", "hot", graph)]


def _torch() -> list[Tool]:
    from torch.utils.benchmark import Timer

    def wall(call: Call) -> dict[str, float]:
        return {"torch blocked_autorange": 1e6 * Timer("call()", globals={"call": call}).blocked_autorange().median}

    return [Tool("torch blocked_autorange", "hot", wall)]


def _flashinfer() -> list[Tool]:
    from flashinfer.testing import bench_gpu_time

    def read(name: str, **options: Any) -> Read:
        def bench(call: Call) -> dict[str, float]:
            return {name: 1_000 * median(bench_gpu_time(call, **options))}

        return bench

    plain = {"enable_cupti": False, "use_cuda_graph": False}
    graph = {"enable_cupti": False, "use_cuda_graph": True, "cold_l2_cache": False}
    tools = [
        Tool("flashinfer events", "flush", read("flashinfer events", **plain)),
        Tool("flashinfer graph", "hot", read("flashinfer graph", **graph)),
    ]
    try:
        from cupti import cupti  # noqa: F401
    except ImportError:
        return tools
    cupti_options = {"enable_cupti": True, "use_cuda_graph": False}
    return [*tools, Tool("flashinfer cupti", "flush", read("flashinfer cupti", **cupti_options), profiles=True)]


# ------------------------------------------------------------------------------------------------ nvbench


def nvbench(names: Sequence[str]) -> tuple[dict[str, dict[str, float]], str]:
    """`{case: {nvbench cold, nvbench batch}}` in µs from a child process, and why it is empty if it is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nvbench.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--out", str(path), *names]
        try:
            child = subprocess.run(command, capture_output=True, text=True, timeout=NVBENCH_LIMIT_S, check=False)
            said = f"exit {child.returncode}: {(child.stderr or child.stdout).strip()[-300:]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            said = f"{type(error).__name__}: {error}"[:300]
        try:
            return read_nvbench(json.loads(path.read_text())), ""
        except (OSError, ValueError, KeyError) as error:
            return {}, f"{said} ({type(error).__name__})"


NVBENCH_TAGS = {
    "nv/cold/time/gpu/median": "nvbench cold",
    "nv/cold/time/gpu/mean": "nvbench cold, mean",
    "nv/batch/time/gpu/mean": "nvbench batch",
}
NVBENCH_STATES = {"nvbench cold": "flush", "nvbench cold, mean": "flush", "nvbench batch": "hot"}


def read_nvbench(document: dict[str, Any]) -> dict[str, dict[str, float]]:
    """nvbench's JSON → µs by case and tool."""
    found: dict[str, dict[str, float]] = {}
    for benchmark in document["benchmarks"]:
        times: dict[str, float] = {}
        for state in benchmark["states"]:
            for summary in state.get("summaries") or ():
                if summary["tag"] in NVBENCH_TAGS:
                    value = next(item["value"] for item in summary["data"] if item["name"] == "value")
                    times[NVBENCH_TAGS[summary["tag"]]] = 1e6 * float(value)
        if times:
            found[benchmark["name"]] = times
    return found


def _nvbench_child() -> None:
    """Every named case in one run of nvbench; what fails is skipped with its reason, the others go on."""
    import cuda.bench as bench
    import torch
    from kernel_truth_cases import CASES

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    device = torch.device("cuda")

    def register(name: str) -> None:
        def run(state: bench.State) -> None:
            try:
                call = CASES[name](device).sets(1)[0]
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - the boundary of one case
                state.skip(f"{type(error).__name__}: {error}"[:200])
                return

            def launch(launched: bench.Launch) -> None:
                stream = torch.cuda.ExternalStream(launched.get_stream().addressof())
                with torch.inference_mode(), torch.cuda.stream(stream):
                    call()

            state.exec(launch, batched=True)

        made = bench.register(run)
        made.set_name(name)

    for name in args.names:
        register(name)
    bench.run_all_benchmarks(["nvbench", "--json", args.out, "--batch-target-time", "0.1", "--timeout", "4"])


if __name__ == "__main__":
    _nvbench_child()
