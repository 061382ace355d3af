"""A worker without torch: speaks the real protocol, measures nothing, and fails where it is told to.

KBENCH_FAKE is `FAULT@OP:NTH[:VARIANT]`: at the NTH request OP (from 0) of that variant: crash, kill-parent, hang, torn,
garbage. A marker file beside the fault makes it happen once in a test.

KBENCH_FAKE_SPREAD names a folder in which workers count themselves: each session of each arm is then as slow as its
number says, so that sessions differ (and always in the same way).

KBENCH_FAKE_FACTOR is `VARIANT=FACTOR`: that arm takes so many times as long.
KBENCH_FAKE_SELECTION is JSON, variant → the fact `selection` of its trials.
KBENCH_FAKE_STATUS is `VARIANT=STATUS`: its trials end so when they are prepared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import BinaryIO

from kbench.protocol import Measurement, Outcome, Reply, Request, Status, decode_request, encode


def spread(name: str) -> float:
    """KBENCH_FAKE_FACTOR of this arm, else 1; with KBENCH_FAKE_SPREAD times a factor of this session of this arm."""
    arm, _, factor = os.environ.get("KBENCH_FAKE_FACTOR", "").partition("=")
    own = float(factor) if arm == name else 1.0
    folder = os.environ.get("KBENCH_FAKE_SPREAD")
    if not folder:
        return own
    earlier = len(list(Path(folder).glob(f"{name}-*")))
    (Path(folder) / f"{name}-{earlier}").touch()
    return own + 0.1 * (earlier * (3 if name == "b" else 2) % 5)


def outcome_of(request: Request, windows: int, factor: float, name: str) -> Outcome:
    case = str(request.args.get("case", ""))
    arm, _, status = os.environ.get("KBENCH_FAKE_STATUS", "").partition("=")
    if request.op == "prepare" and arm == name:
        return Outcome(Status(status), "the fake was told to")
    if request.op in ("prepare", "trace") and (chosen := json.loads(os.environ.get("KBENCH_FAKE_SELECTION", "{}"))):
        return Outcome(facts={"op": request.op, "selection": chosen.get(name, {})})
    if request.op == "prepare" and "1*1@7" in case:
        return Outcome(Status.UNSUPPORTED, "the fake does not do seven")
    if request.op == "window":
        metric = "latency" if case.startswith("kernel") else "step_time"
        return Outcome(measurements=(Measurement(metric, "us", factor * (100.0 + windows)),))
    if request.op == "finish":
        return Outcome(measurements=(Measurement("closure", "ratio", 1.0),), facts={"seen": windows})
    return Outcome(facts={"op": request.op})


def misbehave(fault: str, replies: BinaryIO) -> None:
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "kill-parent":
        os.kill(os.getppid(), signal.SIGKILL)
    elif fault == "torn":
        replies.write(b'{"seq": 1, "outc')
        replies.flush()
        os._exit(3)
    elif fault == "garbage":
        replies.write(b"not json\n")
        replies.flush()
        return
    # A hang is a read from a pipe that nobody writes to.
    os.read(os.pipe()[0], 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--read-fd", type=int, required=True)
    parser.add_argument("--write-fd", type=int, required=True)
    options = parser.parse_args()
    plan, _, marker = os.environ.get("KBENCH_FAKE", "").partition("|")
    fault, _, place = plan.partition("@")
    op, nth, variant = [*place.split(":"), "", ""][:3] if place else ("", "-1", "")
    counts: dict[str, int] = {}
    name, factor = "", 1.0
    with os.fdopen(options.read_fd, "rb") as requests, os.fdopen(options.write_fd, "wb") as replies:
        for line in requests:
            request = decode_request(line)
            if request.op == "close":
                return
            if request.op == "open":
                name = str(request.args["arm"]["name"])
                factor = spread(name)
            seen = counts.get(request.op, 0)
            counts[request.op] = seen + 1
            due = request.op == op and seen == int(nth) and variant in ("", name) and not Path(marker).exists()
            if due:
                Path(marker).touch()
                misbehave(fault, replies)
            replies.write(encode(Reply(request.seq, outcome_of(request, counts.get("window", 0), factor, name))))
            replies.flush()


if __name__ == "__main__":
    main()
