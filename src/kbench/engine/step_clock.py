"""How long each step of a virtual replay takes: the cost table, captured batch sizes, and the noise of this step.

Owns the time that steps took together, and how much of it lies outside what was measured. Durations are whole
nanoseconds, and each is a function of the step's shape and number alone: taking many steps at once gives the same
numbers as taking each by itself, to the last bit, because it does the same operations on the same floats.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, repeat

import numpy as np
from numpy.typing import NDArray

from kbench.engine.costs import CostTable, StepShape
from kbench.errors import UsageError

_BLOCK = 1_024
_FEW = 24
"""Steps for which a loop is faster than arrays."""
_MANY = 4_096


class StepNoise:
    """One of `factors` for every step number, drawn from (seed, number): the order of asking does not matter."""

    def __init__(self, factors: Sequence[float], seed: int) -> None:
        if not factors:
            raise UsageError("a cost grid without repeated points has no noise", remedy="measure it with repeats")
        self._factors = tuple(factors)
        self._seed = seed
        self._block = -1
        self._drawn: list[float] = []

    def of(self, step: int) -> float:
        return self._in_block(step // _BLOCK)[step % _BLOCK]

    def since(self, step: int) -> Iterable[float]:
        """The factors of step `step` and all later ones."""
        block, skipped = divmod(step, _BLOCK)
        while True:
            yield from self._in_block(block)[skipped:]
            block, skipped = block + 1, 0

    def _in_block(self, block: int) -> list[float]:
        if block != self._block:
            steps = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
            mixed = _mix(_mix(steps) + np.uint64(self._seed % 2**64))
            self._block = block
            self._drawn = [self._factors[index] for index in (mixed % np.uint64(len(self._factors))).tolist()]
        return self._drawn


class StepClock:
    """Durations of steps. `captured` are the batch sizes of CUDA graphs: a batch of decodes only is padded to one."""

    def __init__(self, costs: CostTable, *, noise: StepNoise | None = None, captured: Sequence[int] = ()) -> None:
        self.modelled_ns = 0
        self.extrapolated_ns = 0
        self._costs = costs
        self._model = costs.model
        self._noise = noise
        self._captured = sorted(captured)
        self._last_ns = 1
        self._rising = np.arange(1, _MANY + 1)

    def step(self, shape: StepShape, number: int) -> int:
        """The time of step `number`."""
        if self._captured and not shape.prefill_seqs:
            shape = replace(shape, decode_seqs=self._padded(shape.decode_seqs))
        factor = 1.0 if self._noise is None else self._noise.of(number)
        duration = max(1, round(self._model.step_ns(shape) * factor))
        self.modelled_ns += duration
        if self._costs.extrapolated(shape):
            self.extrapolated_ns += duration
        return duration

    def decodes(self, seqs: int, context: int, steps: int, enough_ns: float, number: int) -> array[int]:
        """The times of up to `steps` steps of `seqs` decodes, the first of them step `number`.

        Before it the sequences hold `context` tokens, after every step `seqs` more. Stops with the step that brings
        the sum to `enough_ns`.
        """
        padded = self._padded(seqs)
        durations, spent = array("q"), 0
        while spent < enough_ns and len(durations) < steps:
            done = len(durations)
            likely = (enough_ns - spent) / self._last_ns + 1  # how many are taken at once changes nothing but the speed
            more = min(steps - done, _MANY, math.ceil(likely) if likely < _MANY else _MANY)
            if more < _FEW:
                added = self._few(seqs, padded, context + done * seqs, more, enough_ns - spent, number + done)
                spent += sum(added)
            else:
                times = self._many(seqs, padded, context + done * seqs, more, number + done)
                sums = times.cumsum()
                kept = min(int(sums.searchsorted(enough_ns - spent)) + 1, len(times))
                spent += int(sums[kept - 1])
                added = array("q", times[:kept].tobytes())
            durations += added
            self._last_ns = durations[-1]
        self.modelled_ns += spent
        inside = self._inside(seqs, padded, context)
        if inside < len(durations):
            self.extrapolated_ns += sum(durations[inside:])
        return durations

    def chunks(
        self, seqs: int, context: int, chunk: int, computed: int, steps: int, enough_ns: float, number: int
    ) -> array[int]:
        """`decodes`, with a chunk of so many tokens beside them in every step, of a prompt that had `computed`."""
        durations = array("q")
        spent, begin = 0, number
        while spent < enough_ns and number < begin + steps:
            context += seqs
            computed += chunk
            shape = StepShape(seqs, context, chunk, 1, chunk * computed, computed)
            duration = self.step(shape, number)
            number += 1
            durations.append(duration)
            spent += duration
        return durations

    def _few(self, seqs: int, padded: int, context: int, steps: int, enough_ns: float, number: int) -> array[int]:
        # What `StepModel.step_ns` and `Surface.at` compute, written out: the inner loop of a replay.
        model = self._model
        per_context = model.weights[1]
        fixed, of_seqs = model.fixed, model.weights[0] * padded
        low, high, distance, width = model.decode.lines(padded)
        end, spent = -1.0, 0
        low_value = low_rise = low_start = high_value = high_rise = high_start = 0.0
        low_width = high_width = 1.0
        durations: list[int] = []
        for factor in self._factors(number, steps):
            context += seqs
            mean = context / padded
            if mean > end:
                low_value, low_rise, low_start, low_width, low_end = low.piece(mean)
                high_value, high_rise, high_start, high_width, high_end = high.piece(mean)
                end = low_end if low_end < high_end else high_end
            below = low_value + low_rise * (mean - low_start) / low_width
            above = high_value + high_rise * (mean - high_start) / high_width
            ratio = below + (above - below) * distance / width
            duration = round((fixed + (of_seqs + per_context * context)) * ratio * factor)
            if duration < 1:
                duration = 1
            durations.append(duration)
            spent += duration
            if spent >= enough_ns:
                break
        return array("q", durations)

    def _many(self, seqs: int, padded: int, context: int, steps: int, number: int) -> NDArray[np.int64]:
        """The same operations on arrays, as far as one piece of the correction reaches: at least one step."""
        model = self._model
        low, high, distance, width = model.decode.lines(padded)
        contexts = self._rising[:steps] * seqs
        contexts += context
        means = contexts / padded
        low_value, low_rise, low_start, low_width, low_end = low.piece(float(means[0]))
        high_value, high_rise, high_start, high_width, high_end = high.piece(float(means[0]))
        end = min(low_end, high_end)
        if means[-1] > end:
            means = means[: int(means.searchsorted(end, side="right"))]
            contexts = contexts[: len(means)]
        below = low_value + low_rise * (means - low_start) / low_width
        if distance:
            above = high_value + high_rise * (means - high_start) / high_width
            below += (above - below) * distance / width
        times = model.weights[1] * contexts
        times += model.weights[0] * padded
        times += model.fixed
        times *= below
        if self._noise is not None:
            times *= np.fromiter(self._factors(number, len(times)), np.float64, len(times))
        np.rint(times, out=times)
        np.maximum(times, 1.0, out=times)
        return times.astype(np.int64)

    def _factors(self, number: int, steps: int) -> Iterable[float]:
        return repeat(1.0, steps) if self._noise is None else islice(self._noise.since(number), steps)

    def _inside(self, seqs: int, padded: int, context: int) -> int:
        """How many of the steps that begin at `context` are inside what was measured."""
        reach = self._costs.reach
        if padded > reach.largest[0] or "decode" not in reach.kinds:
            return 0
        return max(0, (reach.largest[1] - context) // seqs)

    def _padded(self, seqs: int) -> int:
        """The next captured size; a batch larger than all of them is launched as it is."""
        place = bisect_left(self._captured, seqs)
        return self._captured[place] if place < len(self._captured) else seqs


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014) of each value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
