"""Measure the cost grid of every variant of a suite, one file a variant: what virtual replay takes step times from.

    python benchmarks/h200_costs.py suites/mooncake.toml --out suites/costs --tag h200

writes OUT/MODEL-VARIANT-TAG.parquet. Each variant is measured in a process of its own, on an idle device. The suite
need not find its grids or traces yet: this is what makes them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from kbench.catalog import model_shape, parse_point
from kbench.engine.costs import CostTable, default_grid
from kbench.suite.checks import arm_of
from kbench.suite.schema import Suite

DECODES = (
    (8, (1_000, 4_000, 12_000, 24_000)),
    (32, (1_000, 4_000, 12_000, 21_000)),
    (48, (4_000, 12_000, 14_500)),
    (128, (1_000, 4_000)),
)
"""Sequences and contexts. Together they may hold more than the pool, since sequences share pages."""
CHUNKS = ((512, (512, 16_384)), (2_048, (2_048, 16_384)), (4_096, (4_096, 16_384, 65_536)))
MIXED = (
    ((16, 12_000), (8_176, 12_000)),
    ((32, 12_000), (8_160, 24_000)),
    ((48, 12_000), (4_096, 8_192)),
    ((16, 12_000), (1_024, 16_384)),
)
"""Decodes (sequences, context) beside one chunk (tokens, context)."""


def points(suite: Suite, room: int) -> list[str]:
    """The default grid of the suite's limits, and more of it where long prompts are served: the middle of each axis."""
    engine = suite.engine
    longest = model_shape(suite.model.preset or "").max_context
    found = default_grid(engine.max_batched_tokens, engine.max_seqs, longest, room)
    found += [f"{n}*1@{kv}" for n, contexts in DECODES for kv in contexts]
    found += [f"1*{chunk}@{kv}" for chunk, lengths in CHUNKS for kv in lengths]
    found += [f"{n}*1@{kv}+1*{chunk}@{end}" for (n, kv), (chunk, end) in MIXED]
    return list(dict.fromkeys(str(parse_point(point)) for point in found))


def measure(suite: Suite, root: Path, variant: str, room: int, repeats: int, target: Path) -> None:
    from kbench.measure.costs import measure_costs

    began = time.monotonic()
    rows = measure_costs(arm_of(suite, variant, root), "cuda", points(suite, room), repeats, suite.seed)
    table = CostTable.fit(rows)
    table.write_parquet(target)
    error = table.hold_out()
    print(
        f"{target.name}: {table.points} points, {time.monotonic() - began:.0f} s; left-out points: median error "
        f"{error.median:.1%}, worst {error.worst:.1%}; inside {error.inside_median:.1%}, {error.inside_worst:.1%}"
    )


def read_suite(path: Path) -> Suite:
    """The suite without its cost grids, which may not exist yet."""
    data = tomllib.loads(path.read_text())
    data.get("workload", {}).pop("costs", None)
    return Suite.model_validate_json(json.dumps(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tag", default="h200")
    parser.add_argument("--room", type=int, default=600_000, help="most KV tokens of one point of the default grid")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--variant", default="", help="this one only, in this process")
    options = parser.parse_args()
    suite = read_suite(options.suite)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.variant:
        target = options.out / f"{suite.model.preset}-{options.variant}-{options.tag}.parquet"
        measure(suite, options.suite.parent, options.variant, options.room, options.repeats, target)
        return
    for variant in (suite.claim.baseline, suite.claim.candidate):
        subprocess.run([sys.executable, *sys.argv, "--variant", variant], check=True)


if __name__ == "__main__":
    main()
