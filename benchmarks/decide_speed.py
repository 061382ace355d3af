"""How long deciding takes: a million samples in one regime, and a hundred regimes with a step and a workload clause.

    python benchmarks/decide_speed.py --json > results/cpu/decide_speed.json

Exit 1 where a million samples take more than 2 s or a hundred regimes more than 1 s. Reading is not included; grouping
the samples is.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from error_rates import Scenario, records, suite_of

from kbench.decide import Evidence, decide
from kbench.record import RunRecord
from kbench.suite.schema import Suite

LIMITS_S = {"million_samples": 2.0, "hundred_regimes": 1.0}
CASES = {
    "million_samples": Scenario("speed", "shared", 0.1, regimes=250, sessions=12, blocks=84, looks=(6, 8, 12)),
    "hundred_regimes": Scenario("speed", "shared", 0.021, goodput="step", regimes=100, sessions=8, blocks=12),
}


def prepared(name: str) -> tuple[Suite, list[RunRecord]]:
    scenario = CASES[name]
    [runs] = records(scenario, 1.0 - scenario.saving, np.random.default_rng(1), 1)
    suite = suite_of(scenario)
    if name == "million_samples":
        every = [point for regime in suite.regime for point in regime.points]
        one = suite.regime[0].model_copy(update={"points": tuple(every)})
        suite = suite.model_copy(update={"regime": (one,)})
    return suite, runs


def timed(suite: Suite, runs: Sequence[RunRecord], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        decide(suite, Evidence.of(runs))
        seconds.append(time.perf_counter() - begun)
    return seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    arguments = parser.parse_args(argv)
    document: dict[str, Any] = {"python": platform.python_version(), "numpy": np.__version__}
    holds = True
    for name, limit_s in LIMITS_S.items():
        suite, runs = prepared(name)
        seconds = timed(suite, runs, arguments.repeats)
        document[name] = {
            "samples": sum(len(run.samples) for run in runs),
            "regimes": len(suite.regime),
            "first_s": round(seconds[0], 3),
            "best_s": round(min(seconds), 3),
            "limit_s": limit_s,
            "holds": seconds[0] <= limit_s,
        }
        holds = holds and seconds[0] <= limit_s
        print(f"{name}: first {seconds[0]:.2f} s, best {min(seconds):.2f} s, limit {limit_s} s", file=sys.stderr)
    if arguments.json:
        print(json.dumps(document, indent=1))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
