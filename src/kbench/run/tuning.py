"""`kbench tune` from outside: one worker that tries configurations, and what it says.

Owns the worker's life. Which configurations there are and which is best is the worker's business (`measure.tuning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kbench.errors import MeasurementError, UsageError
from kbench.protocol import Outcome, Status
from kbench.run.session import Host
from kbench.run.workers import Worker, WorkerLost
from kbench.suite.schema import Arm, Measure

OPEN_TIMEOUT_S = 120.0
SHAPE_TIMEOUT_S = 120.0


def tune(
    arm: Arm, host: Host, measure: Measure, op: str, shapes: Sequence[str], cache: Path, *, again: bool = False
) -> dict[str, Any]:
    """The facts of the job. Raises UsageError where there is nothing to tune, MeasurementError where it failed."""
    with TemporaryDirectory(prefix="kbench-tune-") as logs:
        worker = Worker(arm.name, Path(logs) / "worker.log", host.command)
        try:
            opening = {"arm": arm.model_dump(mode="json"), "device": host.device, "torch": True}
            _checked(worker.ask("open", {**opening, "measure": measure.model_dump(mode="json")}, OPEN_TIMEOUT_S))
            asked = {"name": "tune", "op": op, "shapes": list(shapes), "cache": str(cache.absolute()), "again": again}
            return _checked(worker.ask("job", asked, OPEN_TIMEOUT_S + SHAPE_TIMEOUT_S * len(shapes))).facts
        except WorkerLost as lost:
            what = f"tuning {op} {lost.status}: {lost.message}"
            raise MeasurementError(what, remedy="run kbench kernel on it first") from lost
        finally:
            worker.close()


def _checked(outcome: Outcome) -> Outcome:
    if outcome.status is Status.UNSUPPORTED:
        raise UsageError(outcome.message)
    if outcome.status is not Status.OK:
        raise MeasurementError(f"tuning {outcome.status}: {outcome.message}")
    return outcome
