"""Synthetic runs with the names of real ones, for everything that reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kbench.record import RunRecord, Sample, SampleTable, SessionMark, Trial
from kbench.suite.schema import Suite

OLD, NEW = "page16", "page64"
POINT = "32*1@4096"
KERNEL = f"kernel/attention.decode/tiny/{POINT}"
STEP = f"step/step/tiny/{POINT}"
HOSTILE = "a|b`c<script>alert(1)</script>[red]x[/red]\x1b[31m\n## h *b* _u_ https://x.example ![i](http://y) \u202e"


def make_suite(**claim: Any) -> Suite:
    return Suite.model_validate_json(
        json.dumps(
            {
                "schema": "kbench.suite/1",
                "claim": {"name": "claim", "baseline": OLD, "candidate": NEW, "expected_saving": 0.22, **claim},
                "model": {"preset": "tiny"},
                "variants": {OLD: {"page_size": 16}, NEW: {"page_size": 64}},
                "kernel": {"points": [POINT]},
                "step": {"points": [POINT]},
                "workload": {"traces": {"long": "l.parquet", "chat": "c.parquet"}},
                "rule": {"looks": [6], "policy": {"stop": "never"}},
                "regime": [
                    {
                        "id": "long-context",
                        "trace_class": ["long"],
                        "points": [POINT],
                        "require": [
                            {"level": "step", "metric": "step_time", "test": "superiority", "min_saving": 0.02}
                        ],
                    },
                    {
                        "id": "everything",
                        "trace_class": ["long", "chat"],
                        "points": [POINT],
                        "require": [
                            {"level": "kernel", "metric": "latency", "test": "superiority", "min_saving": 0.5},
                            {"level": "workload", "metric": "goodput", "test": "noninferiority", "margin": 0.03},
                        ],
                    },
                ],
            }
        )
    )


@dataclass
class Bench:
    """Writes what a run would record."""

    name: str = "2026-01-01"
    sessions: int = 6
    partial: tuple[int, ...] = ()
    samples: list[Sample] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)

    def windows(self, case: str, variant: str, metric: str, values: Sequence[Sequence[float]], **rest: Any) -> Bench:
        """One row of windows a session; blocks of two windows a variant."""
        level = case.split("/")[0]
        for session, row in enumerate(values):
            for index, value in enumerate(row):
                self.samples.append(
                    Sample(
                        case, level, variant, metric, "us", value,
                        session=session, block=index // 2, position=index % 2, **rest,
                    )
                )  # fmt: skip
        return self

    def once(self, case: str, variant: str, metric: str, values: Sequence[float]) -> Bench:
        level = case.split("/")[0]
        for session, value in enumerate(values):
            self.samples.append(Sample(case, level, variant, metric, "us", value, scope="session", session=session))
        return self

    def ended(self, case: str, variant: str, status: str = "ok", session: int = 0, **rest: Any) -> Bench:
        self.trials.append(Trial(session, case, variant, status, **rest))
        return self

    def run(self) -> RunRecord:
        marks = tuple(SessionMark(number, number not in self.partial) for number in range(self.sessions))
        header = {"run": self.name, "plan_hash": "f" * 64, "levels": ["kernel", "step"], **self.header}
        table = SampleTable.of(self.samples)
        return RunRecord(Path(self.name), header, table, tuple(self.trials), marks, closed=True)


def full_bench(**rest: Any) -> Bench:
    """Every level, both arms; the candidate saves 25 % at levels 1 and 2."""
    bench = Bench(**rest)
    for variant, scale in ((OLD, 1.0), (NEW, 0.75)):
        values = [[100.0 * scale * (1 + 0.001 * (session + index)) for index in range(12)] for session in range(6)]
        correct = {"rel_l2": 2e-7, "limit": 1e-6, "null_models_killed": 5, "null_models": 5}
        bench.windows(KERNEL, variant, "latency", values)
        bench.windows(STEP, variant, "step_time", [[10 * value for value in row] for row in values])
        for metric, value in (
            ("phase.attention", 400.0 * scale), ("phase.forward", 580.0), ("phased_wall", 1000.0), ("closure", 0.99),
            ("conversion_time", 3.0), ("metadata_time", 9.0), ("launches", 120.0),
        ):  # fmt: skip
            bench.once(STEP, variant, metric, [value + 0.0001 * session for session in range(6)])
        for session in range(6):
            bench.ended(KERNEL, variant, session=session, facts={"correctness": correct, "timer": "wall", "flags": []})
            selection = {"decode": {"requested": variant, "resolved": variant, "observed": ""}}
            bench.ended(STEP, variant, session=session, facts={"selection": selection, "perturbation": 0.01})
        for trace, scheduled in (("long", 300), ("chat", 100)):
            classes = {"not_sent": 0, "good": scheduled - 3, "late": 2, "failed": 0, "cancelled": 0, "rejected": 0,
                       "unfinished": 1}  # fmt: skip
            facts = {
                "summary": {"goodput": (scheduled - 3) / scheduled, "ttft_p99": 1500.0, "recomputed_tokens": 7,
                            "preemptions_per_1k": 4.0, "queue_p50": float("nan")},
                "classes": classes, "scheduled": scheduled, "extrapolated_fraction": 0.01, "timing": "modeled",
                "autocorrelation": 0.1,
            }  # fmt: skip
            bench.ended(f"workload/replay/tiny/{trace};mode=virtual", variant, facts=facts)
            bench.ended(f"workload/replay/tiny/{trace};mode=exec", variant, facts={**facts, "scheduled": 9})
            bench.ended(
                f"workload/calibrate/tiny/{trace}", variant,
                facts={"bias": 0.01, "half_width": 0.02, "exec_attainment": 0.8, "usable": True, "requests": 40},
            )  # fmt: skip
    return bench


@pytest.fixture
def suite() -> Suite:
    return make_suite()
