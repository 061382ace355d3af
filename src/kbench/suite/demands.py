"""Everything that a suite makes an arm serve: attention of its model in each phase and role, and its kernel cases.

Owns the list of demands and their resolution, the same in a parent (which loads nothing) and in a worker (which does).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kbench import catalog
from kbench.catalog import Capability, Case, ModelShape
from kbench.errors import UsageError
from kbench.selection import Look, Query, SelectionRecord, SelectionRefused, resolve
from kbench.suite.choices import PHASES, attention_queries, choice_of, operation_query, registry_of
from kbench.suite.schema import Arm

ENGINE_LEVELS = ("step", "timeline", "workload")


@dataclass(frozen=True, slots=True)
class Demand:
    """One operation in one role. Each alternative, a kernel case or all kinds of layers, is served by itself."""

    op: str
    role: str
    alternatives: tuple[tuple[Query, ...], ...]
    level: str
    """`engine` or `kernel`."""


def demands(
    arm: Arm,
    model: ModelShape,
    cases: Sequence[Case],
    levels: Sequence[str],
    device: str,
    capability: Capability | None = None,
) -> tuple[Demand, ...]:
    """What `levels` ask of the arm on a device. A case whose axes cannot be filled in asks for nothing."""
    found: list[Demand] = []
    if set(levels) & set(ENGINE_LEVELS):
        for role in ("target", "draft") if arm.draft is not None else ("target",):
            for phase in PHASES:
                own = attention_queries(arm, model, phase, device, role=role, capability=capability)
                found.append(Demand(f"attention.{phase}", role, (own,), "engine"))
    if "kernel" in levels:
        own_cases = [case for case in cases if case.level == "kernel"]
        for op in dict.fromkeys(case.op for case in own_cases):
            asked = tuple(_kernel_queries(arm, model, op, own_cases, device, capability))
            if asked and choice_of(arm, op) is not None:
                found.append(Demand(op, "target", asked, "kernel"))
    return tuple(found)


def _kernel_queries(
    arm: Arm, model: ModelShape, op: str, cases: Sequence[Case], device: str, capability: Capability | None
) -> Iterator[tuple[Query, ...]]:
    seen: set[Query] = set()
    for case in cases:
        if case.op != op:
            continue
        try:
            query = operation_query(arm, catalog.resolve_shape(op, case.shape, model), device, capability)
        except UsageError:
            continue
        if query not in seen:
            seen.add(query)
            yield (query,)


def served(arm: Arm, demand: Demand, look: Look | None = None) -> SelectionRecord:
    """Who serves the first alternative that anybody can. Raises the refusal of the first where nobody serves any.

    A kernel case that is not served is a status of that case; an arm of which no case is served cannot be measured.
    """
    names, choice = registry_of(arm), choice_of(arm, demand.op, demand.role)
    if choice is None:
        raise UsageError(f"variant {arm.name!r} names nobody for {demand.op}", remedy="add it to its kernels")
    first: SelectionRefused | None = None
    for queries in demand.alternatives:
        try:
            return resolve(choice, *queries, known=names, look=look)
        except SelectionRefused as error:
            first = first or error
    assert first is not None
    raise first
