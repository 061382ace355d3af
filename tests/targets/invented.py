"""Engines, invented step costs and small traces for replays. No machine has these costs."""

from __future__ import annotations

from typing import Any

from kbench.catalog import parse_point
from kbench.engine.core import EngineConfig
from kbench.engine.costs import CostTable, StepShape, default_grid
from kbench.traces.schema import RequestRow, Trace, TraceMeta, trace_from_rows


def invented_rows(variant: str, grid: list[str], slowness: float = 1.0) -> list[dict[str, Any]]:
    """1 ms a step and 10 µs a token, a linear machine: the fit is exact to rounding."""
    found = []
    for point in grid:
        shape = StepShape.of_point(parse_point(point))
        wall_ns = slowness * (1e6 + 1e4 * (shape.decode_seqs + shape.prefill_tokens))
        row = {"variant": variant, "point": point, "wall_ns": wall_ns, "device_ns": wall_ns}
        found.append(row | {"session": 0, "repeat": 0})
    return found


def invented_costs(slowness: float = 1.0) -> CostTable:
    return CostTable.fit(invented_rows("invented", default_grid(64, 8, 512), slowness))


def engine(page_size: int = 4, pages: int = 64, budget: int = 64, seqs: int = 8, **more: Any) -> EngineConfig:
    return EngineConfig(page_size, pages, budget, seqs, **more)


def trace(*rows: RequestRow, block_tokens: int | None = None) -> Trace:
    return trace_from_rows(rows, TraceMeta(source="test", importer="test", block_tokens=block_tokens))


def root(session: int, arrival_us: int, prompt: int, output: int, **more: Any) -> RequestRow:
    return RequestRow(session_id=session, input_tokens=prompt, output_tokens=output, arrival_us=arrival_us, **more)


def turn(
    session: int, number: int, parents: tuple[int, ...], think_us: int, prompt: int, output: int, **more: Any
) -> RequestRow:
    return RequestRow(
        session_id=session,
        turn=number,
        parent_ids=parents,
        think_us=think_us,
        input_tokens=prompt,
        output_tokens=output,
        **more,
    )
