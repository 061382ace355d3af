"""What replay, padding and overlap are worth on one case: the same step launched in other ways, in turn.

Owns the passes beside the gate number. Ways are interleaved step by step, so that drift falls on all of them alike. It
judges nothing and builds no case.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter_ns

from kbench.engine.phases import NullClock
from kbench.engine.runner import Runner
from kbench.measure.exec_batch import BatchState
from kbench.protocol import Measurement

_ROUNDS = (4, 30)
_ROUNDS_NS = 200_000_000
_OVERLAPPED_STEPS = 24
_OVERLAPPED_WARMUP = 4

Step = Callable[[], int]
"""One clean step from its starting state; its wall time in ns."""


def other_ways(runner: Runner, state: BatchState, step: Step) -> list[Measurement]:
    """`overlapped_step_time` of every case; of those that are replayed also `eager_step_time` and `padding_time`.

    `padding_time` is what the rows that stand for nobody cost: the step as it is, less the same step captured in its
    own size. Leaves the runner as it was.
    """
    taken = [Measurement("overlapped_step_time", "us", overlapped_us(runner, state))]
    step()
    record = runner.last_step
    if record.mode == "eager":
        return taken
    ways: dict[str, Step] = {"as is": step, "eager": lambda: _forced(runner, step, eager="measured beside its graph")}
    if record.padded_tokens:
        ways["exact"] = lambda: _forced(runner, step, exact=True)
    times = interleaved(ways)
    taken.append(Measurement("eager_step_time", "us", median(times["eager"]) / 1e3))
    exact = median(times["exact"]) if record.padded_tokens else median(times["as is"])
    taken.append(Measurement("padding_time", "us", (median(times["as is"]) - exact) / 1e3))
    return taken


def _forced(runner: Runner, step: Step, *, eager: str = "", exact: bool = False) -> int:
    runner.force(eager=eager, exact=exact)
    try:
        return step()
    finally:
        runner.force()


def interleaved(ways: dict[str, Step]) -> dict[str, list[int]]:
    """Times of each way, one step of each in turn; every way is warm before the first that counts."""
    for step in ways.values():
        step()
        step()
    times: dict[str, list[int]] = {name: [] for name in ways}
    fewest, most = _ROUNDS
    deadline = perf_counter_ns() + _ROUNDS_NS
    for count in range(most):
        if count >= fewest and perf_counter_ns() > deadline:
            break
        for name, step in ways.items():
            times[name].append(step())
    return times


def overlapped_us(runner: Runner, state: BatchState) -> float:
    """Time from the end of one step to the end of the next, where the host begins each before it waits for the one
    before: the median of a run, whose first steps are left out.

    Every step starts from the same state, which the host puts back in between: that is counted.
    """
    state.restore()
    runner.idle()
    null = NullClock()
    ticket = state.step_overlapped(None, null)
    ends = []
    for _ in range(_OVERLAPPED_STEPS + _OVERLAPPED_WARMUP + 1):
        state.rewind()
        ticket = state.step_overlapped(ticket, null)
        ends.append(perf_counter_ns())
    runner.end(ticket, null)
    periods = [after - before for before, after in pairwise(ends[_OVERLAPPED_WARMUP:])]
    return median(periods) / 1e3
