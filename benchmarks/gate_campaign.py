"""Quick gates on a real engine, hundreds of them: how often they cry wolf, and what they find.

    python benchmarks/gate_campaign.py --state DIR          run, or go on where it was ended (at any time, by anything)
    python benchmarks/gate_campaign.py --state DIR --json   the summary so far; exit 1 where a figure is missed

One small step case (gate_campaign.toml) on the CPU. In random order, all in the same hours: A/A gates, gates of a
planted saving, gates of a planted slow-down; beside every second A/A gate the layout that people use without a tool
("all A, then all B", as many windows), judged by Mann–Whitney and Welch over windows and as benchstat would over ten
counts.
Every gate goes through `run.gate.gate`, what `kbench step --gate` calls, with workers spawned afresh for every session;
only the traced pass is left out. What is planted are real copies inside the attention of one arm, never a sleep: how
many of them make 2 and 3 % is measured at the start. The noise card is calibrated at the start and anew after every
`REFRESH` gates: an error rate of 5 % holds over cards and gates, and one card of 16 sessions may be 20 % off.

State is one append-only file of JSON lines; a torn last line is forgotten. Nothing in this file, the suite, or kbench
may change once a campaign has begun: the state holds their hashes, and others are refused.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kbench.decide import Evidence
from kbench.decide.estimate import Unusable, log_interval, session_log_ratios
from kbench.decide.evidence import cell_of
from kbench.errors import KbenchError
from kbench.hashing import sha256_of, sha256_of_file
from kbench.plan import Plan, make_plan
from kbench.protocol import Status
from kbench.run.calibrate import calibrate
from kbench.run.execute import execute_apart
from kbench.run.gate import gate
from kbench.run.loop import Options
from kbench.run.session import Host, open_pair
from kbench.suite import load_suite

HERE = Path(__file__).parent
SUITE = HERE / "gate_campaign.toml"
SEED = 20_261_201
GATES = {"aa": 200, "saving": 40, "slowdown": 40}
TARGETS = {"saving": 0.03, "slowdown": 0.02}
"""What is planted: this share of the step's time is saved, or added."""
REFRESH = 56
"""Gates of any kind that one noise card serves."""
BESIDE_EVERY = 2
"""The sequential layout is taken beside every second A/A gate: its rate is far from any doubt at 100."""
PLANT_SESSIONS = 32
"""Sessions of every measurement of a planted copy."""
PLANT_TOLERANCE = 0.002
"""About two standard errors of such a measurement."""
PLANT_ROUNDS = 4
FIRST_COPIES = 16
"""Many small copies rather than a large one, whose speed depends on where its memory happens to lie (a session sd of
1.5 % instead of 0.9 % in a pilot)."""
COUNTS = 10
"""`go test -count=10`, what benchstat is usually given."""
ALPHA = 0.05
ERRORS_IN_A_ROW = 5
FALSE_ALARMS = {"of": 40, "most": 4}
FIGURES = {"aa": (200, 16), "saving": (40, 36), "slowdown": (40, 36)}

PLANT = """# {copies} copies of 1,024 elements beside the same attention.
import torch
from kbench.kernels.sdpa import SdpaGatherDecode


class Slower(SdpaGatherDecode):
    name = "slower"

    def __init__(self):
        self._source = torch.ones(1024)
        self._copy = torch.empty_like(self._source)

    def run(self, q, kv, plan, out):
        for _ in range({copies}):
            self._copy.copy_(self._source)
        return super().run(q, kv, plan, out)
"""


# ------------------------------------------------------------------------------------------- state


