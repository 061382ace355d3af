"""What a layer asks of an operation, and every objection of an implementation to it.

Owns `Query`, `Reason` (one machine-readable objection) and `check`, which returns *all* objections of a catalogue
entry. It knows what implementations declare, not what they do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from kbench.catalog import Capability, GraphSupport, Implementation

PAGED = ("attention.decode", "attention.prefill", "attention.mla_decode", "kv.")
"""Operations to which pages, layouts and heads matter."""


@dataclass(frozen=True, slots=True)
class Query:
    """What one layer kind asks of an operation in one phase and role. A field at its default asks for nothing."""

    op: str
    device: str
    dtype: str
    page_size: int
    layout: str
    q_heads: int
    kv_heads: int
    head_dim: int
    graph: GraphSupport = GraphSupport.NEVER
    """Which batches must be captured."""
    mask: str = "causal"
    features: tuple[str, ...] = ()
    """What a layer adds to plain attention: window, softcap, sinks; `lse` where partial outputs are merged."""
    capability: Capability | None = None
    """Compute capability of the device; None: unknown, and not judged."""
    kv_dtype: str = ""
    """Element type of keys and values where it is not `dtype`."""
    v_head_dim: int = 0
    """Where values are not as wide as keys."""
    query_len: int = 0
    """The longest query of a sequence, in tokens."""
    role: str = "target"
    tensor_parallel: int = 1
    """Ranks that share the heads."""
    context_parallel: int = 1
    """Ranks that share the context: their partial outputs are merged by the log-sum-exp."""
    layers: str = ""
    """The kind of layers that asks, for people."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One objection: what was wanted of which field, and what the implementation has."""

    field: str
    want: str
    have: str

    def __str__(self) -> str:
        return f"{self.field}: wants {self.want}, has {self.have}"


class _Reasons(list[Reason]):
    def want(self, ok: bool, field: str, value: object, *have: object) -> None:
        if not ok:
            self.append(Reason(field, str(value), " or ".join(str(item) for item in have) or "none"))


def check(candidate: Implementation, query: Query) -> list[Reason]:
    """Every reason why `candidate` cannot serve `query`; empty if it can."""
    reasons = _Reasons()
    reasons.want(candidate.serves(query.op), "op", query.op, *candidate.ops)
    reasons.want(query.device in candidate.devices, "device", query.device, *candidate.devices)
    _capability(reasons, candidate, query)
    reasons.want(query.dtype in candidate.dtypes, "dtype", query.dtype, *candidate.dtypes)
    reasons.want(query.role in candidate.roles, "role", query.role, *candidate.roles)
    if not query.op.startswith(PAGED):
        _graph(reasons, candidate, query)
        return reasons
    kv_dtype = query.kv_dtype or query.dtype
    reasons.want(
        kv_dtype == query.dtype or kv_dtype in candidate.kv_dtypes, "kv_dtype", kv_dtype, "that of the queries",
        *candidate.kv_dtypes,
    )  # fmt: skip
    reasons.want(query.layout in candidate.layouts, "layout", query.layout, *candidate.layouts)
    _pages_and_heads(reasons, candidate, query)
    _graph(reasons, candidate, query)
    for feature in query.features:
        reasons.want(feature in candidate.features, "feature", feature, *candidate.features)
    if query.context_parallel > 1 and "lse" not in query.features:
        reasons.want("lse" in candidate.features, "feature", "lse", *candidate.features)
    reasons.want(query.mask in candidate.masks, "mask", query.mask, *candidate.masks)
    longest = candidate.longest_query
    reasons.want(not longest or query.query_len <= longest, "query_len", query.query_len, f"up to {longest}")
    return reasons


def _capability(reasons: _Reasons, candidate: Implementation, query: Query) -> None:
    have, low, high = query.capability, candidate.lowest_capability, candidate.highest_capability
    if query.device != "cuda" or have is None:
        return
    limits = f"{_dotted(low)} and newer" if high is None else f"{_dotted(low or (0, 0))} to {_dotted(high)}"
    within = (low is None or have >= low) and (high is None or have <= high)
    reasons.want(within, "capability", _dotted(have), limits)


def _dotted(capability: Capability | None) -> str:
    return ".".join(str(part) for part in capability or ())


def _pages_and_heads(reasons: _Reasons, candidate: Implementation, query: Query) -> None:
    multiple = candidate.page_multiple_of
    reasons.want(query.page_size % multiple == 0, "page_size", query.page_size, f"a multiple of {multiple}")
    sizes, dims, dim = candidate.page_sizes, candidate.head_dims, query.head_dim
    reasons.want(not sizes or query.page_size in sizes, "page_size", query.page_size, *sizes)
    reasons.want(not dims or dim in dims, "head_dim", dim, *dims)
    whole = dim >= 16 and dim & (dim - 1) == 0
    reasons.want(whole or not candidate.power_of_two_head_dim, "head_dim", dim, "a power of two of at least 16")
    reasons.want(query.v_head_dim in (0, dim), "v_head_dim", query.v_head_dim, f"that of the keys, {dim}")
    ranks = query.tensor_parallel
    reasons.want(
        query.kv_heads > 0 and query.q_heads % query.kv_heads == 0, "heads", f"{query.q_heads}/{query.kv_heads}",
        "q a multiple of kv",
    )  # fmt: skip
    # Fewer KV heads than ranks are replicated, as vLLM does.
    shared = query.kv_heads % ranks == 0 or ranks % max(query.kv_heads, 1) == 0
    reasons.want(
        query.q_heads % ranks == 0 and shared, "tensor_parallel", ranks,
        f"a divisor of {query.q_heads} query and {query.kv_heads} KV heads",
    )  # fmt: skip


def _graph(reasons: _Reasons, candidate: Implementation, query: Query) -> None:
    have = "eager only" if candidate.graph is GraphSupport.NEVER else f"up to {candidate.graph}"
    asked = GraphSupport(query.graph)
    reasons.want(candidate.graph >= asked, "graph", f"{asked} capture", have)


def check_all(candidate: Implementation, queries: Iterable[Query]) -> list[Reason]:
    """Every reason why `candidate` cannot serve all of `queries`, each once."""
    return list(dict.fromkeys(reason for query in queries for reason in check(candidate, query)))


def absent(candidate: Implementation) -> list[Reason]:
    """Packages that it needs and that this environment lacks. Nothing is imported."""
    return [Reason("package", package, "not installed") for package in candidate.requires if not _is_installed(package)]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
