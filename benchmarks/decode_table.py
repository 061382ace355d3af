"""Every attention decode that this machine can run, on the practice points, side by side in one process.

    python benchmarks/decode_table.py --out results/h200/decode_table.json --md results/h200/decode_table.md

Llama-3-8B shapes in bf16, pages of 16 scattered tokens. Kernels that know no pages (SDPA by backend) get keys and
values that somebody made contiguous before; what that costs is their `convert`, which stands beside. Each is verified
first on the sharpest input of the case; then windows of all of them alternate in random order, so that clocks and
temperature are the same for all. Whoever is fastest is shown as such. What is not installed or does not support a case
says so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from kbench import env
from kbench.catalog import Case, implementations
from kbench.measure.kernel import KernelTrial
from kbench.protocol import Status
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

POINTS = ("1*1@127", "1*1@4096", "32*1@127", "32*1@4096")
OP = "attention.decode"
PAGE = {True: 256, False: 16}
"""Some kernels read pages in multiples of 256 tokens only."""
ROUNDS = 15
HEAD = "| implementation | µs | range | TB/s | clock, cache | convert µs | rel-L2 / limit | flags |"
SEED = 1


def trial(name: str, page: int, point: str, device: str, preset: str, dtype: str) -> KernelTrial:
    model = ModelSettings(preset=preset, dtype=dtype)  # type: ignore[arg-type]
    arm = Arm(name=name, model=model, prefill="sdpa", decode=name, root=".", page_size=page, layout="NHD",
              engine=EngineSettings(), seed=SEED)  # fmt: skip
    return KernelTrial(Case("kernel", OP, preset, point), arm, device, Measure(window_steps=5, window_ms=10.0), SEED)


def measure(point: str, device: str, preset: str, dtype: str) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    ready: dict[str, KernelTrial] = {}
    for known in implementations(OP):
        page = PAGE[known.page_multiple_of == 256]
        own = trial(known.name, page, point, device, preset, dtype)
        outcome = own.prepare(thorough=False)
        scopes = {item.metric: item.value for item in outcome.measurements}
        rows[known.name] = {"point": point, "implementation": known.name, "page_size": page,
                            "status": outcome.status.value, "message": outcome.message,
                            "convert_us": scopes.get("convert"), "plan_us": scopes.get("plan"),
                            "correctness": outcome.facts.get("correctness"),
                            "timer": outcome.facts.get("timer"), "cache": outcome.facts.get("cache"),
                            "cost": outcome.facts.get("cost")}  # fmt: skip
        if outcome.status is Status.OK:
            ready[known.name] = own
    taken: dict[str, list[float]] = {name: [] for name in ready}
    flags: dict[str, set[str]] = {name: set() for name in ready}
    order, chance = list(ready), random.Random(SEED)
    for _ in range(ROUNDS):
        chance.shuffle(order)
        for name in order:
            [window] = ready[name].window()
            taken[name].append(window.value)
            flags[name].update(window.flags)
    for name, own in ready.items():
        finished = own.finish()
        row = rows[name] | {"flags": sorted(flags[name])}
        if finished.status is Status.OK:
            values = sorted(taken[name])
            row |= {"latency_us": median(values), "lowest_us": values[0], "highest_us": values[-1]}
            row["terabytes_per_s"] = row["cost"]["bytes"] / row["latency_us"] / 1e6
        else:
            row |= {"status": finished.status.value, "message": finished.message}
        rows[name] = row
    return list(rows.values())


def table(document: dict[str, Any]) -> str:
    lines = [
        "# Attention decode, everything that ran here",
        "",
        f"{document['device']}, {document['preset']} shapes, {document['dtype']}, made {document['made']} by",
        "`python benchmarks/decode_table.py`. Fastest first; µs a call by the clock named, median and range of",
        f"{ROUNDS} windows that alternate with all others'. `convert` is what a kernel needs done before it can start",
        "and is no part of its latency: for SDPA, copying scattered pages into contiguous keys and values.",
    ]
    for point in document["points"]:
        rows = [row for row in document["rows"] if row["point"] == point]
        timed = sorted((row for row in rows if "latency_us" in row), key=lambda row: row["latency_us"])
        lines += ["", f"## {point}", "", HEAD, "| --- " * HEAD.count(" | ") + "| --- |"]
        for row in timed:
            right = row["correctness"]
            lines.append(
                f"| {row['implementation']} (page {row['page_size']}) | {row['latency_us']:.2f} "
                f"| {row['lowest_us']:.2f} to {row['highest_us']:.2f} | {row['terabytes_per_s']:.2f} "
                f"| {row['timer']}, {row['cache']} | {row['convert_us']:.0f} "
                f"| {right['rel_l2']:.4f} / {right['limit']:.4f} | {', '.join(row['flags'])} |"
            )
        others = [
            f"{row['implementation']}: {row['status']}, {row['message'][:160]}" for row in rows if row not in timed
        ]
        lines += ["", "Not timed: " + ("; ".join(others) or "none") + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--md", type=Path)
    parser.add_argument("--points", nargs="*", default=list(POINTS))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--preset", default="llama-3-8b")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for point in options.points:
        rows += measure(point, options.device, options.preset, options.dtype)
        sys.stderr.write(f"{point}: {sum('latency_us' in row for row in rows)} timed so far\n")
    gpus = env.gpus() if options.device == "cuda" else []
    document = {
        "schema": "kbench.decode-table/1",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": gpus[0]["name"] if gpus else options.device,
        "preset": options.preset,
        "dtype": options.dtype,
        "points": options.points,
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    if options.md:
        options.md.write_text(table(document))


if __name__ == "__main__":
    main()