class State:
    """The append-only file. A record is on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records: list[dict[str, Any]] = read_state(path)

    def append(self, kind: str, **body: Any) -> None:
        record = {"kind": kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), **body}
        whole = self._path.read_bytes() if self._path.exists() else b""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.seek(whole.rfind(b"\n") + 1)
            file.truncate()
            file.write(json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]


def read_state(path: Path) -> list[dict[str, Any]]:
    """All whole lines; what follows the last newline was being written when the campaign was ended."""
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def schedule(gates: dict[str, int], seed: int = SEED) -> list[str]:
    """The kinds of all gates in their random order, always the same for the same numbers."""
    order = [kind for kind, count in gates.items() for _ in range(count)]
    random.Random(seed).shuffle(order)
    return order


def remaining(order: Sequence[str], records: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """The places of the schedule without a gate yet. One that ended in an error is repeated, and stays on record."""
    done = {record["index"] for record in records if record["kind"] == "gate"}
    return ((index, kind) for index, kind in enumerate(order) if index not in done)


# ------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the campaign measures, and how its workers are started."""

    folder: Path
    priority: int | None

    @property
    def host(self) -> Host:
        """Workers in their own autogroups; `priority` is the group's, which is what counts on a shared machine."""
        if self.priority is None:
            return Host("cpu")
        prefer = f'echo {self.priority} > /proc/self/autogroup; exec "$0" -m kbench.worker "$@"'
        return Host("cpu", ("/bin/sh", "-c", prefer, sys.executable))

    @property
    def options(self) -> Options:
        return Options(levels=("step",), root=self.folder / "results", host=self.host, traced=False)

    def plan(self, slower: str = "", copies: int = 0) -> Plan:
        """The suite with so many copies planted in arm `slower`; equal arms where that is ''."""
        folder = self.folder / "suites" / (f"{slower}-{copies}" if slower else "aa")
        folder.mkdir(parents=True, exist_ok=True)
        text = SUITE.read_text()
        if slower:
            (folder / "plant.py").write_text(PLANT.format(copies=copies))
            planted = f'[variants.{slower}]\nattention = {{ prefill = "sdpa", decode = "plant.py:Slower" }}'
            text = text.replace(f"[variants.{slower}]", planted)
            if slower == "a":
                text = text.replace(f'{planted}\nattention = {{ prefill = "sdpa", decode = "sdpa-gather" }}', planted)
                same = 'extends = "a"\nattention = { prefill = "sdpa", decode = "sdpa-gather" }'
                text = text.replace('extends = "a"', same)
        (folder / "suite.toml").write_text(text)
        return make_plan(load_suite(folder / "suite.toml"))

    def change(self, plan: Plan, sessions: int) -> tuple[float, float]:
        """The relative change of time of arm b over `sessions` sessions, and half of its 95 % interval."""
        from dataclasses import replace

        record = execute_apart(plan, replace(self.options, sessions=sessions), "plant")
        cell, _ = cell_of(str(plan.at("step")[0]))
        evidence = Evidence.of([record])
        found = session_log_ratios(
            *(evidence.series(cell, "step_time", arm.name) for arm in (plan.candidate, plan.baseline))
        )
        if isinstance(found, Unusable):
            raise SystemExit(f"the planted copy cannot be measured: {found.why}")
        point, low, high = log_interval(found)
        return math.expm1(point), 0.5 * (high - low)

    def gate(self, plan: Plan) -> dict[str, Any]:
        found = gate(plan, self.options, "step", quick_only=True)
        if not found.document["cells"]:
            raise SystemExit(f"no quick gate: {found.document['no_card']}")
        return found.document

    def sequential(self, plan: Plan) -> dict[str, list[float]]:
        """All A, then all B: as many windows as a gate has, in one fresh pair."""
        suite = plan.loaded.suite
        case = {"case": str(plan.at("step")[0])}
        logs = self.folder / "sequential"
        logs.mkdir(exist_ok=True)
        taken: dict[str, list[float]] = {}
        with open_pair(plan, self.host, logs, "pair") as pair:
            pair.pin()
            for arm in plan.both:
                pair.ask(arm.name, "prepare", {**case, "thorough": False}, 120.0)
            for arm in plan.both:
                taken[arm.name] = []
                for _ in range(2 * suite.measure.blocks * suite.gate.sessions):
                    outcome = pair.ask(arm.name, "window", case, 120.0)
                    if outcome.status is not Status.OK:
                        raise SystemExit(f"a window failed: {outcome.message}")
                    taken[arm.name] += [item.value for item in outcome.measurements if item.metric == "step_time"]
        return taken


