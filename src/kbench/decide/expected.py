"""What somebody expects to have run, against what was resolved and seen: `--expect NAME=BACKEND`.

Owns the judgement. An expectation is met where every record of its name resolved to the backend and a trace saw it;
nothing seen is nothing known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kbench.decide.evidence import Evidence
from kbench.selection import SelectionRecord, selections_of


@dataclass(frozen=True, slots=True)
class Expectation:
    """`variant`'s `name` (an operation, or its last part: decode, prefill) is computed by `backend`."""

    variant: str
    name: str
    backend: str

    def __str__(self) -> str:
        return f"{self.variant}:{self.name}={self.backend}"

    def speaks_of(self, op: str) -> bool:
        return op == self.name or op.endswith(f".{self.name}") or op.startswith(f"{self.name}.")


@dataclass(frozen=True, slots=True)
class Judged:
    """`broken`: one sentence for each that something else answered to. `unseen`: for each that nothing was seen of."""

    broken: tuple[str, ...]
    unseen: tuple[str, ...]


def judge(expectations: Sequence[Expectation], evidence: Evidence) -> Judged:
    broken: dict[str, None] = {}
    unseen: list[str] = []
    for one in expectations:
        seen, wrong = False, False
        for record in _records(one, evidence):
            ran = record.observed or record.resolved
            if ran and ran != one.backend:
                what = ran if ran.startswith("not ") else f"{ran} {'ran' if record.observed else 'was resolved'}"
                broken[f"expected {one}, but {what}"] = None
                wrong = True
            seen = seen or record.observed == one.backend
        if not seen and not wrong:
            unseen.append(f"expected {one}, and nothing that was traced says who ran")
    return Judged(tuple(broken), tuple(unseen))


def _records(one: Expectation, evidence: Evidence) -> Iterator[SelectionRecord]:
    for cell in evidence.cells():
        for trial in evidence.trials(cell, one.variant):
            for role, found in selections_of(trial.facts):
                op = str(found.get("op") or (f"attention.{role}" if role else cell.op))
                if one.speaks_of(op):
                    yield SelectionRecord.from_json({**found, "op": op})
