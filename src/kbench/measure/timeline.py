"""Level 0: record a Chrome trace of engine steps with torch.profiler.

Owns the recording and its check that kernels were seen. Reading the trace is `kbench.timeline`'s. Profiling slows a
process for good (CUPTI stays resident), so this runs last, in a worker of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from kbench.catalog import Point, parse_point
from kbench.engine.phases import NullClock
from kbench.engine.runner import Runner
from kbench.measure.boundary import guarded
from kbench.measure.exec_batch import BatchState, open_runner
from kbench.protocol import Measurement, Outcome, Status
from kbench.suite.schema import Arm

STEP_MARK = "kbench.step "
PHASE_MARK = "kbench.phase "
_STEPS = 3
_WARMUP_STEPS = 3


class MarkClock:
    """Marks each phase in the trace, so that a reader can split what the device did."""

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return record_function(PHASE_MARK + name)


def record_timeline(arm: Arm, device: str, points: list[str], path: Path, seed: int, steps: int = _STEPS) -> Outcome:
    """Trace `steps` steps of each point into `path` (.json or .json.gz); facts say what was seen."""
    return guarded(lambda: _record(arm, device, points, path, seed, max(steps, _STEPS)))


def _record(arm: Arm, device: str, points: list[str], path: Path, seed: int, steps: int) -> Outcome:
    parsed = [parse_point(point) for point in points]
    runner = open_runner(arm, device, parsed)
    states = list(_states(runner, parsed, seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _profiled(device) as profiler:
        for point, state in states:
            for _ in range(steps):
                state.restore()
                runner.idle()
                with record_function(f"{STEP_MARK}{point}"):
                    state.step(MarkClock())
                    runner.idle()
    launched = _launched(profiler, device)
    facts = {"steps": steps, "points": [str(point) for point in parsed], "kernels": launched, "device": device}
    if launched == 0:
        return Outcome(Status.FAILED, "the profiler saw no kernel: is another profiler attached?", facts=facts)
    profiler.export_chrome_trace(str(path))
    return Outcome(measurements=(Measurement("kernels", "count", launched, clock="profiler"),), facts=facts)


def _states(runner: Runner, points: list[Point], seed: int) -> Iterator[tuple[Point, BatchState]]:
    """A warm state for each point, all in one pool: only one is stepped at a time, and each restores itself."""
    first_id = 0
    null = NullClock()
    for index, point in enumerate(points):
        state = BatchState(runner, point, seed + index, first_id=first_id)
        first_id += point.batch
        state.fill(seed + index)
        for _ in range(_WARMUP_STEPS):
            state.restore()
            state.step(null)
        runner.idle()
        yield point, state


@contextmanager
def _profiled(device: str) -> Iterator[profile]:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, acc_events=True) as profiler:
        yield profiler


def _launched(profiler: profile, device: str) -> int:
    """Kernels on the device, or operators on the CPU."""
    events = profiler.events() or ()  # type: ignore[no-untyped-call]
    if device == "cuda":
        return len([event for event in events if event.device_type.name == "CUDA"])
    return len([event for event in events if event.name.startswith("aten::")])
