"""Cost rows: one a point and repeat, with the step's shape, in the order of the plan."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kbench.catalog import parse_point
from kbench.engine.costs import CostTable, StepShape
from kbench.errors import UsageError
from kbench.measure.costs import measure_costs
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

torch.set_num_threads(1)
POINTS = ["1*1@64", "4*1@64", "1*1@256", "4*1@256", "1*32", "1*96", "1*32@128+2*1@64"]


def make_arm() -> Arm:
    return Arm(
        name="page16",
        model=ModelSettings(preset="tiny"),
        engine=EngineSettings(kv_tokens=64, max_batched_tokens=64),
        prefill="sdpa",
        decode="sdpa-gather",
        page_size=16,
        layout="NHD",
        seed=1,
        root=".",
    )


def test_rows_carry_point_shape_and_time_and_fit_a_table() -> None:
    rows = measure_costs(make_arm(), "cpu", POINTS, 2, seed=1, session=3)
    assert Counter(row["point"] for row in rows) == {str(parse_point(point)): 2 for point in POINTS}
    assert Counter(row["repeat"] for row in rows) == {0: len(POINTS), 1: len(POINTS)}
    assert {row["variant"] for row in rows} == {"page16"}
    assert {row["session"] for row in rows} == {3}
    assert all(row["wall_ns"] > 0 and row["device_ns"] == 0 for row in rows)
    mixed = next(row for row in rows if "+" in row["point"])
    assert (mixed["decode_seqs"], mixed["prefill_tokens"], mixed["prefill_work"]) == (2, 32, 32 * 128)
    table = CostTable.fit(rows)
    assert table.step_ns(StepShape.of_point(parse_point("2*1@128"))) > 0


def test_an_empty_grid_is_a_usage_error() -> None:
    for points, repeats in (([], 1), (["1*1@64"], 0)):
        with pytest.raises(UsageError, match="cost grid"):
            measure_costs(make_arm(), "cpu", points, repeats, seed=1)
    with pytest.raises(UsageError, match="cannot read"):
        measure_costs(make_arm(), "cpu", ["one"], 1, seed=1)
