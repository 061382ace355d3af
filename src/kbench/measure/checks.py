"""What is asked of timed calls besides right answers: none left out, none remembered, none still running.

Owns three looks at the calls of a timer after its windows. Every input set's replayed answer is held against a plain
call's. A round on fresh activations must not take much longer than a round on the same ones again. And when a call has
ended nothing may still write its answer, nor may the device still work.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kbench.clock.escape import device_escape, late_output
from kbench.clock.timer import Timer
from kbench.kernels.guarding import between_guards, readable
from kbench.kernels.holding import hold
from kbench.kernels.verify import LATE, poison, timed
from kbench.measure.answers import TimedCall, Watch, copied
from kbench.ops.base import row_errors, tensors_of

REPLAY_LIMIT = 0.05
"""Relative L2 error of a row between a replayed and a plain call, far above rounding and far below a wrong answer."""
MEMO_ROUNDS = (5, 20, 60)
"""A suspicion is looked at again, longer: machines are noisy."""
MEMO_FACTOR = 2.0
MEMO_FLOOR_US = 2.0
"""A call on fresh activations may take this much longer than one on the same again before it is called memoised."""
LATE_CALLS = 4


def replay_problem(watch: Watch, timer: Timer) -> str:
    """Whether every input set's answer in a timed round is that of a plain call, on activations it never saw.

    A capture that leaves calls out, or computes one of many, answers poison or another call's answer here.
    """
    watch.redraw()
    watch.poison(float("nan"))
    timer.round()
    watch.rest()
    replayed = [copied(call.latest) for call in watch.calls]
    for index, call in enumerate(watch.calls):
        watch.op.restore(call.inputs)
        out = between_guards(watch.op.outputs(call.inputs))
        poison(out, float("nan"))
        plain = call.steps.run(call.state, call.plan, out)
        watch.rest()
        if not watch.op.repeats(plain):  # its own random numbers: the replayed answer is judged by itself
            judgement = hold(watch.op, replayed[index], watch.op.standard(call.inputs), watch.defences)
            if not judgement.ok:
                return f"output of a timed call: input set {index} of {len(watch.calls)}: {judgement.problem}"
            continue
        for have, want in zip(tensors_of(replayed[index]), tensors_of(plain), strict=False):
            if have.shape != want.shape or not _close(have, want):
                return f"output of a timed call: input set {index} of {len(watch.calls)} was not computed when timed"
    return ""


def memoised(watch: Watch, timer: Timer) -> str:
    """Whether calls are fast because their inputs repeat: rounds on fresh activations beside rounds on the same."""
    if not any(tensor.dtype.is_floating_point for tensor in watch.op.activations(watch.calls[0].inputs)):
        return ""
    for rounds in MEMO_ROUNDS:
        first, second = _fresh_and_again(watch, timer, rounds)
        if first <= MEMO_FACTOR * second or first - second <= MEMO_FLOOR_US:
            return ""
    return f"a call on fresh inputs takes {first:.1f} µs, on the same again {second:.1f} µs: answers are kept"


def _fresh_and_again(watch: Watch, timer: Timer, rounds: int) -> tuple[float, float]:
    """The fastest call of each kind, in µs. Before both, the same memory is written: only the values differ."""
    fresh, again = [], []
    for _ in range(rounds):
        watch.redraw()
        fresh.append(timed(timer.round, watch.device)[1] / timer.round_calls)
        watch.rewrite()
        again.append(timed(timer.round, watch.device)[1] / timer.round_calls)
    return min(fresh), min(again)


def still_running(watch: Watch) -> str:
    """Whether work goes on when a call has ended: its answer changes later, or the device is not idle."""
    if watch.device.type == "cuda":
        escape = device_escape(watch.calls[0], watch.device)
        if escape.escaped:
            text = f"{escape.tail_us:.0f} µs after its stream the device was still working"
            return f"ASYNC_ESCAPE: {text} ({escape.idle_tail_us:.0f} µs around nothing)"
    for call in watch.calls[:LATE_CALLS]:
        for block in (False, True)[: 2 if watch.device.type == "cuda" else 1]:
            answer = partial(_answered, call)
            if late_output(answer, partial(watch.poison, -3.5), watch.rest, block=block):
                return f"ASYNC_ESCAPE: {LATE}"
    return ""


def _answered(call: TimedCall) -> object:
    return tuple(tensor for tensor in tensors_of(call()) if readable(tensor))


def _close(have: Tensor, want: Tensor) -> bool:
    if not want.dtype.is_floating_point:
        return torch.equal(have, want)
    have64, want64 = have.double(), want.double()
    finite = torch.isfinite(want64)
    if not torch.equal(torch.where(finite, 0.0, have64).nan_to_num(), torch.where(finite, 0.0, want64).nan_to_num()):
        return False
    errors = row_errors(torch.where(finite, have64, 0.0), torch.where(finite, want64, 0.0))
    return not bool((errors > REPLAY_LIMIT).any())
