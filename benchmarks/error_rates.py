"""How often the rule is wrong: whole simulated gates through `kbench.decide.decide`, not a copy of its formulas.

    python benchmarks/error_rates.py --json --gates 1000 [--seed S] [--processes 2] > results/cpu/error_rates.json

Every gate is a suite of regimes with one step cell and one trace class each, and a run record with invented windows and
segments whose true difference is known (`gate_noise.py`).
Exit 1 where a figure, over all noise profiles together,
misses its limit, or where one profile by itself is beyond what a rule with the claimed rate could show by chance.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gate_noise import PROFILES, Profile, goodput, scale_for, step_log_times

from kbench.decide import Evidence, Verdict, decide
from kbench.record import RunRecord, SampleTable, SessionMark, Trial
from kbench.stats import family_error
from kbench.suite.schema import Suite

THRESHOLD, MARGIN, REGIMES, ALPHA = 0.02, 0.05, 6, 0.05
CHUNK = 20
"""Gates a task simulates at once; the random numbers of a chunk depend on nothing but the seed and its number."""
PLAN_HASHES = 16
"""Different plan hashes, so that no figure hangs on one draw of the bootstrap's resamples."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is true of every gate, and what counts: gates (or with `each`, regimes) that end `enable`."""

    name: str
    profile: str
    saving: float = 0.0
    step: bool = True
    goodput: str = "none"
    """`none`: no clause; `step`: the queue feels the step's saving; `margin`: truly at the margin."""
    regimes: int = REGIMES
    sessions: int = 8
    blocks: int = 12
    segments: int = 20
    looks: tuple[int, ...] = (8,)
    offset_sd: float = 0.003
    reruns: int = 1
    """Runs of `sessions` each, pooled; a gate counts where it would have been enabled after any of them."""
    each: bool = False


def scenarios() -> Iterator[Scenario]:
    """Of a regime at its boundary one clause is: with two, or with one that may fail by chance, fewer gates enable."""
    for profile in PROFILES:
        yield Scenario("aa", profile, goodput="step")
        yield Scenario("boundary", profile, saving=THRESHOLD)
        yield Scenario("boundary_looks", profile, THRESHOLD, sessions=12, looks=(6, 8, 12))
        yield Scenario("boundary_goodput", profile, saving=0.10, goodput="margin")
        yield Scenario("ni", profile, step=False, goodput="margin", regimes=1)
    yield Scenario("power", "shared", saving=THRESHOLD + 0.02, goodput="step", each=True)
    yield Scenario("power_looks", "shared", THRESHOLD + 0.02, goodput="step", sessions=12, looks=(6, 8, 12), each=True)
    yield Scenario("power_quiet", "quiet", saving=THRESHOLD + 0.02, goodput="step", each=True)
    yield Scenario("ni_long", "shared", step=False, goodput="margin", regimes=1, segments=60)
    yield Scenario("rerun", "shared", saving=THRESHOLD, regimes=1, sessions=6, looks=(6, 8, 12), reruns=8)
    yield Scenario("rerun_goodput", "shared", step=False, goodput="margin", regimes=1, sessions=2, looks=(2,), reruns=8)


LIMITS = {  # scenario → (the true rate that is claimed, the largest share of gates, of power the least)
    "aa": (0.000355, 0.001),
    "boundary": (ALPHA, 0.061),
    "boundary_looks": (ALPHA, 0.061),
    "boundary_goodput": (ALPHA, 0.061),
    "ni": (0.06, 0.06),
    "ni_long": (0.06, 0.06),
    "rerun": (0.08, 0.08),
    "rerun_goodput": (0.08, 0.08),
    "power": (0.95, 0.95),
}
FIGURES = {
    "aa_enabled": "aa",
    "boundary_enabled": "boundary",
    "boundary_looks_enabled": "boundary_looks",
    "boundary_goodput_enabled": "boundary_goodput",
    "power": "power",
    "ni_false_accept": "ni",
    "ni_long_false_accept": "ni_long",
    "rerun_enabled": "rerun",
    "rerun_goodput_enabled": "rerun_goodput",
}


