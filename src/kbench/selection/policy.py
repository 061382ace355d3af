"""From a choice to who serves it: `reject`, `fallback` along a declared chain, or `auto` in the registry's order.

Owns the order of asking and what each policy allows. Each resolution writes one line to the log `kbench.selection`.
What loading tells beyond the catalogue (a package that does not import, limits that a plug-in declares) comes from
`look`, which a worker supplies; without one only declared facts and installed packages count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kbench.catalog import AUTO, CUSTOM, Implementation, Registry, registry
from kbench.errors import UsageError
from kbench.selection.query import Query, Reason, absent, check_all
from kbench.selection.record import Candidate, SelectionRecord

Policy = Literal["reject", "fallback", "auto"]
POLICIES: tuple[Policy, ...] = ("reject", "fallback", "auto")
LOG = logging.getLogger("kbench.selection")

Look = Callable[[str, str], "tuple[Implementation | None, Sequence[Reason]]"]
"""(reference, op) → what it declares (None: nothing) and why it cannot be had at all."""


class SelectionRefused(UsageError):
    """Nobody may serve. `op`, `requested` and `candidates` say who was asked and every reason why not."""

    def __init__(self, requested: str, op: str, candidates: Sequence[Candidate], what: str, remedy: str) -> None:
        super().__init__(what, remedy=remedy)
        self.op, self.requested, self.candidates = op, requested, tuple(candidates)

    def joined(self, others: Sequence[SelectionRefused]) -> SelectionRefused:
        """This refusal and those of other phases, told together; the problems stay one line each."""
        candidates = [one for error in (self, *others) for one in error.candidates]
        made = SelectionRefused(self.requested, self.op, candidates, self.problems[0].what, "")
        made.problems = tuple(problem for error in (self, *others) for problem in error.problems)
        return made

    @property
    def reasons(self) -> list[str]:
        return [f"{one.name}: {reason}" for one in self.candidates for reason in one.reasons]


@dataclass(frozen=True, slots=True)
class Choice:
    """Who is wanted, and what may happen where that cannot be had.

    `chain`: (name, plan hash of the evidence on it or nothing) in the order of asking, under `fallback`. `without`:
    names to be treated as gone.
    """

    requested: str
    policy: Policy = "reject"
    chain: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()


def resolve(
    choice: Choice | str, *queries: Query, known: Registry | None = None, look: Look | None = None
) -> SelectionRecord:
    """Who serves all of `queries`: the kinds of layers of one model, of one operation and role.

    Raises SelectionRefused with every reason of everybody who was asked, where the policy lets nobody serve.
    """
    chosen = Choice(choice) if isinstance(choice, str) else choice
    names = known or registry()
    first = queries[0]
    asked: list[Candidate] = []
    for name, declared, benchmarked in _asking(chosen, first.op, names):
        reasons = _objections(name, first.op, queries, names, look or listed(names), chosen.without)
        asked.append(Candidate(name, reasons))
        if reasons:
            continue
        found = names.find(name, first.op)
        record = SelectionRecord(
            op=first.op,
            requested=chosen.requested,
            resolved=name,
            role=first.role,
            layers=", ".join(dict.fromkeys(query.layers for query in queries if query.layers)),
            policy=chosen.policy,
            declared=declared,
            benchmarked=benchmarked,
            source=found.entry if found is not None and found.installed else "",
            candidates=tuple(asked),
        )
        LOG.info("%s", record.line())
        return record
    raise _refusal(chosen, queries, asked, names)


def listed(names: Registry) -> Look:
    """The look of somebody who loads nothing: catalogue entries declare themselves, plug-ins nothing."""

    def look(reference: str, op: str) -> tuple[Implementation | None, Sequence[Reason]]:
        if ":" in reference or reference.endswith(".py"):
            return None, ()
        found = names.get(reference, op)
        return found, absent(found)

    return look


def _asking(choice: Choice, op: str, names: Registry) -> Iterator[tuple[str, bool, str]]:
    """(name, whether that it may serve is written down, its evidence), in the order of asking, each once."""
    order: list[tuple[str, bool, str]] = []
    if choice.requested != AUTO:
        order.append((choice.requested, True, ""))
    if choice.policy == "fallback":
        order += [(name, True, benchmarked) for name, benchmarked in choice.chain]
    if choice.policy == "auto" or choice.requested == AUTO:
        order += [(found.name, True, "") for found in names.in_order(op)]
    seen: set[str] = set()
    for name, declared, benchmarked in order:
        if name not in seen:
            seen.add(name)
            yield name, declared, benchmarked


def _objections(
    name: str, op: str, queries: Sequence[Query], names: Registry, look: Look, without: Sequence[str]
) -> tuple[Reason, ...]:
    if name in without:
        return (Reason("presence", name, "left out by --without"),)
    if name == CUSTOM:
        names.get(name, op)  # an empty slot is refused with how to fill it, whatever the policy
    facts, reasons = look(name, op)
    own = check_all(facts, queries) if facts is not None else []
    return tuple(dict.fromkeys((*reasons, *own)))


def _refusal(choice: Choice, queries: Sequence[Query], asked: Sequence[Candidate], names: Registry) -> SelectionRefused:
    op = queries[0].op
    if not asked:
        return SelectionRefused(choice.requested, op, (), f"nobody computes {op}", "register one: FILE.py:NAME")
    look = listed(names)
    tried = {one.name for one in asked}
    able = [
        found.name
        for found in names.of(op)
        if found.name not in tried and not _objections(found.name, op, queries, names, look, choice.without)
    ]
    if len(asked) == 1:
        why = f"{asked[0].name} cannot serve {op}: " + "; ".join(map(str, asked[0].reasons))
    else:
        each = " | ".join(f"{one.name}: " + "; ".join(map(str, one.reasons)) for one in asked)
        why = f"nobody that policy {choice.policy} allows can serve {op}: {each}"
    return SelectionRefused(choice.requested, op, asked, why, f"these can: {', '.join(able) or 'none'}")
