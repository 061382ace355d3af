"""One clean engine step under the clocks: nothing stamped inside, the device idle at both ends.

Owns the reading of wall and device time of a step. What is done with many of them is the callers'.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch

from kbench.engine.phases import NullClock
from kbench.engine.runner import Runner
from kbench.measure.exec_batch import BatchState

_NULL = NullClock()


def clean_step(runner: Runner, state: BatchState) -> tuple[int, int]:
    """Wall and device time of one step from its starting state, in ns; the latter is 0 where there is no such clock."""
    state.restore()
    runner.idle()
    if runner.device.type != "cuda":
        begin = perf_counter_ns()
        state.step(_NULL)
        return perf_counter_ns() - begin, 0
    first, last = _event(), _event()
    begin = perf_counter_ns()
    first.record()
    state.step(_NULL)
    last.record()
    runner.idle()
    wall = perf_counter_ns() - begin
    return wall, round(first.elapsed_time(last) * 1e6)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
