"""Recorded loads of experts: how often each was visited, by layer.

Owns the file (`kbench.expert_load/1`: JSON, `layers` is a list of lists of counts, one list a layer with experts or one
for all of them) and the recorder that counts while an engine runs. Needs no torch to read one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbench.catalog import ModelShape
from kbench.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from kbench.engine.model import Routing

SCHEMA = "kbench.expert_load/1"
Loads = tuple[tuple[float, ...], ...]
"""One row a layer with experts, or one row for all of them."""


class LoadRecorder:
    """A `Runner.routing` that looks on: the router's choice, or that of `inner`, is counted and passed on."""

    def __init__(self, shape: ModelShape, inner: Routing | None = None) -> None:
        self._experts = shape.experts
        self._inner = inner
        self.counts: dict[int, list[int]] = {
            layer: [0] * shape.experts for layer in range(shape.layers) if shape.has_experts(layer)
        }
        """Visits of each expert, by layer."""

    def __call__(self, layer: int, chosen: Tensor) -> Tensor:
        ids = chosen if self._inner is None else self._inner(layer, chosen)
        # Reads the routing on the host: for recording, not while a step is timed.
        row = self.counts[layer]
        for expert, visits in enumerate(ids.reshape(-1).bincount(minlength=self._experts).tolist()):
            row[expert] += visits
        return ids

    def write(self, path: Path) -> None:
        document = {"schema": SCHEMA, "layers": [self.counts[layer] for layer in sorted(self.counts)]}
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def read_loads(path: Path, shape: ModelShape) -> Loads:
    """Counts of a file, checked against the model. UsageError: no file, not of the schema, or of another model."""
    where = str(path)
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the load of experts: {error.strerror or error}", where=where) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not a load of experts: {error}", where=where, remedy=f"write {SCHEMA}") from error
    rows = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(rows, list) or document.get("schema") != SCHEMA:
        raise UsageError(f"not of the schema {SCHEMA}", where=where, remedy='"schema" and "layers", see docs/models.md')
    sparse = sum(shape.has_experts(layer) for layer in range(shape.layers))
    if len(rows) not in (1, sparse):
        raise UsageError(
            f"loads of {len(rows)} layers, {shape.name} has {sparse} with experts",
            where=where,
            remedy="one list for all layers, or one a layer",
        )
    return tuple(_row(row, index, shape.experts, where) for index, row in enumerate(rows))


def _row(row: Any, index: int, experts: int, where: str) -> tuple[float, ...]:
    if not isinstance(row, list) or len(row) != experts:
        have = f"{len(row)} counts" if isinstance(row, list) else "no list"
        raise UsageError(f"layers[{index}] has {have}, the model {experts} experts", where=where)
    for expert, count in enumerate(row):
        usable = isinstance(count, int | float) and not isinstance(count, bool)
        if not usable or not math.isfinite(count) or count < 0:
            raise UsageError(f"layers[{index}][{expert}] is {count!r}, not a count", where=where, remedy="0 or more")
    return tuple(float(count) for count in row)
