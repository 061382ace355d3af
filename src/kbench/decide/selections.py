"""What a trial was asked to run, what that resolved to, and what was seen to run.

Owns the reading of the `selection` fact: which differences were declared, and which were not. It knows no rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kbench.selection import selections_of

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Stand:
    """A declared stand-in that served: `role` (empty, decode, prefill), who was wanted and who came."""

    role: str
    requested: str
    resolved: str
    policy: str
    benchmarked: str


def mismatches(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`(role, sentence)` for every implementation that is not one that was asked for or declared.

    A record of before fallbacks could be declared says nothing about it: then any difference is undeclared.
    """
    for role, record in selections_of(facts):
        requested, resolved, observed = (_text(record.get(key)) for key in ("requested", "resolved", "observed"))
        if requested and resolved and requested != resolved and record.get("declared") is not True:
            yield role, f"asked for {requested}, resolved to {resolved}"
        if observed and resolved and observed != resolved:
            ran = observed if observed.startswith("not ") else f"{observed} ran"
            yield role, f"resolved to {resolved}, but {ran}"
        for change in record.get("mutations") or ():
            if isinstance(change, Mapping):
                name, before, after = (_text(change.get(key)) for key in ("field", "before", "after"))
                yield role, f"{resolved} is not what was resolved: {name} changed from {before} to {after}"


def stand_ins(facts: Mapping[str, Any]) -> Iterator[Stand]:
    """Everything that a declared stand-in served."""
    for role, record in selections_of(facts):
        requested, resolved = _text(record.get("requested")), _text(record.get("resolved"))
        if resolved and requested not in ("", AUTO, resolved) and record.get("declared") is True:
            yield Stand(role, requested, resolved, _text(record.get("policy")), _text(record.get("benchmarked")))


def inconsistent(trials: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """`(role, sentence)` where trials of one case and variant did not all resolve to the same implementation."""
    found: dict[str, dict[str, int]] = {}
    for facts in trials:
        for role, record in selections_of(facts):
            resolved = _text(record.get("resolved"))
            if resolved:
                counts = found.setdefault(role, {})
                counts[resolved] = counts.get(resolved, 0) + 1
    for role, counts in found.items():
        if len(counts) > 1:
            each = " and ".join(f"to {name} in {count}" for name, count in sorted(counts.items()))
            yield role, f"resolved {each} trials: these are two arms"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
