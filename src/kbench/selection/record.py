"""What one resolution came to: requested, resolved, observed; who was rejected and why; what changed afterwards.

Owns `SelectionRecord`, its JSON form, which travels in every trial's facts, and its one line for logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kbench.selection.query import Reason


@dataclass(frozen=True, slots=True)
class Candidate:
    """One that was asked, in the order of asking, and every reason why it was not taken."""

    name: str
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Mutation:
    """Something of a backend or its engine that is no longer what was resolved."""

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.field} changed from {self.before} to {self.after}"


@dataclass(frozen=True, slots=True)
class SelectionRecord:
    """One resolution: of one operation (hence phase), for all the kinds of layers in `layers`, in one role.

    `observed` is empty until a trace was read. `declared`: that `resolved` may stand for `requested` was written down
    (it is the same, a declared fallback, or anybody's under `auto`). `benchmarked`: plan hash of the evidence that a
    declared fallback names. `source`: where code that does not ship came from.
    """

    op: str
    requested: str
    resolved: str
    observed: str = ""
    role: str = "target"
    layers: str = ""
    policy: str = "reject"
    declared: bool = True
    benchmarked: str = ""
    source: str = ""
    candidates: tuple[Candidate, ...] = ()
    mutations: tuple[Mutation, ...] = ()

    @property
    def fell_back(self) -> bool:
        return self.requested not in (self.resolved, "auto")

    @property
    def drift(self) -> bool:
        """Whether something ran, or was resolved, that nobody wrote down."""
        undeclared = self.requested != self.resolved and not self.declared
        return undeclared or self.observed not in ("", self.resolved) or bool(self.mutations)

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if candidate.reasons)

    def line(self) -> str:
        """One line for a log: `kbench.select op=… requested=… resolved=… …`."""
        fields = {
            "op": self.op,
            "role": self.role,
            "layers": self.layers or "all",
            "requested": self.requested,
            "resolved": self.resolved,
            "policy": self.policy,
            "declared": "yes" if self.declared else "no",
            "benchmarked": self.benchmarked[:16],
            "source": self.source,
        }
        told = [f"{name}={_word(value)}" for name, value in fields.items() if value]
        told += [f"rejected={_word(one.name + ': ' + '; '.join(map(str, one.reasons)))}" for one in self.rejected]
        return " ".join(("kbench.select", *told))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SelectionRecord:
        """The inverse of `to_json`. What an older record lacks is at its default; a difference was undeclared then."""
        texts = ("op", "requested", "resolved", "observed", "role", "layers", "policy", "benchmarked", "source")
        known = {name: str(data[name]) for name in texts if data.get(name)}
        return cls(
            **{"op": "", "requested": "", "resolved": "", **known},
            declared=bool(data.get("declared", data.get("requested") == data.get("resolved"))),
            candidates=tuple(
                Candidate(str(one["name"]), tuple(Reason(r["field"], r["want"], r["have"]) for r in one["reasons"]))
                for one in data.get("candidates", ())
            ),
            mutations=tuple(Mutation(m["field"], m["before"], m["after"]) for m in data.get("mutations", ())),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "role": self.role,
            "layers": self.layers,
            "requested": self.requested,
            "resolved": self.resolved,
            "observed": self.observed,
            "policy": self.policy,
            "declared": self.declared,
            "benchmarked": self.benchmarked,
            "source": self.source,
            "candidates": [
                {
                    "name": one.name,
                    "reasons": [{"field": r.field, "want": r.want, "have": r.have} for r in one.reasons],
                }
                for one in self.candidates
            ],
            "mutations": [{"field": m.field, "before": m.before, "after": m.after} for m in self.mutations],
        }


def selections_of(facts: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """`(role, record)`. A kernel trial has one selection, without a role; a step or workload trial has one a phase."""
    found = facts.get("selection")
    if not isinstance(found, Mapping):
        return
    if "resolved" in found or "requested" in found:
        yield "", found
        return
    for role, record in sorted(found.items()):
        if isinstance(record, Mapping):
            yield str(role), record


def _word(text: str) -> str:
    """A value of a key=value line: quoted where it has spaces, on one line whatever it holds."""
    flat = " ".join(text.split()).replace('"', "'")
    return f'"{flat}"' if " " in flat or "=" in flat else flat
