"""Who computed what a sample is of, as text columns beside it: requested, resolved, observed, and why.

Owns the texts. They are filled in when a run is closed, since what ran is observed last; nothing that decides reads
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kbench.selection import SelectionRecord, selections_of

if TYPE_CHECKING:
    from kbench.record.folder import Trial

COLUMNS = ("requested", "resolved", "observed", "policy", "rejected", "drift")
Texts = Mapping[tuple[str, str], Mapping[str, str]]
"""(case, variant) → column → text."""


def selected_columns(trials: Iterable[Trial]) -> Texts:
    """Texts by case and variant: of the newest trial that says, and what any of them observed. A step has an
    implementation a phase: `decode=blocked prefill=sdpa`."""
    newest: dict[tuple[str, str], dict[str, SelectionRecord]] = {}
    for trial in trials:
        for role, data in selections_of(trial.facts):
            records = newest.setdefault((_plain(trial.case), trial.variant), {})
            before = records.get(role)
            record = SelectionRecord.from_json(data)
            if before is not None and (not record.observed or before.drift):
                continue  # an observation, and a drift above all, is not forgotten
            records[role] = record
    return {key: _texts(records) for key, records in newest.items()}


def _plain(case: str) -> str:
    """A replay's trials name their mode; its samples have a column for that."""
    return case.partition(";mode=")[0]


def _texts(records: Mapping[str, SelectionRecord]) -> dict[str, str]:
    def told(of: Any) -> str:
        found = {role: str(of(record)) for role, record in sorted(records.items())}
        return " ".join(f"{role}={text}" if role else text for role, text in found.items() if text)

    return {
        "requested": told(lambda one: one.requested),
        "resolved": told(lambda one: one.resolved),
        "observed": told(lambda one: one.observed),
        "policy": told(lambda one: one.policy),
        "rejected": told(lambda one: " | ".join(f"{c.name}: {'; '.join(map(str, c.reasons))}" for c in one.rejected)),
        "drift": told(lambda one: "yes" if one.drift else ""),
    }
