"""What a trial was asked to run, what that resolved to, and what was seen to run.

Owns the reading of the `selection` fact. It knows no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def mismatches(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`(role, sentence)` for every implementation that is not the one that was asked for."""
    for role, record in _selections(facts.get("selection")):
        requested, resolved, observed = (_text(record.get(key)) for key in ("requested", "resolved", "observed"))
        if requested and resolved and requested != resolved:
            yield role, f"asked for {requested}, resolved to {resolved}"
        if observed and resolved and observed != resolved:
            yield role, f"resolved to {resolved}, but {observed} ran"


def _selections(facts: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A kernel trial has one selection; a step or workload trial has one a phase."""
    if not isinstance(facts, Mapping):
        return
    if "resolved" in facts or "requested" in facts:
        yield "", facts
        return
    for role, record in sorted(facts.items()):
        if isinstance(record, Mapping):
            yield str(role), record


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
