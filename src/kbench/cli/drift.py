"""The drift study of `kbench tune --drift`: steps in the order of time, trials of their shapes, each policy's bill."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kbench import catalog
from kbench.cli import kernel as options
from kbench.errors import MeasurementError, UsageError

if TYPE_CHECKING:
    from kbench.catalog import Point
    from kbench.run.session import Host
    from kbench.suite import Arm

MOST_BUCKETS = 32
"""Buckets that are tried, the commonest first: what is rarer is left out and counted."""


def study(
    op: str,
    implementation: str,
    source: str,
    costs: str,
    layer: dict[str, Any],
    host: Host,
    cache: Path | None,
    again: bool,
) -> dict[str, Any]:
    """Tune on the first half of steps, replay the other half under each policy.

    `source` holds the steps of a run, or is a trace, whose steps are modelled from the cost grid `costs`.
    """
    from kbench.kernels.drift import Trials, drift
    from kbench.kernels.tuner import rounded
    from kbench.run.tuning import tune
    from kbench.suite.shapes import part_of

    arm = options.plan_of(op, implementation, implementation, [], {}, layer, {}, 1).candidate
    parts = [part for point in _points(source, costs, arm) if (part := part_of(point, op)) is not None]
    if not parts:
        raise UsageError(f"no step calls {op}", where=source, remedy="name steps.parquet of a run, or a trace")
    sequence = [rounded(part) for part in parts]
    common = [bucket for bucket, _ in Counter(sequence).most_common(MOST_BUCKETS)]
    plan = options.plan_of(op, implementation, implementation, common, {}, layer, {}, 1)
    with TemporaryDirectory(prefix="kbench-drift-") as scratch:
        kept = cache or Path(scratch)
        facts = tune(plan.candidate, host, plan.loaded.suite.measure, op, common, kept, again=again)
    trials = {
        row["shape"]: Trials(row["heuristic_us"], row["best_us"], row["spent_us"])
        for row in facts["rows"]
        if row.get("best")
    }
    if not trials:
        raise MeasurementError(f"no trial of {implementation} succeeded: {facts['rows'][0]['status']}")
    layers = catalog.model_shape(str(layer["model"])).layers
    return {
        "op": op,
        "implementation": implementation,
        "device": host.device,
        "steps_from": source,
        **drift(sequence, trials, calls_a_step=layers),
        "trials": facts["rows"],
    }


def _points(source: str, costs: str, arm: Arm) -> list[Point]:
    """The batch of every step, in the order of time."""
    from kbench.suite.recorded import file_of, points_of, step_points

    path, variant = file_of(source, Path()), source.partition("#")[2]
    if not _is_trace(path):
        return step_points(path, variant)
    from kbench.engine.core import EngineConfig
    from kbench.measure.load import load_costs
    from kbench.targets.virtual import replay_virtual
    from kbench.traces.schema import read_trace

    if not costs:
        raise UsageError("the steps of a trace are modelled from a cost grid", remedy="--costs GRID.parquet#VARIANT")
    grid, _, named = costs.partition("#")
    table = load_costs(Path(grid), arm.model_copy(update={"name": named or arm.name}))
    return points_of(replay_virtual(read_trace(path), EngineConfig.from_arm(arm), table).steps)


def _is_trace(path: Path) -> bool:
    """Whether a Parquet file holds requests rather than steps; what is none at all, its reader says better."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return "arrival_us" in pq.read_schema(path).names
    except (pa.ArrowException, OSError):
        return False
