"""A/A calibration: the baseline arm against itself, session by session, and the noise card that comes of it.

Owns the A/A plan, the order of what is written (samples, then the card, then the ledger's entry) and resume. The
sessions are those of every other run; none of them is evidence for a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from kbench import env
from kbench.decide import Evidence
from kbench.decide.cells import FAILED
from kbench.decide.estimate import Unusable
from kbench.decide.evidence import cell_of
from kbench.decide.quick import TOTAL, scatter_of
from kbench.errors import MeasurementError, UsageError
from kbench.hashing import sha256_of_file
from kbench.ledger import Kind, Ledger
from kbench.noise import DAYS, LEAST_SESSIONS, CaseNoise, NoiseCard, key_of, make, store
from kbench.plan import MEASURED_LEVELS, Plan
from kbench.protocol import Status
from kbench.record import RunRecord
from kbench.run.execute import execute_apart
from kbench.run.loop import Options

FOLDER = "calibrate"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The card as it is on disk, and what could not be put on it (case → why)."""

    card: NoiseCard
    path: Path
    left_out: Mapping[str, str]


def calibrate(plan: Plan, options: Options, *, sessions: int = LEAST_SESSIONS, days: int = DAYS) -> Calibrated:
    """Measure `sessions` A/A sessions of the plan's kernel and step cases and store the card.

    Raises UsageError for fewer than 16 sessions or a suite without such cases, MeasurementError where no case of it
    could be measured; what was recorded stays, and `resume` goes on from there.
    """
    if sessions < LEAST_SESSIONS:
        raise UsageError(
            f"{sessions} sessions are too few for a noise card", remedy=f"at least {LEAST_SESSIONS}: --sessions"
        )
    if days < 1:
        raise UsageError(f"a card that lasts {days} days", remedy="at least one day: --days")
    twice = aa_plan(plan)
    if not twice.cases:
        raise UsageError("the suite has neither [kernel] nor [step]: nothing to calibrate", where=str(plan.loaded.path))
    levels = tuple(level for level in MEASURED_LEVELS if any(options.only in str(case) for case in twice.at(level)))
    if not levels:
        levels = MEASURED_LEVELS
    key = key_of(env.snapshot(), options.host.device, plan.baseline, plan.loaded.suite.measure)
    apart = replace(options, levels=levels, sessions=sessions, traced=False)
    record = execute_apart(twice, apart, FOLDER)
    cases, left_out = noise_of(twice, record, sessions)
    if not cases:
        case, why = next(iter(left_out.items()), ("", "nothing was measured"))
        raise MeasurementError(f"no noise card: {case}: {why}", where=str(record.path), remedy="run it again")
    card = make(key, cases, f"{plan.name}/{record.run_id}", datetime.now(UTC), days)
    path, card = store(options.root, card)
    Ledger(options.root / plan.name / "ledger.jsonl").append(
        Kind.CALIBRATE,
        {
            "run": record.run_id,
            "plan_hash": twice.plan_hash,
            "card": f"noise/{card.file}",
            "sha256": sha256_of_file(path),
            "sessions": sessions,
            "expires": card.expires.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "sd": {case: noise.metrics[TOTAL[cell_of(case)[0].level]].sd for case, noise in cases.items()},
        },
    )
    return Calibrated(card, path, left_out)


def aa_plan(plan: Plan) -> Plan:
    """The baseline against itself, under a second name; only cases that are measured in windows."""
    again = "again" if plan.baseline.name != "again" else "once-more"
    identity = plan.arms[plan.baseline.name]
    return replace(
        plan,
        candidate=plan.baseline.model_copy(update={"name": again}),
        cases=plan.at(*MEASURED_LEVELS),
        arms={plan.baseline.name: identity, again: identity},
    )


def noise_of(plan: Plan, record: RunRecord, sessions: int) -> tuple[dict[str, CaseNoise], dict[str, str]]:
    """What an A/A run says about each of its cases: those that every session measured well, and the others with why."""
    evidence = Evidence.of([record])
    cases: dict[str, CaseNoise] = {}
    left_out: dict[str, str] = {}
    for case in dict.fromkeys(trial.case for trial in record.trials if trial.case):
        cell, _ = cell_of(case)
        if cell.level not in TOTAL:
            continue
        bad = next((trial for trial in evidence.trials(cell) if trial.status != Status.OK), None)
        if bad is not None:
            what = "failed" if bad.status in FAILED else "cannot be measured"
            left_out[case] = f"{what} ({bad.status}): {bad.message}"
            continue
        found = scatter_of(evidence, cell, TOTAL[cell.level], plan.candidate.name, plan.baseline.name, sessions)
        if isinstance(found, Unusable):
            left_out[case] = found.why
        else:
            cases[case] = found
    return cases, left_out
