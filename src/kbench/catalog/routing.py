"""How many tokens visit each expert: a declared load instead of what a router happens to choose.

Owns the declaration and the load that it means. Seeded routers choose experts in a way that no trained model does, and
a mixture's cost depends on that choice, so a measurement names it. Which token visits which expert is the engine's
(`engine.routing_control`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kbench.errors import UsageError

RoutingKind = Literal["balanced", "zipf", "hot", "empty", "recorded"]
ROUTING_KINDS: tuple[str, ...] = get_args(RoutingKind)


@dataclass(frozen=True, slots=True)
class RoutingControl:
    """A declared load of experts.

    balanced: every expert is visited equally often · zipf: the r-th most visited in proportion to r^-alpha · hot: one
    expert by every token, the others equally often · empty: one expert by no token, the others equally often ·
    recorded: as `recorded`, a file of `engine.expert_load`, counts. Which expert is the hot, the empty or the r-th one
    differs from layer to layer and with the seed.
    """

    kind: RoutingKind
    alpha: float = 1.0
    """Exponent of zipf; 0 is balanced."""
    recorded: str = ""
    """File of kind recorded, as it was written down: whoever loads it knows relative to what."""

    def __post_init__(self) -> None:
        if self.kind not in ROUTING_KINDS:
            raise UsageError(f"routing {self.kind!r}", remedy=f"one of {', '.join(ROUTING_KINDS)}")
        if not (math.isfinite(self.alpha) and 0 <= self.alpha <= 20):
            raise UsageError(f"the exponent of zipf is {self.alpha}", remedy="use a number from 0 to 20")
        if (self.kind == "recorded") != bool(self.recorded):
            needs = "names no file of loads" if self.kind == "recorded" else f"{self.kind} reads no file of loads"
            raise UsageError(f"routing: {needs}", remedy="recorded with a file, or another kind without one")

    def __str__(self) -> str:
        told = {"zipf": f":{self.alpha:g}", "recorded": f":{self.recorded}"}
        return self.kind + told.get(self.kind, "")


def declared_visits(control: RoutingControl, experts: int, top_k: int) -> tuple[float, ...]:
    """Visits a token to each expert, the most visited first, `top_k` in all; of every kind but recorded.

    UsageError where a token cannot visit `top_k` different experts so.
    """
    if control.kind == "empty":
        return (*visits_of([1.0] * (experts - 1), top_k, str(control)), 0.0)
    if control.kind == "hot":
        return (
            1.0,
            *(visits_of([1.0] * (experts - 1), top_k - 1, str(control)) if top_k > 1 else [0.0] * (experts - 1)),
        )
    exponent = control.alpha if control.kind == "zipf" else 0.0
    return visits_of([rank**-exponent for rank in range(1, experts + 1)], top_k, str(control))


def visits_of(loads: Sequence[float], top_k: int, what: str) -> tuple[float, ...]:
    """Visits a token in proportion to `loads`, `top_k` in all.

    A token visits an expert once at most: what a load asks beyond that goes to the others, in their proportion.
    """
    reachable = sum(load > 0 for load in loads)
    if not 1 <= top_k <= reachable:
        raise UsageError(
            f"routing {what}: a token visits {top_k} experts, {reachable} are visited at all",
            remedy="declare a load of more experts",
        )
    full: set[int] = set()
    while True:
        rest = sum(load for index, load in enumerate(loads) if index not in full)
        scale = (top_k - len(full)) / rest if rest else 0.0
        over = {index for index, load in enumerate(loads) if index not in full and load * scale > 1.0}
        if not over:
            return tuple(1.0 if index in full else load * scale for index, load in enumerate(loads))
        full |= over
