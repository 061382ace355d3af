"""The cost grid of each arm: when it is wanted, which job measures it, and its rows as one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kbench.catalog import Case, model_shape
from kbench.engine.core import EngineConfig
from kbench.engine.costs import default_grid, write_cost_rows
from kbench.plan import Plan, model_label
from kbench.record import RunRecord
from kbench.run.session import Job

SHARES = 6
"""Each session measures every sixth point of the grid: no session is long, and neighbours come from different ones."""
REPEATS = 1


def case(plan: Plan) -> Case:
    return Case("step", "costs", model_label(plan.loaded.suite.model), "grid")


def wanted(plan: Plan, levels: Sequence[str]) -> bool:
    """Measured by level 2, and by a level 3 that is asked for alone, where the suite names no grid of its own."""
    workload = plan.loaded.suite.workload
    if workload is None or not {"step", "workload"} & set(levels):
        return False
    return not {arm.name for arm in plan.both} <= set(workload.costs)


def job(plan: Plan, session: int) -> Job:
    points = grid(plan)[session % SHARES :: SHARES]
    return Job("costs", str(case(plan)), "costs", {"points": points, "repeats": REPEATS})


def grid(plan: Plan) -> list[str]:
    """Points that cover what a scheduler under this suite's limits can ask for; the same for both arms."""
    arms = plan.both
    budget = max(arm.engine.max_batched_tokens for arm in arms)
    seqs = max(arm.engine.max_seqs for arm in arms)
    pool = max(arm.engine.kv_tokens for arm in arms)
    captured = next((EngineConfig.from_arm(arm).captured for arm in arms if arm.engine.graph == "graph"), ())
    # Sequences that share pages read more context, summed, than the pool holds.
    return default_grid(budget, seqs, _longest(plan, pool), 2 * pool, captured)


def _longest(plan: Plan, pool: int) -> int:
    """The longest context that a workload can reach: no longer than the pool, nor than the model allows."""
    preset = plan.loaded.suite.model.preset
    return min(pool, model_shape(preset).max_context if preset else pool)


def gather(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Rows of all complete sessions; the session number is made distinct across runs."""
    rows = []
    for index, record in enumerate(records):
        complete = set(record.complete_sessions)
        for trial in record.trials:
            if trial.session in complete and "rows" in trial.facts:
                rows += [{**row, "session": index * 1_000 + trial.session} for row in trial.facts["rows"]]
    return rows


def write(rows: list[dict[str, Any]], path: Path) -> None:
    write_cost_rows(rows, path)
