"""How many requests a second virtual replay gets through, at pages of 512 and of 16 tokens, beside stepping one by one.

    python benchmarks/virtual_speed.py --json --trace mooncake_conversation_trace.jsonl > results/cpu/virtual_speed.json

The engine, its rate and its step costs are those of suites/mooncake.toml (both page sizes take the grid of 512: what a
step costs does not change how long it takes to replay one). The trace is Mooncake's JSONL or a trace that was imported.
Each page size is replayed `--repeats` times and the fastest counts; then every step is planned by itself, and the two
results are compared: every time of every request, every step, every counter. `--stepping-requests` shortens that part.

Seconds are those of one processor (`process_time`: a replay has one thread), so that a busy machine does not matter;
what the clock on the wall said is beside them. Exit 1 where the slower page size is below 5,000 requests/s or where
results differ.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench.engine.core import EngineConfig
from kbench.engine.costs import CostTable
from kbench.measure.load import head, recorded_rate
from kbench.targets.base import ReplayResult
from kbench.targets.virtual import replay_virtual
from kbench.traces.importers import ImportOptions, import_trace
from kbench.traces.schema import Trace, read_trace

TARGET_PER_S = 5_000
PAGE_SIZES = (512, 16)
SUITE = Path(__file__).parent.parent / "suites" / "mooncake.toml"


@dataclass(frozen=True, slots=True)
class Timed:
    """A replay, and the seconds that it took."""

    result: ReplayResult
    cpu_s: float
    wall_s: float


class Bench:
    """What the suite says, and one way to replay it."""

    def __init__(self, suite: dict[str, Any], grid: Path, trace: Trace) -> None:
        self.engine = suite["engine"]
        self.costs = CostTable.read_parquet(grid)
        self.trace = trace
        self.rate_scale = suite["workload"]["requests_per_s"] / recorded_rate(trace)

    def replay(self, trace: Trace, page_size: int, *, stepping: bool) -> Timed:
        pages = self.engine["kv_tokens"] // page_size
        config = EngineConfig(page_size, pages, self.engine["max_batched_tokens"], self.engine["max_seqs"])
        wall, cpu = time.perf_counter(), time.process_time()
        result = replay_virtual(trace, config, self.costs, rate_scale=self.rate_scale, stepping=stepping)
        assert len(result.steps["start_us"])  # steps are written out when somebody reads them: that counts too
        return Timed(result, time.process_time() - cpu, time.perf_counter() - wall)

    def page_size(self, page_size: int, repeats: int, stepping_requests: int) -> dict[str, Any]:
        """Figures of one page size."""
        runs = [self.replay(self.trace, page_size, stepping=False) for _ in range(repeats)]
        best = min(runs, key=lambda run: run.cpu_s)
        part = head(self.trace, stepping_requests)
        stepped = self.replay(part, page_size, stepping=True)
        same = best if part is self.trace else self.replay(part, page_size, stepping=False)
        return {
            "requests_per_s": round(len(self.trace) / best.cpu_s),
            "wall_requests_per_s": round(len(self.trace) / min(run.wall_s for run in runs)),
            "stepping_requests_per_s": round(len(part) / stepped.cpu_s),
            "stepping_requests": len(part),
            "speedup_over_stepping": round(stepped.cpu_s / same.cpu_s, 2),
            "identical": same.result == stepped.result,
            "steps": len(best.result.steps["start_us"]),
            "preemptions": int(best.result.counters["preemptions"]),
            "evictions": int(best.result.counters["evictions"]),
        }


def peak_mib() -> float:
    """The most memory that this process ever had."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024, 1)


def loaded(path: Path) -> Trace:
    return import_trace("mooncake", path, ImportOptions()) if path.suffix == ".jsonl" else read_trace(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL, or an imported trace")
    parser.add_argument("--requests", type=int, help="replay only the first ones")
    parser.add_argument("--stepping-requests", type=int, help="step only through the first ones; all without it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    arguments = parser.parse_args(argv)
    suite = tomllib.loads(SUITE.read_text())
    trace = loaded(arguments.trace)
    trace = trace if arguments.requests is None else head(trace, arguments.requests)
    bench = Bench(suite, SUITE.parent / suite["workload"]["costs"]["page512"], trace)
    before_mib = peak_mib()
    by_page: dict[str, dict[str, Any]] = {}
    stepping_requests = arguments.stepping_requests or len(trace)
    for page_size in PAGE_SIZES:
        found = bench.page_size(page_size, arguments.repeats, stepping_requests)
        by_page[str(page_size)] = found
        print(f"pages of {page_size}: {found}", file=sys.stderr)
    slowest = min(each["requests_per_s"] for each in by_page.values())
    identical = all(each["identical"] for each in by_page.values())
    document = {
        "python": platform.python_version(),
        "requests": len(trace),
        "requests_per_s": slowest,
        "wall_requests_per_s": min(each["wall_requests_per_s"] for each in by_page.values()),
        "by_page": {page_size: each["requests_per_s"] for page_size, each in by_page.items()},
        "identical": identical,
        "speedup_over_stepping": min(each["speedup_over_stepping"] for each in by_page.values()),
        "peak_mib": peak_mib(),
        "peak_mib_before": before_mib,
        "target_requests_per_s": TARGET_PER_S,
        "holds": slowest >= TARGET_PER_S and identical,
        "pages": by_page,
    }
    if arguments.json:
        print(json.dumps(document, indent=1))
    return 0 if document["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
