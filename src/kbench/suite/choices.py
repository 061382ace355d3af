"""What an arm asks the selection for: its registry, its choice of each operation, and the queries of its layers.

Owns the reading of an `Arm` for `kbench.selection`, for everybody: the checks of a suite, the plan, `kbench backends`,
and the workers. It loads nothing and needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kbench import catalog
from kbench.catalog import (
    AUTO,
    DTYPES,
    LAYOUTS,
    Capability,
    GraphSupport,
    Implementation,
    ModelShape,
    Registry,
    Resolved,
)
from kbench.catalog.ops import MASKS
from kbench.selection import Choice, Query, Reason, check_all
from kbench.suite.plugins import is_plugin
from kbench.suite.schema import Arm

PHASES = ("decode", "prefill")
PAGED = ("attention.decode", "attention.prefill")
FEATURES = ("window", "softcap", "sinks", "lse")


def registry_of(arm: Arm) -> Registry:
    """What the arm knows by name. Raises UsageError where it registers a name that is taken, or overrides none."""
    return with_slots(catalog.registry(), arm.registered, arm.overridden)


def with_slots(known: Registry, registered: Mapping[str, str], overridden: Mapping[str, str]) -> Registry:
    """`known` with a suite's own implementations, NAME@OP → reference."""
    for slot, reference in registered.items():
        name, _, op = slot.partition("@")
        known = known.registered(foreign(name, op, reference))
    for slot, reference in overridden.items():
        name, _, op = slot.partition("@")
        known.get(name, op)
        known = known.registered(foreign(name, op, reference), override=True)
    return known


def foreign(name: str, op: str, reference: str) -> Implementation:
    """Code of somebody else, before it is loaded: it states no limits, so none is known."""
    return Implementation(
        name,
        (op,),
        reference,
        f"registered by the suite: {reference}",
        dtypes=DTYPES,
        kv_dtypes=catalog.KV_DTYPES,
        layouts=LAYOUTS,
        masks=MASKS,
        features=FEATURES,
        graph=GraphSupport.ALWAYS,
        installed=True,
    )


def choice_of(arm: Arm, op: str, role: str = "target") -> Choice | None:
    """Who is wanted for `op` and what may happen instead; None where the arm names nobody."""
    requested = arm.implementation_of(op)
    if role == "draft" and arm.draft is not None and op in PAGED:
        requested = getattr(arm.draft, op.partition(".")[2])
    if requested is None:
        return None
    family = op.partition(".")[0]
    own = [entry for entry in arm.fallback if entry.op == op] or [e for e in arm.fallback if e.op == family]
    chain = tuple((entry.use, entry.benchmarked) for entry in own)
    return Choice(requested, arm.policy, chain, arm.without)


def references(arm: Arm) -> Iterator[tuple[str, str]]:
    """(operation, reference) of everything that may serve the arm: requested, of the draft, and every fallback."""
    for phase in PHASES:
        yield f"attention.{phase}", getattr(arm, phase)
        if arm.draft is not None:
            yield f"attention.{phase}", getattr(arm.draft, phase)
    yield from arm.kernels.items()
    yield from ((entry.op, entry.use) for entry in arm.fallback)


def brings_code(arm: Arm) -> bool:
    """Whether something of the arm can only be judged by loading it: plug-ins, packages, what a suite registers."""
    known = registry_of(arm)
    for op, reference in references(arm):
        found = None if is_plugin(reference) else known.find(reference, op)
        if is_plugin(reference) or (found is not None and (found.installed or found.requires)):
            return True
    return False


def attention_queries(
    arm: Arm,
    model: ModelShape,
    phase: str,
    device: str,
    *,
    role: str = "target",
    capability: Capability | None = None,
) -> tuple[Query, ...]:
    """What each kind of attention layer of the arm asks for in `phase` (`decode` or `prefill`).

    Who asks for graphs asks for captured decodes of one token each. A prefill that cannot be captured is no objection:
    such steps are launched eagerly, and each says so.
    """
    captured = arm.engine.graph == "graph" and phase == "decode"
    return tuple(
        Query(
            op=f"attention.{phase}",
            device=device,
            dtype=arm.model.dtype,
            page_size=arm.page_size,
            layout=arm.layout,
            q_heads=model.q_heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            graph=GraphSupport.SINGLE_TOKEN if captured else GraphSupport.NEVER,
            features=kind.features,
            capability=capability,
            role=role,
            layers=str(kind),
        )
        for kind in model.kinds
    )


def operation_query(arm: Arm, shape: Resolved, device: str, capability: Capability | None = None) -> Query:
    """What a kernel case of the arm asks for; attributes of attention are features that an implementation declares."""
    axes = shape.axes
    features = tuple(name for name in FEATURES if axes.get(name))
    groups = shape.point.groups if shape.point is not None else ()
    return Query(
        op=shape.op,
        device=device,
        dtype=arm.model.dtype,
        page_size=arm.page_size,
        layout=arm.layout,
        q_heads=int(axes.get("q_heads", axes.get("kv_heads", 1))),  # a cache alone has no query heads
        kv_heads=int(axes.get("kv_heads", 1)),
        head_dim=int(axes.get("head_dim", 0)),
        mask=str(axes.get("mask", "causal")),
        features=features,
        capability=capability,
        query_len=max((group.query_tokens for group in groups), default=0),
    )


def objections(arm: Arm, queries: Sequence[Query], role: str = "target") -> list[tuple[str, Reason]]:
    """(name, reason) of everybody who was asked, where none of them could serve `queries` on any device; else nothing.

    Where the arm will run is not known here: each is judged on a device of its own, whatever its capability and
    whatever is installed. Code that is not loaded states no limits and serves.
    """
    op = queries[0].op
    known, choice = registry_of(arm), choice_of(arm, op, role)
    if choice is None:
        return []
    names = [choice.requested] if choice.requested != AUTO else []
    names += [name for name, _ in choice.chain] if choice.policy == "fallback" else []
    if choice.policy == "auto" or choice.requested == AUTO:
        names += [found.name for found in known.in_order(op)]
    found: list[tuple[str, Reason]] = []
    for name in dict.fromkeys(names):
        if is_plugin(name):
            return []
        candidate = known.get(name, op)
        reasons = check_all(candidate, [replace(query, device=candidate.devices[0]) for query in queries])
        if not reasons:
            return []
        found += [(name, reason) for reason in reasons]
    return found