def suite_of(scenario: Scenario) -> Suite:
    step = {"level": "step", "metric": "step_time", "test": "superiority", "min_saving": THRESHOLD}
    replayed = {"level": "workload", "metric": "goodput", "test": "noninferiority", "margin": MARGIN, "mode": "exec"}
    clauses = [step] * scenario.step + [replayed] * (scenario.goodput != "none")
    points = [_point(regime) for regime in range(scenario.regimes)]
    document = {
        "schema": "kbench.suite/1",
        "claim": {"name": "simulated", "baseline": "old", "candidate": "new"},
        "model": {"preset": "tiny"},
        "variants": {"old": {"page_size": 16}, "new": {"page_size": 64}},
        "step": {"points": points},
        "workload": {
            "traces": {f"class{regime}": f"{regime}.parquet" for regime in range(scenario.regimes)},
            "segments": scenario.segments,
        },
        "rule": {"alpha": ALPHA, "looks": list(scenario.looks), "policy": {"stop": "never"}},
        "regime": [
            {"id": f"r{regime}", "trace_class": [f"class{regime}"], "points": [point], "require": clauses}
            for regime, point in enumerate(points)
        ],
    }
    return Suite.model_validate_json(json.dumps(document))


def _point(regime: int) -> str:
    return f"{regime + 1}*1@1024"


def records(scenario: Scenario, scale: float, rng: np.random.Generator, gates: int) -> Iterator[list[RunRecord]]:
    """The runs of each gate: one, or as many as it is rerun."""
    profile = PROFILES[scenario.profile]
    layout, count = _layout(scenario), scenario.regimes * scenario.sessions
    rows = gates * scenario.reruns * count
    times, candidate = step_log_times(rng, profile, rows, scenario.blocks, scenario.saving, scenario.offset_sd)
    per_run = count * scenario.blocks * 4
    values = 1000.0 * np.exp(times).reshape(gates, scenario.reruns, per_run)
    arms = candidate.astype(np.int32).reshape(gates, scenario.reruns, per_run)
    shares = _shares(scenario, profile, scale, rng, gates)
    for gate in range(gates):
        runs = []
        for run in range(scenario.reruns):
            variant = np.concatenate([arms[gate, run], layout.codes["variant"][per_run:]])
            value = np.concatenate([values[gate, run], shares[gate, run]])
            table = replace(layout, codes={**layout.codes, "variant": variant}, value=value)
            header = {"run": f"run{run}", "plan_hash": f"plan{gate % PLAN_HASHES}"}
            marks = tuple(SessionMark(session, True) for session in range(scenario.sessions))
            runs.append(RunRecord(Path(f"run{run}"), header, table, _trials(scenario), marks, closed=True))
        yield runs


