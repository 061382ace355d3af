"""Declared routing: which experts each token of a step visits, so that their load is what a measurement says it is.

Owns the assignment of tokens to experts and its tables on the device. The first n tokens of any step have the declared
load as nearly as n tokens can, for every n; the same seed gives the same assignment. The router is computed as ever and
its scores weigh what is visited. A table is read at a fixed address, so that a captured graph may hold it. What loads
there are is `catalog.routing`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kbench.catalog import ModelShape, RoutingControl, declared_visits, visits_of
from kbench.engine.expert_load import read_loads
from kbench.errors import UsageError

if TYPE_CHECKING:
    from kbench.engine.runner import Runner


Visits = dict[int, tuple[tuple[float, ...], Sequence[int]]]
"""By layer with experts: visits a token by rank, and which expert has which rank."""


class DeclaredRouting:
    """A `Runner.routing`: experts by layer and row, whatever the router chose."""

    def __init__(self, visits: Visits, *, rows: int, device: torch.device) -> None:
        """`rows`: most tokens of a step."""
        self._rows = rows
        self._tables = {}
        made: dict[tuple[float, ...], NDArray[np.int64]] = {}
        for layer, (wanted, experts) in visits.items():
            if wanted not in made:
                made[wanted] = assignment(wanted, rows)
            self._tables[layer] = torch.from_numpy(np.asarray(experts, dtype=np.int64)[made[wanted]]).to(device)

    def __call__(self, layer: int, chosen: Tensor) -> Tensor:
        tokens = chosen.shape[0]
        if tokens > self._rows:
            raise UsageError(f"routing is declared for {self._rows} tokens a step, this one has {tokens}")
        return self._tables[layer][:tokens]


def control_routing(runner: Runner, control: RoutingControl | None, *, seed: int, root: Path = Path()) -> None:
    """Let tokens visit experts as declared from the next step on; None gives the choice back to the routers.

    A recorded file is relative to `root`. Captured graphs hold the routing that they were captured with; a new one is
    captured again. UsageError: a model without experts, or a load that its tokens cannot have.
    """
    shape = runner.shape
    if control is None:
        runner.routing = None
        return
    rows = max(runner.config.max_batched_tokens, runner.config.max_seqs)
    visits = _visits(shape, control, seed, root)
    runner.routing = DeclaredRouting(visits, rows=rows, device=runner.device)


def _visits(shape: ModelShape, control: RoutingControl, seed: int, root: Path) -> Visits:
    layers = [layer for layer in range(shape.layers) if shape.has_experts(layer)]
    if not layers:
        raise UsageError(
            f"routing {control}: {shape.name} has no experts", remedy="leave it out, or name another model"
        )
    if control.kind != "recorded":
        declared = declared_visits(control, shape.experts, shape.experts_per_token)
        return {layer: (declared, _ranks(shape.experts, seed, layer)) for layer in layers}
    loads = read_loads(root / control.recorded, shape)
    rows = loads if len(loads) == len(layers) else loads * len(layers)
    return {
        layer: (visits_of(row, shape.experts_per_token, f"{control}, layer {layer}"), range(shape.experts))
        for layer, row in zip(layers, rows, strict=True)
    }


def _ranks(experts: int, seed: int, layer: int) -> list[int]:
    named = list(range(experts))
    random.Random(f"{seed}/routing/{layer}").shuffle(named)
    return named


def assignment(visits: tuple[float, ...], rows: int) -> NDArray[np.int64]:
    """`[rows, top_k]`: each row visits the experts that are furthest behind their share of the rows so far.

    No expert twice in a row, one without visits never. Equally far behind: the first.
    """
    wanted = np.asarray(visits)
    top_k = round(float(wanted.sum()))
    always = np.where(wanted >= 1.0, np.inf, np.where(wanted > 0.0, 0.0, -np.inf))
    behind = always.copy()
    made = np.empty((rows, top_k), dtype=np.int64)
    for row in range(rows):
        behind += wanted
        # Rounded, so that equal shares stay a tie however often they were added up.
        chosen = np.argsort(-np.round(behind, 9), kind="stable")[:top_k]
        behind[chosen] -= 1.0
        made[row] = chosen
    return made
