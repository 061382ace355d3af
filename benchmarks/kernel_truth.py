"""Are kernel times true? kbench's timers and other people's against the profiler, from 1 µs to 10 ms, in one run.

    python benchmarks/kernel_truth.py --out kernel_truth.json --md kernel_truth.md [--only NAME …]

needs a CUDA device. Exit 1 where the criterion is missed (kbench within 3 % or 0.3 µs of profiler kernel time on every
case, and never further off than the best other tool by more than max(0.5 %, 0.1 µs)), 2 without a device. The files are
written anew after every case: what was measured when something broke is kept.

A profiler may leave every later graph node of a process some tenths of a µs longer, so short kernels are read before
the first profile (pass A). Long ones run at a clock that the power cap moves: they are read between two profiles, round
by round, each reading after the device was kept busy (pass B). What a graph node takes alone, beside the child process
that holds a second context, before and after profiling, is in `facts`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernel_truth_cases import CASES
from kernel_truth_lab import FLUSH_BYTES, LONG_US, SETTLE_MS, STATES, WINDOW_CALLS, WINDOW_MS, Lab, Row
from kernel_truth_table import REFERENCES, criterion, markdown, with_reference, without_gaps, worst
from kernel_truth_tools import NVBENCH_STATES, nvbench

from kbench.clock.cache import last_level_bytes

COOL_S = 5.0
HOLDER = """
import sys, torch
held = torch.zeros(1, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


# ------------------------------------------------------------------------------------------------ document


def document(lab: Lab, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Every row with a profile and a reading, judged against the chosen reference; verdicts by the others beside it."""
    kept = [_row(row) for row in lab.rows.values() if row.profiles and any(row.readings.values())]
    every = {state: [us for row in kept if row["state"] == state for us in row["calibration"]] for state in STATES}
    kept = [
        without_gaps(row, row["calibration"] or every[row["state"]], lab.calibrator_us.get(row["state"]))
        for row in kept
    ]
    judged = with_reference(kept, settings["reference"])
    order = {name: place for place, name in enumerate(CASES)}
    judged.sort(key=lambda row: (order.get(row["kernel"], 0), STATES.index(row["state"])))
    return {
        "environment": dict(environment),
        "settings": dict(settings),
        "facts": lab.facts,
        "absent": lab.absent,
        "problems": lab.problems,
        "criterion": criterion(judged),
        "criterion_by": {kind: criterion(with_reference(kept, kind)) for kind in REFERENCES},
        "worst": worst(judged),
        "rows": judged,
        "not_yet_profiled": {f"{kernel}, {state}": row.readings for (kernel, state), row in lab.rows.items()}
        if not judged
        else {},
    }


def _row(row: Row) -> dict[str, Any]:
    last = row.profiles[-1]
    clocks = [reading["sm_mhz"] for readings in row.readings.values() for reading in readings if reading["sm_mhz"]]
    return {
        "kernel": row.kernel,
        "state": row.state,
        "label": row.plan.label,
        "timer": row.timer,
        "read": row.phase,
        "sets": row.plan.sets if row.state == "cold" else 1,
        "flags": sorted(row.flags),
        "kernels": last.kernels,
        "kernel_names": list(last.names[:6]),
        "profiler_sum_us": median(profile.sum_us for profile in row.profiles),
        "profiler_span_us": median(profile.span_us for profile in row.profiles),
        "gap_us": median(profile.gap_us for profile in row.profiles),
        "profiler_period_us": median(profile.period_us for profile in row.profiles),
        "kbench_same_replay_us": median(profile.timer_us for profile in row.profiles),
        "sm_mhz": median(clocks) if clocks else 0.0,
        "profiled": [{"sum": profile.sum_us, "span": profile.span_us} for profile in row.profiles],
        "readings": row.readings,
        "calibration": row.calibration,
    }


def save(document: Mapping[str, Any], out: Path | None, md: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if md is not None:
        md.write_text(markdown(document))


def environment(device: torch.device) -> dict[str, Any]:
    import triton

    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "Python": sys.version.split()[0],
        "L2 MiB": last_level_bytes(device) >> 20,
        "CUDA contexts": 2,
    }
    return facts


# ---------------------------------------------------------------------------------------------------- run


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--md", type=Path, help="Markdown file")
    parser.add_argument("--only", action="append", choices=sorted(CASES), help="this kernel (again for more)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further case is started")
    parser.add_argument("--reference", choices=REFERENCES, default="bracket", help="profiler time of several kernels")
    parser.add_argument("--skip-nvbench", action="store_true")
    return parser.parse_args(argv)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "reference": args.reference,
        "rounds": args.rounds,
        "seed": args.seed,
        "flush_mib": FLUSH_BYTES >> 20,
        "window": [WINDOW_CALLS, WINDOW_MS],
        "long_us": LONG_US,
        "settle_ms": SETTLE_MS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print("kernel_truth: no CUDA device", file=sys.stderr)
        return 2
    device, names = torch.device("cuda"), args.only or list(CASES)
    chosen = settings(args)
    lab = Lab(device, args.rounds, args.seed, time.monotonic() + args.budget)

    def keep() -> None:
        save(document(lab, chosen, environment(device)), args.out, args.md)

    lab.fact("node_us_alone", lab.node_us)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        lab.facts["second_context"] = holder.stdout.readline().strip() or "failed"
        lab.fact("node_us_two_contexts", lab.node_us)
        found: dict[str, dict[str, float]] = {}
        if not args.skip_nvbench:
            found, lab.absent["nvbench"] = nvbench(names)
            if not lab.absent["nvbench"]:
                del lab.absent["nvbench"]
        time.sleep(COOL_S)  # whatever ran before has heated the device
        lab.fact("calibrators", lab.calibrate)
        lab.each(names, lab.undisturbed, keep)
        lab.fact("node_us_before_profiles", lab.node_us)
        lab.fact("calibrators_profiled", lab.profile_calibrators)

        def add_nvbench() -> None:
            for kernel, tools in found.items():
                for tool, us in tools.items():
                    row = lab.rows.get((kernel, NVBENCH_STATES[tool]))
                    if row is not None:
                        row.readings[tool] = [{"us": us, "sm_mhz": 0.0}]
            keep()

        lab.each(names, lab.profiled, add_nvbench)
        lab.fact("node_us_after_profiles", lab.node_us)
    finally:
        holder.terminate()
        holder.wait()
    keep()
    final = document(lab, chosen, environment(device))
    print(markdown(final))
    return 0 if final["criterion"]["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
