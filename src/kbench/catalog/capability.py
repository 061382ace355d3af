"""What an implementation can be asked for: every condition of the contract, as plain facts.

Owns the vocabulary (`Implementation`, graph support, compute capabilities). Whether a query is met is judged by
`kbench.selection`; which implementations there are is `catalog.implementations`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

Capability = tuple[int, int]
"""Compute capability of a CUDA device, e.g. (9, 0)."""
AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)
DTYPES = ("float32", "float16", "bfloat16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
"""Element types that keys and values may be stored in."""
LAYOUTS = ("NHD", "HND")
HALF = ("float16", "bfloat16")
ROLES = ("target", "draft")
"""The model whose tokens are delivered, and the one that guesses them ahead."""
AUTO = "auto"
"""The request that names nobody: the registry's order decides."""
CUSTOM = "custom"
"""A slot that a suite fills with an implementation of its own; empty, it serves nothing."""


class GraphSupport(IntEnum):
    """Which batches can be replayed from a captured CUDA graph; each level includes those before it."""

    NEVER = 0
    SINGLE_TOKEN = 1
    """Every query is one token."""
    UNIFORM = 2
    """All queries are equally long."""
    ALWAYS = 3
    """Any mixture."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class Implementation:
    """Who computes an operation, and what it can be asked for. `entry` is `module:attribute`, imported when used."""

    name: str
    ops: tuple[str, ...]
    entry: str
    summary: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    lowest_capability: Capability | None = None
    """CUDA: the oldest device that it runs on; None: no limit is known."""
    highest_capability: Capability | None = None
    """CUDA: the newest one."""
    dtypes: tuple[str, ...] = DTYPES
    kv_dtypes: tuple[str, ...] = ()
    """Element types of keys and values that it reads besides that of its queries."""
    page_multiple_of: int = 1
    page_sizes: tuple[int, ...] = ()
    """The only ones, in tokens; empty: every multiple of `page_multiple_of`."""
    layouts: tuple[str, ...] = LAYOUTS
    head_dims: tuple[int, ...] = ()
    """The only ones, in elements; empty: all."""
    power_of_two_head_dim: bool = False
    """Powers of two from 16 on, as Triton's dot product wants them."""
    masks: tuple[str, ...] = ("causal",)
    features: tuple[str, ...] = ()
    """What it adds to plain attention: window, softcap, sinks, lse (the log-sum-exp beside the output)."""
    longest_query: int = 0
    """Most query tokens a sequence; 0: what the operation says (one where it is a decode)."""
    graph: GraphSupport = GraphSupport.NEVER
    roles: tuple[str, ...] = ROLES
    expects_kernel: str = ""
    """Part of the name of a kernel that must be seen in a trace, else something else ran; empty: none is known."""
    expects_operator: str = ""
    """Part of the name of a torch operator that it must be seen to call, wherever operators are seen."""
    never: tuple[str, ...] = ()
    """Parts of names that show that somebody else computed."""
    installed: bool = False
    """Brought by a package through an entry point, or by a suite: `entry` is a plug-in reference."""
    requires: tuple[str, ...] = ()
    """Packages that must be installed."""
    priority: int = 10
    """Place in the order in which `auto` tries, highest first, ranked by hand and not by measurement; 0: never."""

    def serves(self, op: str) -> bool:
        """`gemm` serves `gemm.qkv` too."""
        return op in self.ops or op.partition(".")[0] in self.ops
