"""The gate of a pull request: a few sessions beside the evidence, and a verdict on every cell.

Owns which tier is run (quick with a noise card, else the rule's first look), the gate's document and its exit code. The
statistics are `decide.quick`'s. A gate locks nothing and enables nothing: it asks whether a change may be merged, over
arms that change daily, and its looks at the data would spend the rule's error if its sessions were the rule's evidence.
So that nobody reruns a gate unseen until it passes, its document lists the gates of the same plan that came before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kbench import env
from kbench.decide import Evidence, selection_drift
from kbench.decide.evidence import Cell, cell_of
from kbench.decide.quick import ALPHA, GATE_CODES, GateCell, judge_gate
from kbench.errors import EvidenceError, ExitCode, MeasurementError
from kbench.noise import NoCard, NoiseCard, key_of, lookup
from kbench.plan import Plan
from kbench.record import RunRecord, list_runs
from kbench.run.execute import execute_apart
from kbench.run.loop import Options, sessions_of

SCHEMA = "kbench.gate/1"
FOLDER = "gate"
FILE = "gate.json"


@dataclass(frozen=True, slots=True)
class Gate:
    """What a gate found."""

    document: dict[str, Any]
    exit_code: ExitCode


def gate(plan: Plan, options: Options, level: str, *, quick_only: bool = False) -> Gate:
    """Measure `level` and judge it. With `quick_only` and no card nothing is measured: inconclusive, with the reason.

    Raises MeasurementError where nothing could be measured, UsageError for options that cannot be meant.
    """
    cases = {str(case): cell_of(str(case))[0] for case in plan.at(level) if options.only in str(case)}
    card = find_card(plan, options, list(cases))
    if isinstance(card, NoCard) and quick_only:
        return _refused(plan, level, card)
    suite = plan.loaded.suite
    sessions = suite.rule.looks[0] if isinstance(card, NoCard) else suite.gate.sessions
    earlier = earlier_gates(options.root / plan.name, plan.plan_hash)
    record = execute_apart(plan, replace(options, levels=(level,), sessions=sessions), FOLDER)
    found = judge(plan, record, level, cases, card, earlier)
    _write(record.path / FILE, found.document)
    return found


def find_card(plan: Plan, options: Options, cases: list[str]) -> NoiseCard | NoCard:
    """The noise card that speaks about `cases` of the plan here and now, or why none does."""
    key = key_of(env.snapshot(), options.host.device, plan.baseline, plan.loaded.suite.measure)
    return lookup(options.root, key, cases)


def judge(
    plan: Plan,
    record: RunRecord,
    level: str,
    cases: dict[str, Cell],
    card: NoiseCard | NoCard,
    earlier: list[dict[str, Any]],
) -> Gate:
    """The verdicts of a run that has been measured."""
    suite = plan.loaded.suite
    evidence = Evidence.of([record])
    drift = selection_drift(suite, evidence)
    cells = judge_gate(suite, evidence, cases, card.cases if isinstance(card, NoiseCard) else {})
    code = ExitCode.worst([ExitCode.INTEGRITY] if drift else [GATE_CODES[cell.verdict] for cell in cells])
    document = {
        **_head(plan, level, card),
        "run": record.run_id,
        "sessions": sessions_of([record], level),
        "exit_code": int(code),
        "verdict": "invalid" if drift else _worst(cells),
        "cells": [cell.to_json() for cell in cells],
        "reasons": [*drift, *(f"{cell.case}: {cell.reason}" for cell in cells if GATE_CODES[cell.verdict])],
        "earlier_gates": earlier,
    }
    return Gate(document, code)


def earlier_gates(folder: Path, plan_hash: str) -> list[dict[str, Any]]:
    """Run and verdict of every gate of this plan so far; one that left no verdict was interrupted."""
    found = []
    for path in list_runs(folder / FOLDER):
        file = path / FILE
        try:
            document = json.loads(file.read_text()) if file.is_file() else json.loads((path / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise EvidenceError(
                f"an earlier gate cannot be read: {error}", where=str(path), remedy="remove it"
            ) from error
        if document.get("plan_hash") == plan_hash:
            found.append({"run": path.name, "verdict": document.get("verdict", "interrupted")})
    return found


def _refused(plan: Plan, level: str, card: NoCard) -> Gate:
    code = ExitCode.INCONCLUSIVE
    empty: dict[str, Any] = {"run": None, "sessions": 0, "exit_code": int(code), "verdict": "inconclusive", "cells": []}
    return Gate({**_head(plan, level, card), **empty, "reasons": [card.why], "earlier_gates": []}, code)


def _head(plan: Plan, level: str, card: NoiseCard | NoCard) -> dict[str, Any]:
    has = isinstance(card, NoiseCard)
    return {
        "schema": SCHEMA,
        "suite": plan.name,
        "level": level,
        "plan_hash": plan.plan_hash,
        "tier": "quick" if has else "first-look",
        "margin": plan.loaded.suite.gate.margin,
        "alpha": ALPHA,
        "card": card_reference(card) if isinstance(card, NoiseCard) else None,
        "no_card": card.why if isinstance(card, NoCard) else "",
    }


def card_reference(card: NoiseCard) -> dict[str, Any]:
    return {
        "file": f"noise/{card.file}",
        "run": card.run,
        "created": card.created.isoformat(),
        "expires": card.expires.isoformat(),
    }


def _worst(cells: tuple[GateCell, ...]) -> str:
    """The verdict that decides the exit code; among those that end with 0 `pass` is the more careful word."""
    code = ExitCode.worst([GATE_CODES[cell.verdict] for cell in cells])
    deciding = [cell.verdict.value for cell in cells if GATE_CODES[cell.verdict] is code]
    return max(deciding, key=["improved", "pass", "regressed", "failed"].index) if code in (0, 1) else deciding[0]


def _write(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        partial.replace(path)
    except OSError as error:
        raise MeasurementError(f"cannot write: {error.strerror or error}", where=str(path)) from error
