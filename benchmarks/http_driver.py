"""Does the HTTP driver keep up, and does it say so when it does not?

    python benchmarks/http_driver.py --json [--seconds 60] [--rate 500] [--chunks 8]

A mock server runs in a process of its own. Three replays of Poisson arrivals go to it in one run: `steady` at `--rate`
requests a second with answers of `--chunks` chunks; `faulty`, the same with faults injected, in which no request may be
lost; `beyond`, at a rate that no Python client holds, which must be called degraded. Exit 1 where the dispatch lag at
p99 of `steady` is above 2 ms or it is degraded, where a request is in no class or in two, or where `beyond` is not
called degraded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from kbench.measure.service import CLASSES, Limits, classify
from kbench.targets.openai.exchange import Endpoint
from kbench.targets.openai.replay import ReplayPlan, replay_http
from kbench.traces.draw import Draw
from kbench.traces.trace import RequestRow, Trace, TraceMeta, trace_from_rows

TARGET_LAG_MS = 2.0
PROMPT_TOKENS = 32
FAULTS = {"503": 0.01, "429": 0.01, "refuse": 0.01, "cut": 0.01, "garbage": 0.01, "stall": 0.005, "silent": 0.005}
BEYOND = 20
"""So many times the rate is asked of the client in the third replay."""


def poisson(rate: float, seconds: float, chunks: int, seed: int) -> Trace:
    draw, at, rows = Draw(seed, 0), 0.0, []
    while (at := at + draw.exponential() / rate) < seconds:
        rows.append(RequestRow(request_id=len(rows), session_id=len(rows), turn=0, arrival_us=round(at * 1e6),
                             input_tokens=PROMPT_TOKENS, output_tokens=chunks))  # fmt: skip
    return trace_from_rows(rows, TraceMeta("http driver", "http_driver"))


def server(*options: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "kbench", "mock-server", "--port", "0", "--max-seqs", "512", "--step-us", "5000",
               "--prefill-us", "0", "--decode-us", "0", "--max-batched-tokens", "65536", *options]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    match = re.search(r"http://\S+", process.stdout.readline())
    if match is None:
        raise SystemExit("the mock server did not start")
    return process, match[0]


def replayed(name: str, rate: float, seconds: float, chunks: int, *options: str) -> dict[str, Any]:
    trace = poisson(rate, seconds, chunks, seed=len(name))
    process, url = server(*options)
    try:
        plan = ReplayPlan(vocab=32_000, max_seconds=seconds + 1, drain_seconds=15.0)
        found = replay_http(trace, Endpoint(url, "mock", timeout_s=5.0), plan)
    finally:
        process.terminate()
        process.wait(timeout=10)
    classes = Counter(classify(request, Limits()) for request in found.result.requests)
    return {
        "replay": name,
        "requests": len(trace),
        "classes": {each: classes[each] for each in CLASSES},
        "lost": len(trace) - sum(classes[each] for each in CLASSES),
        "causes": dict(found.causes),
        "load": found.truth.facts(),
        "server": {key: value for key, value in found.counters.items() if value is not None},
    }


def missed(replays: list[dict[str, Any]]) -> list[str]:
    steady, faulty, beyond = replays
    found = []
    if steady["load"]["lag_p99_us"] is None or steady["load"]["lag_p99_us"] > TARGET_LAG_MS * 1_000:
        found.append(f"steady: dispatch lag p99 {steady['load']['lag_p99_us']} µs is above {TARGET_LAG_MS:g} ms")
    if steady["load"]["degraded"]:
        found.append("steady: degraded")
    found += [f"{each['replay']}: {each['lost']} requests in no class" for each in replays if each["lost"]]
    if steady["classes"]["good"] != steady["requests"]:
        found.append(f"steady: {steady['requests'] - steady['classes']['good']} requests did not finish")
    if not faulty["classes"]["failed"]:
        found.append("faulty: nothing failed, so nothing was tested")
    if not beyond["load"]["degraded"]:
        found.append("beyond: not called degraded")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    faults = [text for name, share in FAULTS.items() for text in ("--fault", f"{name}={share}")]
    replays = [
        replayed("steady", options.rate, options.seconds, options.chunks),
        replayed("faulty", options.rate, options.seconds, options.chunks, *faults),
        replayed("beyond", options.rate * BEYOND, min(5.0, options.seconds), options.chunks),
    ]
    document = {
        "schema": "kbench.http-driver/1",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "replays": replays,
        "missed": missed(replays),
    }
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        for each in replays:
            print(each["replay"], each["classes"], each["load"])
    for line in document["missed"]:
        sys.stderr.write(f"missed: {line}\n")
    return 1 if document["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