def judge_sequential(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """What the usual tests say about the usual layout."""
    from scipy.stats import mannwhitneyu, ttest_ind

    counts = [[float(part.mean()) for part in np.array_split(np.asarray(arm), COUNTS)] for arm in (a, b)]
    return {
        "change": float(np.median(b) / np.median(a) - 1.0),
        "mann_whitney_p": float(mannwhitneyu(a, b).pvalue),
        "welch_p": float(ttest_ind(a, b, equal_var=False).pvalue),
        "benchstat_p": float(mannwhitneyu(*counts).pvalue),
    }


# ------------------------------------------------------------------------------------------- the campaign


def run(state: State, bench: Bench, gates: dict[str, int]) -> None:
    begin(state, bench, gates)
    plans = {"aa": bench.plan()}
    for kind, plant in planted(state, bench).items():
        plans[kind] = bench.plan("a" if kind == "saving" else "b", plant["copies"])
    order = schedule(gates)
    coin = random.Random(SEED + 1)
    same = [index for index, kind in enumerate(order) if kind == "aa"][::BESIDE_EVERY]
    first = {index: coin.random() < 0.5 for index in same}
    errors = 0
    for index, kind in remaining(order, state.records):
        refresh(state, bench, plans["aa"], index)
        try:
            if first.get(index) is True:
                beside(state, bench, plans["aa"], index)
            began = time.monotonic()
            document = bench.gate(plans[kind])
            [cell] = document["cells"]
            state.append("gate", index=index, gate=kind, seconds=round(time.monotonic() - began, 2),
                         verdict=cell["verdict"], change=cell["change"], p=cell["p"], reason=cell["reason"],
                         card=document["card"]["run"], run=document["run"], load=os.getloadavg()[0])  # fmt: skip
            if first.get(index) is False:
                beside(state, bench, plans["aa"], index)
            errors = 0
        except KbenchError as error:
            state.append("error", index=index, gate=kind, message=str(error))
            errors += 1
            if errors >= ERRORS_IN_A_ROW:
                raise SystemExit(f"{errors} gates in a row failed: {error}") from error
        sys.stderr.write(
            f"{len(state.of('gate'))} of {sum(gates.values())}: {kind} {state.records[-1].get('verdict')}\n"
        )


def begin(state: State, bench: Bench, gates: dict[str, int]) -> None:
    rules = {"script": sha256_of_file(Path(__file__)), "suite": sha256_of_file(SUITE), "gates": gates,
             "priority": bench.priority, "code": code_hash()}  # fmt: skip
    started = state.of("start")
    if not started:
        state.append("start", rules=rules, python=sys.version.split()[0], load=os.getloadavg()[0])
    elif started[0]["rules"] != rules:
        changed = [name for name, value in rules.items() if started[0]["rules"].get(name) != value]
        raise SystemExit(f"{', '.join(changed)} changed since the campaign began: restore, or begin anew elsewhere")


def code_hash() -> str:
    """One hash of all of kbench's source."""
    import kbench

    root = Path(kbench.__file__).parent
    return sha256_of({str(file.relative_to(root)): sha256_of_file(file) for file in sorted(root.rglob("*.py"))})


def refresh(state: State, bench: Bench, plan: Plan, index: int) -> None:
    """A new card before every `REFRESH`-th gate of the schedule, and only then."""
    due = index // REFRESH
    if any(card["number"] == due for card in state.of("card")):
        return
    began = time.monotonic()
    found = calibrate(plan, bench.options)
    [noise] = found.card.cases.values()
    scatter = noise.metrics["step_time"]
    state.append("card", number=due, before=index, run=found.card.run, sd=scatter.sd,
                 within_sd=scatter.within_variance**0.5, estimates=scatter.estimates,
                 seconds=round(time.monotonic() - began, 1), load=os.getloadavg()[0])  # fmt: skip


def planted(state: State, bench: Bench) -> dict[str, dict[str, Any]]:
    """How many copies make 2 and 3 %: one number is measured and scaled to each target, which is measured again.

    A number that is not off by more than chance explains is kept: to go on until a measurement happens to fit would
    choose by noise. A saving s of arm b is a slow-down 1/(1 - s) - 1 of arm a; both are measured as a slow-down of b.
    """
    found = {plant["gate"]: plant for plant in state.of("plant")}
    for kind, target in TARGETS.items():
        if kind in found:
            continue
        wanted = target if kind == "slowdown" else 1.0 / (1.0 - target) - 1.0
        tried = state.of("plant_try") or [_try_plant(state, bench, "both", FIRST_COPIES)]
        for _ in range(PLANT_ROUNDS):
            last = tried[-1]
            if last["gate"] == kind and abs(last["achieved"] - wanted) <= PLANT_TOLERANCE:
                break
            factor = min(max(wanted / max(last["achieved"], 1e-4), 0.1), 10.0)
            tried = [_try_plant(state, bench, kind, max(1, round(last["copies"] * factor)))]
        last = tried[-1]
        share = last["achieved"] if kind == "slowdown" else 1.0 - 1.0 / (1.0 + last["achieved"])
        state.append("plant", gate=kind, copies=last["copies"], target=target, achieved=share, half=last["half"])
        found[kind] = state.records[-1]
    return found


def _try_plant(state: State, bench: Bench, kind: str, copies: int) -> dict[str, Any]:
    achieved, half = bench.change(bench.plan("b", copies), PLANT_SESSIONS)
    state.append("plant_try", gate=kind, copies=copies, achieved=achieved, half=half)
    return state.records[-1]


def beside(state: State, bench: Bench, plan: Plan, index: int) -> None:
    if any(item["index"] == index for item in state.of("sequential")):
        return
    began = time.monotonic()
    taken = bench.sequential(plan)
    state.append("sequential", index=index, windows=len(taken["a"]), **judge_sequential(taken["a"], taken["b"]),
                 seconds=round(time.monotonic() - began, 2))  # fmt: skip


# ------------------------------------------------------------------------------------------- the summary


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All figures, from the state alone."""
    gates = sorted((record for record in records if record["kind"] == "gate"), key=lambda record: record["index"])
    aa = [record for record in gates if record["gate"] == "aa"]
    beside_ = [record for record in records if record["kind"] == "sequential"]
    start = next((record for record in records if record["kind"] == "start"), None)
    cards = [record for record in records if record["kind"] == "card"]
    document: dict[str, Any] = {
        "schema": "kbench.gate-campaign/1",
        "started": start["time"] if start else None,
        "ended": records[-1]["time"] if records else None,
        "rules": start["rules"] if start else None,
        "complete": start is not None and len(gates) == sum(start["rules"]["gates"].values()),
        "aa": {**_count(aa, significant), "seconds": _seconds(aa), "inconclusive": _verdicts(aa, "inconclusive")},
        "aa_false_alarms": _count(aa[: FALSE_ALARMS["of"]], significant),
        "sequential": {
            name: {"k": sum(record[f"{name}_p"] < ALPHA for record in beside_), "n": len(beside_)}
            for name in ("mann_whitney", "welch", "benchstat")
        },
        "cards": [{key: card[key] for key in ("before", "sd", "within_sd", "run")} for card in cards],
        "errors": sum(record["kind"] == "error" for record in records),
    }
    document["sequential"]["seconds"] = _seconds(beside_)
    for kind, wanted in (("saving", "improved"), ("slowdown", "regressed")):
        mine = [record for record in gates if record["gate"] == kind]
        plant = next((item for item in records if item["kind"] == "plant" and item["gate"] == kind), {})
        changes = [record["change"]["point"] for record in mine if record["change"]]
        document[f"planted_{kind}"] = {
            "found": sum(record["verdict"] == wanted for record in mine),
            "n": len(mine),
            "achieved": plant.get("achieved"),
            "achieved_half_width": plant.get("half"),
            "copies": plant.get("copies"),
            "mean_over_gates": sum(changes) / len(changes) if changes else None,
            "seconds": _seconds(mine),
        }
    document["missed"] = missed(document)
    return document


def missed(document: dict[str, Any]) -> list[str]:
    """Figures that are not reached; one without enough gates is not."""
    found = []
    n, most = FIGURES["aa"]
    if document["aa"]["n"] < n or document["aa"]["k"] > most:
        found.append(f"A/A: {document['aa']['k']} of {document['aa']['n']} significant, at most {most} of {n}")
    alarms = document["aa_false_alarms"]
    if alarms["n"] < FALSE_ALARMS["of"] or alarms["k"] > FALSE_ALARMS["most"]:
        found.append(f"A/A: {alarms['k']} false alarms in the first {alarms['n']}, at most {FALSE_ALARMS['most']}")
    for kind in ("saving", "slowdown"):
        n, least = FIGURES[kind]
        item = document[f"planted_{kind}"]
        if item["n"] < n or item["found"] < least:
            found.append(f"planted {kind}: {item['found']} of {item['n']} found, at least {least} of {n}")
    return found


def significant(record: dict[str, Any]) -> bool:
    return record["verdict"] in ("regressed", "improved")


def _count(records: Sequence[dict[str, Any]], hit: Any) -> dict[str, int]:
    return {"k": sum(bool(hit(record)) for record in records), "n": len(records)}


def _verdicts(records: Sequence[dict[str, Any]], verdict: str) -> int:
    return sum(record["verdict"] == verdict for record in records)


def _seconds(records: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    if not records:
        return None
    values = sorted(record["seconds"] for record in records)
    return {"median": values[len(values) // 2], "max": values[-1], "total": round(sum(values), 1)}


def pilot(state: State, bench: Bench) -> None:
    """One calibration before the campaign, to choose sessions and blocks by; recorded as a pilot."""
    found = calibrate(bench.plan(), bench.options)
    [noise] = found.card.cases.values()
    scatter = noise.metrics["step_time"]
    state.append("pilot", suite=SUITE.read_text(), sd=scatter.sd, within_sd=scatter.within_variance**0.5,
                 estimates=scatter.estimates, within=scatter.within, load=os.getloadavg()[0])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="folder of the campaign")
    parser.add_argument("--gates", type=int, default=sum(GATES.values()), help="gates in all, in the same proportions")
    parser.add_argument("--json", action="store_true", help="print the summary and measure nothing")
    parser.add_argument("--pilot", action="store_true", help="only measure the noise, and record it as a pilot")
    parser.add_argument("--priority", type=int, help="autogroup priority of the workers (needs root below 0)")
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    state = State(options.state / "gates.jsonl")
    if options.json:
        document = summary(state.records)
        print(json.dumps(document, indent=1))
        raise SystemExit(1 if document["missed"] else 0)
    bench = Bench(options.state.resolve(), options.priority)
    if options.pilot:
        return pilot(state, bench)
    share = options.gates / sum(GATES.values())
    run(state, bench, {kind: max(1, round(count * share)) for kind, count in GATES.items()})


if __name__ == "__main__":
    main()
