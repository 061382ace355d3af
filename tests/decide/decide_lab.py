"""Synthetic evidence: run records with the names of a real run, and numbers that the test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kbench.record import RunRecord, Sample, SampleTable, SessionMark, Trial
from kbench.suite.schema import Suite

MODEL = "tiny"
SHORT, LONG = "1*1@127", "32*1@4096"
POINTS = (SHORT, LONG)

STEP = {"level": "step", "metric": "step_time", "test": "superiority", "min_saving": 0.02}
LATENCY = {"level": "kernel", "metric": "latency", "test": "superiority", "min_saving": 0.02}
GOODPUT = {"level": "workload", "metric": "goodput", "test": "noninferiority", "margin": 0.03}
PREEMPTIONS = {"level": "workload", "metric": "preemptions_per_1k", "test": "max_increase", "margin": 0.10}
OUTPUT = {"level": "workload", "mode": "exec", "metric": "output_divergence", "test": "equivalence", "margin": 0.01}


def make_suite(
    regimes: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    *,
    points: Mapping[str, Sequence[str]] | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    looks: Sequence[int] = (6, 8, 12),
    stop: str = "never",
    alpha: float = 0.05,
    graph: str = "eager",
    ops: Sequence[str] = ("attention.decode",),
) -> Suite:
    """A suite of two variants; `regimes` maps a name to its clauses, by default one with the step clause."""
    regimes = {"long": [STEP]} if regimes is None else regimes
    return Suite.model_validate_json(
        _json(
            {
                "schema": "kbench.suite/1",
                "claim": {"name": "claim", "baseline": "old", "candidate": "new"},
                "model": {"preset": MODEL},
                "engine": {"graph": graph},
                "variants": {"old": {"page_size": 16}, "new": {"page_size": 64}},
                "kernel": {"ops": list(ops), "points": list(POINTS)},
                "step": {"points": list(POINTS)},
                "workload": {"traces": {"long": "long.parquet", "chat": "chat.parquet"}},
                "rule": {"alpha": alpha, "looks": list(looks), "policy": {"stop": stop}},
                "regime": [
                    {
                        "id": name,
                        "trace_class": list((classes or {}).get(name, ("long",))),
                        "points": list((points or {}).get(name, POINTS)),
                        "require": list(clauses),
                    }
                    for name, clauses in regimes.items()
                ],
            }
        )
    )


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


@dataclass
class Lab:
    """Writes samples and trials of both arms as a run would; `run()` closes them into a RunRecord."""

    sessions: int = 6
    blocks: int = 6
    name: str = "2026-01-01T00-00-00"
    plan_hash: str = "abc"
    seed: int = 1
    partial: tuple[int, ...] = ()
    samples: list[Sample] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def timing(
        self,
        level: str,
        point: str,
        saving: float,
        *,
        metric: str | None = None,
        op: str | None = None,
        session_sd: float = 0.003,
        window_sd: float = 0.004,
        base_us: float = 1000.0,
    ) -> Lab:
        """ABBA windows of a kernel or step case in which the candidate saves `saving` of the time."""
        op = op or ("attention.decode" if level == "kernel" else "step")
        metric = metric or ("latency" if level == "kernel" else "step_time")
        case = f"{level}/{op}/{MODEL}/{point}"
        for session in range(self.sessions):
            offset = self.rng.normal(0.0, session_sd)
            for block in range(self.blocks):
                drift = 1.0 + 0.01 * block
                order = ("old", "new", "new", "old") if self.rng.random() < 0.5 else ("new", "old", "old", "new")
                for position, variant in enumerate(order):
                    factor = (1.0 - saving) * np.exp(offset) if variant == "new" else 1.0
                    value = base_us * drift * factor * float(np.exp(self.rng.normal(0.0, window_sd)))
                    self.add(case, level, variant, metric, value, session=session, block=block, position=position)
            for variant in ("old", "new"):
                self.trial(case, variant, session=session)
        return self

    def once(self, point: str, metric: str, old: float, new: float, *, sd: float = 0.0, level: str = "step") -> Lab:
        """A metric that is taken once a session."""
        case = f"{level}/step/{MODEL}/{point}"
        for session in range(self.sessions):
            for variant, value in (("old", old), ("new", new)):
                noisy = value + float(self.rng.normal(0.0, sd)) if sd else value
                self.add(case, level, variant, metric, noisy, session=session, scope="session")
        return self

    def workload(
        self,
        trace: str,
        metric: str,
        old: float | Sequence[float],
        change: float,
        *,
        mode: str = "exec",
        segments: int = 24,
        sd: float = 0.01,
        spread: float = 0.05,
        facts: Mapping[str, Any] | None = None,
    ) -> Lab:
        """Paired segments; `change` is the candidate's relative change (absolute for output_divergence)."""
        base = f"workload/replay/{MODEL}/{trace}"
        levels = old if isinstance(old, Sequence) else [old * (1 + self.rng.normal(0, spread)) for _ in range(segments)]
        absolute = metric == "output_divergence" or all(value == 0 for value in levels)
        for segment, value in enumerate(levels):
            noise = float(self.rng.normal(0.0, sd))
            new = value + change + noise if absolute else value * (1 + change + noise)
            for variant, number in (("old", value), ("new", new)):
                self.add(
                    base, "workload", variant, metric, abs(float(number)), scope="segment", segment=segment, mode=mode
                )
        for variant in ("old", "new"):
            case = f"{base};mode={mode}"
            if not any(trial.case == case and trial.variant == variant for trial in self.trials):
                self.trial(case, variant, facts={"extrapolated_fraction": 0.01, **(facts or {})})
        return self

    def calibration(self, trace: str, *, bias: float = 0.001, half_width: float = 0.002, **facts: Any) -> Lab:
        for variant in ("old", "new"):
            known = {"metric": "attainment", "bias": bias, "half_width": half_width, "exec_attainment": 0.8}
            case = f"workload/calibrate/{MODEL}/{trace}"
            self.trial(case, variant, facts={**known, "usable": True, **facts})
        return self

    def trial(self, case: str, variant: str, *, session: int = 0, status: str = "ok", **rest: Any) -> Lab:
        self.trials.append(Trial(session, case, variant, status, **rest))
        return self

    def add(self, case: str, level: str, variant: str, metric: str, value: float, **rest: Any) -> Lab:
        self.samples.append(Sample(case, level, variant, metric, "us", value, **rest))
        return self

    def edit(self, change: Callable[[Sample], Sample | None]) -> Lab:
        """Every sample through `change`; None drops it."""
        self.samples = [kept for sample in self.samples if (kept := change(sample)) is not None]
        return self

    def run(self) -> RunRecord:
        marks = tuple(SessionMark(number, number not in self.partial) for number in range(self.sessions))
        header = {"run": self.name, "plan_hash": self.plan_hash}
        table = SampleTable.of(self.samples)
        return RunRecord(Path(self.name), header, table, tuple(self.trials), marks, closed=True)


def shuffled(record: RunRecord, seed: int) -> RunRecord:
    """The same run with its rows in another order, which no decision may see."""
    table = record.samples
    order = np.random.default_rng(seed).permutation(len(table))
    codes = {name: column[order] for name, column in table.codes.items()}
    whole = {name: column[order] for name, column in table.whole.items()}
    return replace(record, samples=replace(table, codes=codes, whole=whole, value=table.value[order]))
