"""Every kernel case of the shipped suites against itself: how many leave "equivalent" or "inconclusive"?

    python benchmarks/kernel_aa.py --out FILE.json [--suites suites/*.toml] [--device cpu|cuda]

Each suite is run twice at level 1: once with the baseline in both arms, once with the candidate, in as many sessions as
the suite's first look has, through the code that `kbench kernel` calls. Both arms are told apart only by the order that
the plan draws. A case that is called faster or slower is a false alarm; one that could not be measured is listed and
counts for nothing. Exit 1 where more than 5 % of the measured cases are false alarms.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kbench.errors import KbenchError
from kbench.plan import Plan, make_plan
from kbench.report.views import kernel_view
from kbench.run.execute import execute
from kbench.run.loop import Options
from kbench.run.session import Host
from kbench.suite import load_suite

ROOT = Path(__file__).parent.parent
SUITES = ("attention", "gemm", "moe", "fusion", "sampling")
QUIET = ("equivalent", "inconclusive")
MOST = 0.05
"""The error rate of the comparison itself, two-sided."""


def inline(value: Any) -> str:
    """A TOML value on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


def against_itself(path: Path, arm: str) -> dict[str, Any]:
    """The suite's tables with `arm` of its claim ("baseline" or "candidate") as both arms, and no rule."""
    tables = tomllib.loads(path.read_text())
    name = tables["claim"][arm]
    kept = ("schema", "seed", "model", "engine", "kernel", "measure", "rule")
    found = {key: tables[key] for key in kept if key in tables}
    return {
        **found,
        "claim": {"name": f"aa-{path.stem}-{arm}", "baseline": name, "candidate": "itself"},
        "variants": {**tables["variants"], "itself": {"extends": name}},
    }


def plans(paths: list[Path], folder: Path) -> Iterator[tuple[str, str, Plan]]:
    for path in paths:
        for arm in ("baseline", "candidate"):
            file = folder / f"{path.stem}-{arm}.toml"
            tables = against_itself(path, arm)
            file.write_text("".join(f"{key} = {inline(value)}\n" for key, value in tables.items()))
            yield path.stem, arm, make_plan(load_suite(file))


def measure(plan: Plan, device: str, root: Path) -> dict[str, Any]:
    options = Options(levels=("kernel",), root=root, host=Host(device=device), exploratory=True, traced=False)
    record = execute(plan, options)
    assert record is not None
    return kernel_view(plan.loaded.suite, [record])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suites", type=Path, nargs="*")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    ending = "-h200" if options.device == "cuda" else ""
    paths = options.suites or [ROOT / "suites" / f"{name}{ending}.toml" for name in SUITES]
    cases, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for suite, arm, plan in plans(paths, Path(scratch)):
            try:
                document = measure(plan, options.device, Path(scratch) / "results")
            except KbenchError as error:
                raise SystemExit(f"{suite}, {arm}: {error}") from error
            failed = {item["case"]: item for item in document["cases"] if item["status"] != "ok"}
            for found in document["comparisons"]:
                note = failed[found["case"]]["message"] if found["case"] in failed else found["note"]
                cases.append({"suite": suite, "arm": arm, "case": found["case"], "verdict": found["verdict"],
                              "ratio": found["ratio"], "sessions": found["sessions"], "note": note})  # fmt: skip
            sys.stderr.write(f"{time.monotonic() - began:6.0f} s  {suite}, {arm} against itself\n")
    document = summary(cases, options.device, time.monotonic() - began)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(json.dumps({key: value for key, value in document.items() if key != "cases"}) + "\n")
    raise SystemExit(0 if document["holds"] else 1)


def summary(cases: list[dict[str, Any]], device: str, seconds: float) -> dict[str, Any]:
    measured = [case for case in cases if case["ratio"]["point"] is not None]
    alarms = [case for case in measured if case["verdict"] not in QUIET]
    share = len(alarms) / len(measured) if measured else None
    return {
        "schema": "kbench.kernel-aa/1",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "load": os.getloadavg()[0],
        "seconds": round(seconds, 1),
        "measured": len(measured),
        "false_alarms": len(alarms),
        "share": share,
        "unmeasured": len(cases) - len(measured),
        "holds": share is not None and share <= MOST,
        "cases": cases,
    }


if __name__ == "__main__":
    main()