def _shares(
    scenario: Scenario, profile: Profile, scale: float, rng: np.random.Generator, gates: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Goodput rows of every gate and run: regime by segment of the candidate, then of the baseline."""
    size = 2 * scenario.regimes * scenario.segments
    if scenario.goodput == "none":
        return np.empty((gates, scenario.reruns, 0))
    found = np.empty((gates, scenario.reruns, size))
    for gate in range(gates):
        arms = goodput(rng, profile, scenario.regimes, scenario.segments, scale, scenario.reruns)
        found[gate] = np.stack(arms, axis=1).reshape(scenario.reruns, size)
    return found


def _layout(scenario: Scenario) -> SampleTable:
    """Everything of a run's table but the numbers, and which window is whose."""
    regimes, sessions, blocks = scenario.regimes, scenario.sessions, scenario.blocks
    regime, session, block, position = np.indices((regimes, sessions, blocks, 4), dtype=np.int64).reshape(4, -1)
    arm, klass, segment = np.indices((2, regimes, scenario.segments), dtype=np.int64).reshape(3, -1)
    if scenario.goodput == "none":
        arm, klass, segment = arm[:0], klass[:0], segment[:0]
    steps, shares = len(regime), len(arm)
    window = np.arange(steps + shares) < steps
    zero = np.zeros(steps + shares, np.int64)

    def column(of_steps: Any, of_shares: Any) -> Any:
        return np.concatenate([np.broadcast_to(of_steps, steps), np.broadcast_to(of_shares, shares)])

    replayed = np.where(window, 0, 1).astype(np.int32)
    same = zero.astype(np.int32)
    codes = dict.fromkeys(("clock", "flags", "unit"), same) | {
        "case": column(regime, regimes + klass).astype(np.int32),
        "variant": column(0, 1 - arm).astype(np.int32),
        **dict.fromkeys(("level", "metric", "scope", "mode"), replayed),
    }
    cases = [f"step/step/tiny/{_point(number)}" for number in range(regimes)]
    cases += [f"workload/replay/tiny/class{number}" for number in range(regimes)]
    values = {name: [""] for name in ("clock", "flags", "unit")} | {
        "case": cases,
        "variant": ["old", "new"],
        "level": ["step", "workload"],
        "metric": ["step_time", "goodput"],
        "scope": ["window", "segment"],
        "mode": ["", "exec"],
    }
    whole = {
        "session": column(session, 0),
        "block": column(block, 0),
        "position": column(position, 0),
        "segment": column(0, segment),
    }
    return SampleTable(codes, values, whole, np.empty(0))


def _trials(scenario: Scenario) -> tuple[Trial, ...]:
    cases = [f"step/step/tiny/{_point(number)}" for number in range(scenario.regimes)]
    cases += [f"workload/replay/tiny/class{number};mode=exec" for number in range(scenario.regimes)]
    return tuple(Trial(0, case, variant, "ok") for case in cases for variant in ("old", "new"))


def simulate(scenario: Scenario, scale: float, seed: int, chunk: int, gates: int) -> tuple[int, int]:
    """(enabled, judged) of one chunk."""
    key = zlib.crc32(f"{scenario.name}/{scenario.profile}".encode())
    rng = np.random.default_rng([seed, key, chunk])
    suite = suite_of(scenario)
    enabled = 0
    for runs in records(scenario, scale, rng, gates):
        counts = []
        for have in range(1, len(runs) + 1):
            decision = decide(suite, Evidence.of(runs[:have]))
            counts.append(sum(regime.verdict is Verdict.ENABLE for regime in decision.regimes))
            if counts[-1]:
                break
        enabled += max(counts) if scenario.each else int(max(counts) > 0)
    return enabled, gates * (scenario.regimes if scenario.each else 1)


def measure(scenario: Scenario, gates: int, seed: int, pool: ProcessPoolExecutor | None) -> dict[str, Any]:
    """One row of the table."""
    begun = time.perf_counter()
    if scenario.goodput == "margin":
        scale = scale_for(PROFILES[scenario.profile], -MARGIN, scenario.segments)
    else:
        scale = 1.0 - scenario.saving
    wanted = math.ceil(gates / scenario.regimes) if scenario.each else gates
    sizes = [min(CHUNK, wanted - begin) for begin in range(0, wanted, CHUNK)]
    arguments = [(scenario, scale, seed, chunk, size) for chunk, size in enumerate(sizes)]
    if pool is None:
        parts = [simulate(*item) for item in arguments]
    else:
        parts = list(pool.map(simulate, *zip(*arguments, strict=True)))
    k, n = (sum(part[place] for part in parts) for place in (0, 1))
    row = {"k": k, "n": n, "rate": k / n, **asdict(scenario), "service_scale": scale}
    if scenario.name in LIMITS:
        row |= limited(scenario.name, k, n, certainty=0.999, literal=False)
    return {**row, "seconds": round(time.perf_counter() - begun, 1)}


def limited(name: str, k: int, n: int, *, certainty: float = 0.95, literal: bool = True) -> dict[str, Any]:
    """The limit on k for this n, and whether it holds.

    `literal`: from a thousand gates on it is the stated share. Fewer gates scatter more, and so does one profile of
    several: there k may be what a rule that truly has the claimed rate does not exceed (or as power, fall short of)
    with this `certainty`. Of A/A gates, 1 in 1,000 is such a limit (95 %) for a true rate of 0.36 in 1,000.
    """
    from scipy.special import bdtr

    claimed, stated = LIMITS[name]
    power = name == "power"
    if literal and n >= 1_000:
        limit = math.ceil(stated * n) if power else math.floor(stated * n + 1e-9)
    elif power:
        limit = next(count for count in range(n + 1) if bdtr(count, n, claimed) >= 1.0 - certainty)
    else:
        limit = next(count for count in range(n + 1) if bdtr(count, n, claimed) >= certainty)
    return {"limit_k": limit, "holds": k >= limit if power else k <= limit}


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each figure over all its profiles together, beside the worst of them."""
    figures: dict[str, Any] = {}
    for figure, name in FIGURES.items():
        own = [row for row in rows if row["name"] == name]
        if not own:
            continue
        worst = (min if name == "power" else max)(own, key=lambda row: row["rate"])
        k, n = sum(row["k"] for row in own), sum(row["n"] for row in own)
        figures[figure] = {
            "k": k,
            "n": n,
            "rate": k / n,
            **limited(name, k, n),
            "profiles": [row["profile"] for row in own],
            "worst": {key: worst[key] for key in ("profile", "k", "n", "rate")},
            "seconds": round(sum(row["seconds"] for row in own), 1),
        }
    return figures


def report(rows: list[dict[str, Any]], arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The figures, then every row that they come from."""
    figures = figures_of(rows)
    return {
        **figures,
        "holds": all(item.get("holds", True) for item in (*figures.values(), *rows)),
        "settings": {
            "gates": arguments.gates,
            "seed": arguments.seed,
            "threshold": THRESHOLD,
            "margin": MARGIN,
            "alpha": ALPHA,
            "profiles": {name: asdict(profile) for name, profile in PROFILES.items()},
            "declared_family_error": family_error(REGIMES, 20, ALPHA),
        },
        "python": platform.python_version(),
        "numpy": np.__version__,
        "seconds": round(seconds, 1),
        "rows": rows,
    }


def _say(name: str, item: dict[str, Any]) -> None:
    """One line of progress or result, on standard error: standard output is for JSON."""
    limit = f", limit {item['limit_k']}" if "limit_k" in item else ""
    mark = "" if item.get("holds", True) else "  MISSED"
    print(
        f"{name} {item['k']:5d} of {item['n']}  {item['rate']:.4f}{limit}  {item['seconds']:.1f} s{mark}",
        file=sys.stderr,
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=1_000, help="simulated gates a scenario and profile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, choices=range(1, 65), metavar="N")
    parser.add_argument("--only", action="append", metavar="NAME", help="this scenario only (repeatable)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    arguments = parser.parse_args(argv)
    wanted = [scenario for scenario in scenarios() if not arguments.only or scenario.name in arguments.only]
    begun = time.perf_counter()
    pool = None
    if arguments.processes > 1:
        pool = ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn"))
    rows = []
    for scenario in wanted:
        rows.append(row := measure(scenario, arguments.gates, arguments.seed, pool))
        _say(f"{row['name']:20s} {row['profile']:8s}", row)
    if pool is not None:
        pool.shutdown()
    document = report(rows, arguments, time.perf_counter() - begun)
    for name in FIGURES:
        if name in document:
            _say(f"{name:29s}", document[name])
    if arguments.json:
        print(json.dumps(document, indent=1))
    return 0 if document["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
