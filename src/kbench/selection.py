"""Which implementation serves which query, and every reason why not.

Owns `Query` (what a layer asks for), `Reason` (one machine-readable objection) and `check`, which returns *all*
objections of a catalogue entry. It knows what implementations declare, not what they do: measuring fills in `observed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kbench.catalog import Implementation, implementation, implementations
from kbench.errors import UsageError

PAGED = ("attention.decode", "attention.prefill", "attention.mla_decode", "kv.")
"""Operations to which pages, layouts and heads matter."""


@dataclass(frozen=True, slots=True)
class Query:
    """What one layer kind asks of an operation in one phase."""

    op: str
    device: str
    dtype: str
    page_size: int
    layout: str
    q_heads: int
    kv_heads: int
    head_dim: int
    graph: bool = False
    mask: str = "causal"
    features: tuple[str, ...] = ()
    """What a layer adds to plain attention: window, softcap, sinks."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One objection: what was wanted of which field, and what the implementation has."""

    field: str
    want: str
    have: str

    def __str__(self) -> str:
        return f"{self.field}: wants {self.want}, has {self.have}"


@dataclass(frozen=True, slots=True)
class SelectionRecord:
    """What was asked for, what was resolved, what ran (empty until a trace was read), and who was rejected why."""

    op: str
    requested: str
    resolved: str
    observed: str = ""
    rejected: tuple[tuple[str, tuple[Reason, ...]], ...] = field(default=())

    @property
    def drift(self) -> bool:
        return self.requested != self.resolved or (self.observed not in ("", self.resolved))


def check(candidate: Implementation, query: Query) -> list[Reason]:
    """Every reason why `candidate` cannot serve `query`; empty if it can."""
    reasons = []

    def want(name: str, value: str, have: tuple[str, ...], ok: bool) -> None:
        if not ok:
            reasons.append(Reason(name, value, " or ".join(have)))

    want("op", query.op, candidate.ops, candidate.serves(query.op))
    want("device", query.device, candidate.devices, query.device in candidate.devices)
    want("dtype", query.dtype, candidate.dtypes, query.dtype in candidate.dtypes)
    if not query.op.startswith(PAGED):
        return reasons
    want("layout", query.layout, candidate.layouts, query.layout in candidate.layouts)
    multiple = candidate.page_multiple_of
    want("page_size", str(query.page_size), (f"a multiple of {multiple}",), query.page_size % multiple == 0)
    if candidate.page_sizes:
        sizes = tuple(str(size) for size in candidate.page_sizes)
        want("page_size", str(query.page_size), sizes, query.page_size in candidate.page_sizes)
    if candidate.head_dims:
        dims = tuple(str(dim) for dim in candidate.head_dims)
        want("head_dim", str(query.head_dim), dims, query.head_dim in candidate.head_dims)
    if candidate.power_of_two_head_dim:
        ok = query.head_dim >= 16 and query.head_dim & (query.head_dim - 1) == 0
        want("head_dim", str(query.head_dim), ("a power of two of at least 16",), ok)
    want("heads", f"{query.q_heads}/{query.kv_heads}", ("q a multiple of kv",), query.q_heads % query.kv_heads == 0)
    want("graph", "capturable", ("eager only",), bool(candidate.graph) or not query.graph)
    for feature in query.features:
        want("feature", feature, candidate.features or ("none",), feature in candidate.features)
    want("mask", query.mask, ("causal",), query.mask == "causal")
    return reasons


def resolve(requested: str, *queries: Query) -> SelectionRecord:
    """Resolve a request under the policy `reject`: the named implementation, or UsageError with all reasons.

    Several queries are the kinds of layers of one model, of one operation: the implementation must serve all of them.
    """
    op = queries[0].op
    reasons = check_all(implementation(requested, op), queries)
    if reasons:
        able = [impl.name for impl in implementations(op) if not check_all(impl, queries)]
        raise UsageError(
            f"{requested} cannot serve {op}: " + "; ".join(str(reason) for reason in reasons),
            remedy=f"these can: {', '.join(able) or 'none'}",
        )
    return SelectionRecord(op=op, requested=requested, resolved=requested)


def check_all(candidate: Implementation, queries: Iterable[Query]) -> list[Reason]:
    """Every reason why `candidate` cannot serve all of `queries`, each once."""
    return list(dict.fromkeys(reason for query in queries for reason in check(candidate, query)))
