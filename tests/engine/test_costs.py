"""The cost table: exact where it was measured, honest about the rest. All costs here are invented."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from kbench.catalog import parse_point
from kbench.engine.core import ExactContent, Request, Scheduled, StepPlan
from kbench.engine.costs import CostTable, StepShape, default_grid, read_cost_rows
from kbench.engine.sizes import captured_sequences
from kbench.errors import EvidenceError, UsageError

GRID = default_grid(512, 32, 4_096, 65_536)


def shape(point: str) -> StepShape:
    return StepShape.of_point(parse_point(point))


def invented_ns(point: str) -> float:
    """A machine that nobody has: linear, but for a jump at 16 sequences such as a captured graph makes."""
    s = shape(point)
    linear = 3e6 + 2e4 * s.decode_seqs + 4.0 * s.decode_context_tokens + 2e4 * s.prefill_tokens + 0.02 * s.prefill_work
    return linear + 5e5 * (s.decode_seqs > 16)


def rows(points: list[str] = GRID, **more: Any) -> list[dict[str, Any]]:
    return [{"variant": "invented", "point": point, "wall_ns": invented_ns(point), **more} for point in points]


def test_the_shape_of_a_point() -> None:
    assert astuple(shape("2*1@100+1*8@50")) == (2, 200, 8, 1, 400, 50)
    assert [shape(point).kind for point in ("1", "4*8", "1+2*8")] == ["decode", "prefill", "mixed"]
    assert StepShape().kind == "empty"


def test_a_plan_and_a_point_of_the_same_batch_have_the_same_shape() -> None:
    request = Request(0, 100, 9, ExactContent(list))
    sequences = parse_point("3*1@64+2*16@32+1*40").sequences
    plan = StepPlan(tuple(Scheduled(request, query, kv, True) for query, kv in sequences))
    assert StepShape.of(plan) == shape("3*1@64+2*16@32+1*40")


SHARED = ("1*512@4096", "8*64@4096")
"""As many tokens at the same mean KV length: they share one correction."""


@pytest.mark.parametrize("point", [point for point in GRID if "+" not in point])
def test_a_measured_point_costs_what_was_measured(point: str) -> None:
    table = CostTable.fit(rows())
    assert table.step_ns(shape(point)) == pytest.approx(invented_ns(point), rel=0.02 if point in SHARED else 1e-6)


def test_between_measured_points_it_interpolates_and_beside_them_it_stays_close() -> None:
    table = CostTable.fit(rows())
    for point in ("4*1@500", "10*1@1000", "1*300@900", "2*200", "20*1@700+1*200@600"):
        assert table.step_ns(shape(point)) == pytest.approx(invented_ns(point), rel=0.08)


def test_the_median_of_repetitions_counts_and_rows_may_come_in_any_order() -> None:
    noisy = rows() + [row | {"wall_ns": row["wall_ns"] * factor} for row in rows() for factor in (0.9, 3.0)]
    table, plain = CostTable.fit(reversed(noisy)), CostTable.fit(rows())
    assert table.points == plain.points == len({shape(point) for point in GRID})
    for point in GRID:
        assert table.step_ns(shape(point)) == plain.step_ns(shape(point))


def test_nanoseconds_are_whole_and_positive() -> None:
    table = CostTable.fit(rows())
    assert isinstance(table.step_ns(shape("3*1@77")), int)
    free = CostTable.fit([row | {"wall_ns": 0.001} for row in rows()])
    assert free.step_ns(shape("1")) == 1


def test_the_hold_out_error_is_small_for_a_simple_machine_and_large_for_a_random_one() -> None:
    held = CostTable.fit(rows()).hold_out()
    assert held.points == len({shape(point) for point in GRID})
    assert held.median < 0.02
    assert held.inside_worst <= held.worst
    wild = [row | {"wall_ns": 1e6 * (1 + (index * 7_919) % 97)} for index, row in enumerate(rows())]
    assert CostTable.fit(wild).hold_out().median > 0.2


def test_outside_is_beyond_any_axis_or_a_kind_that_was_not_measured() -> None:
    table = CostTable.fit(rows())
    assert not any(table.extrapolated(shape(point)) for point in GRID)
    assert not table.extrapolated(shape("1"))
    for point in ("33*1@64", "1*1@70000", "1*513", "1*500@5000", "32*1@2000+1*2@66000"):
        assert table.extrapolated(shape(point))
    decodes = CostTable.fit(rows([point for point in GRID if shape(point).kind == "decode"]))
    assert decodes.extrapolated(shape("1*2"))
    assert decodes.extrapolated(shape("1+1*2"))


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(EvidenceError, match="3 points"):
        CostTable.fit(rows(GRID[:3]))
    with pytest.raises(UsageError, match="several variants"):
        CostTable.fit([*rows(), rows()[0] | {"variant": "other"}])
    for wrong in (0.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="ns"):
            CostTable.fit([*rows(), rows()[0] | {"wall_ns": wrong}])
    with pytest.raises(UsageError, match="without a usable"):
        CostTable.fit([{"variant": "x", "point": "1"}])


def test_a_file_gives_the_same_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.parquet"
    table = CostTable.fit(rows(device_ns=5.0, session=0, repeat=1))
    table.write_parquet(path)
    again = CostTable.read_parquet(path, "invented")
    assert [again.step_ns(shape(point)) for point in GRID] == [table.step_ns(shape(point)) for point in GRID]
    assert read_cost_rows(path)[0]["decode_seqs"] == 1
    with pytest.raises(EvidenceError, match="it has invented"):
        CostTable.read_parquet(path, "page64")


def test_what_is_no_grid_is_one_line(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(UsageError, match="not a readable cost grid"):
        read_cost_rows(tmp_path / "missing.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(UsageError, match="not a readable cost grid"):
        read_cost_rows(tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UsageError, match="version none"):
        read_cost_rows(tmp_path / "other.parquet")


@pytest.mark.parametrize(
    "limits", [(512, 32, 4_096), (8_192, 256, 131_072, 600_000), (2_048, 64, 8_192, 16_384), (128, 8, 1_024, 2_048)]
)
def test_the_grid_spans_what_a_scheduler_can_ask_for(limits: tuple[int, ...]) -> None:
    budget, seqs, context = limits[:3]
    points = [parse_point(point) for point in default_grid(*limits)]
    assert 30 <= len(points) <= 45
    shapes = [StepShape.of_point(point) for point in points]
    assert {each.kind for each in shapes} == {"decode", "prefill", "mixed"}
    assert max(each.decode_seqs for each in shapes) == seqs
    assert max(each.prefill_tokens for each in shapes) == budget
    assert max(point.context for point in points) == context
    assert all(point.query_tokens <= budget and point.batch <= seqs for point in points)
    if len(limits) > 3:
        assert all(point.kv_tokens <= limits[3] for point in points)


def test_a_grid_of_captured_sizes_measures_those() -> None:
    points = [parse_point(point) for point in default_grid(2_048, 50, 8_192, 65_536, captured_sequences(50))]
    assert 30 <= len(points) <= 45
    alone = {point.batch for point in points if point.query_tokens == point.batch}
    assert alone == {1, 4, 8, 24, 50}
    assert alone <= set(captured_sequences(50))


@pytest.mark.parametrize("limits", [(1, 1, 1), (2, 1, 2), (1, 4, 64), (4, 2, 8), (16, 16, 4, 20)])
def test_tiny_engines_have_a_valid_grid_too(limits: tuple[int, ...]) -> None:
    points = [parse_point(point) for point in default_grid(*limits)]
    assert points
    assert all(point.context <= limits[2] and point.query_tokens <= limits[0] for point in points)
