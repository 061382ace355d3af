"""Render a run's level 1 as a table: graph time beside profiler time, cache state, error and clock, a case and variant.

    python benchmarks/h200_kernel_table.py results/h200/practice-h200/RUN > results/h200/kernel_practice.md

reads the run folder only; needs no GPU.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from kbench.catalog import Case
from kbench.record import RunRecord, read_run

HEAD = (
    "point",
    "variant",
    "decode",
    "graph µs",
    "alone µs",
    "profiler µs, sum",
    "graph / sum",
    "same replay: graph µs",
    "profiler µs, span",
    "graph / span",
    "distinct kernels",
    "cache",
    "rel_l2 / limit",
    "SM MHz",
    "late windows",
)
LEGEND = """
Every value is µs a call. The calls rotate over enough input sets to find K and V cold; a graph holds many of them.

- **graph**: the gate number, CUDA graph replay in the paired workers: mean over sessions of the session's median.
- **alone**: the same timer in the traced workers just before the profiler starts there. A profiler in the pair's other
  worker, or being the only context on the device, adds about 0.35 µs a graph node (seen by opening a second context).
- **profiler, sum**: durations of a call's kernels by torch.profiler, gaps between them left out.
- **same replay**: one replay read by both clocks while the profiler watches: the graph timer's events, and the span on
  the device's timeline from its first kernel's start to its last one's end. These two measure the same thing and must
  agree within 3 % or 0.3 µs. The profiler widens gaps, most where copies and memsets stand between kernels
  (sdpa-gather), so neither is the gate number.
- **late windows**: windows in which the device was free before most graphs were launched whole (LAUNCH_BOUND).
"""


@dataclass(slots=True)
class Row:
    """What a run says about one case on one variant."""

    latencies: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    late: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    sm_mhz: list[float] = field(default_factory=list)

    @property
    def graph_us(self) -> float:
        return mean(median(values) for values in self.latencies.values())

    @property
    def windows(self) -> int:
        return sum(len(values) for values in self.latencies.values())


def collect(record: RunRecord) -> dict[tuple[str, str], Row]:
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    complete = set(record.complete_sessions)
    for sample in record.samples.rows():
        if sample.level == "kernel" and sample.metric == "latency" and sample.session in complete:
            row = rows[sample.case, sample.variant]
            row.latencies[sample.session].append(sample.value)
            row.late += "LAUNCH_BOUND" in sample.flags
    for trial in record.trials:
        if trial.case.startswith("kernel/") and (trial.case, trial.variant) in rows:
            row = rows[trial.case, trial.variant]
            # The session's own graph time gives way to the traced one, which is what stands beside the profiler's.
            row.facts |= {name: value for name, value in trial.facts.items() if value is not None}
            row.sm_mhz += (trial.facts.get("device") or {}).get("sm_mhz", [])
    cases = list(dict.fromkeys(case for case, _ in rows))
    return {key: rows[key] for key in sorted(rows, key=lambda key: (cases.index(key[0]), key[1]))}


def line(case: str, variant: str, row: Row) -> tuple[str, ...]:
    facts = row.facts
    own, total, span = facts["graph_profiled_us"], facts["profiler_sum_us"], facts["profiler_span_us"]
    correct = facts["correctness"]
    return (
        Case.parse(case).point.replace("*", r"\*"),
        variant,
        facts["selection"]["resolved"],
        f"{row.graph_us:.3f}",
        f"{facts['graph_us']:.3f}",
        f"{total:.3f}",
        f"{row.graph_us / total:.3f}",
        f"{own:.3f}",
        f"{span:.3f}",
        f"{own / span:.3f}",
        str(len(facts["kernels"])),
        facts["cache"],
        f"{correct['rel_l2']:.4f} / {correct['limit']:.4f}",
        f"{min(row.sm_mhz):.0f} to {max(row.sm_mhz):.0f}",
        f"{row.late} of {row.windows}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of one run")
    record = read_run(parser.parse_args().run)
    rows = collect(record)
    sessions = len(record.complete_sessions)
    print(f"# Kernels of {record.header['suite']}, run {record.run_id}\n")
    print(f"{record.header['machine']}, {sessions} sessions. Made by")
    print(f"`python benchmarks/h200_kernel_table.py results/h200/{record.header['suite']}/{record.run_id}`.\n")
    print("| " + " | ".join(HEAD) + " |")
    print("|" + " --- |" * len(HEAD))
    for (case, variant), row in rows.items():
        print("| " + " | ".join(line(case, variant, row)) + " |")
    print(LEGEND.rstrip())


if __name__ == "__main__":
    main()
