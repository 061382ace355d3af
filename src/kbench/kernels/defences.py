"""Which defences a trial uses: all of them, always.

Owns the list. Only `kbench selftest` ever switches one off, to show that it is this one that catches a cheat: no suite
and no option of a measuring command reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Defences:
    """What is done against each way to be wrong, or to look fast. Off is what a plain harness does."""

    form: bool = True
    """A plain tensor of the right shape, dtype and device. Off: whatever can be brought into that form."""
    values: bool = True
    """The worst row against the float64 oracle. Off: answers are not compared with anything."""
    limits: bool = True
    """A limit from what the case's dtype can achieve. Off: an error of 2 % passes."""
    finite: bool = True
    """A NaN is an error. Off: as in `not (error > tolerance)`, it is none."""
    sharp_inputs: bool = True
    """Inputs made so that a small omission is a large error. Off: random ones alone."""
    edges: bool = True
    """Small cases on which implementations break. Off: the case itself alone."""
    null_models: bool = True
    """Wrong models must fail on the case. Off: a limit that accepts them goes unnoticed."""
    poison: bool = True
    """Outputs hold garbage before a call. Off: zeros."""
    varied_poison: bool = True
    """Not the same garbage each time. Off: always NaN."""
    unused_nan: bool = True
    """What must not be read holds NaN. Off: zeros."""
    guards: bool = True
    """Bytes beside outputs that nobody may write."""
    unchanged_inputs: bool = True
    """A checksum of all inputs before and after."""
    own_memory: bool = True
    """An answer does not live in the memory of an input."""
    at_rest: bool = True
    """Nothing is written, and no device works, after a call has ended on its stream."""
    fresh_activations: bool = True
    """New values in the same memory between timed calls."""
    timed_answers: bool = True
    """What timed calls answered is held against the oracle."""
    every_set: bool = True
    """The answer to every rotated input set, not only to those watched, is that of a plain call."""
    fresh_and_again: bool = True
    """A call on fresh inputs takes as long as one on the same again."""
    clock: bool = True
    """Clocks and comparisons are those that were bound before any code under test was loaded."""
    surroundings: bool = True
    """Threads, precisions and device limits of the process are as they were."""
    stability: bool = True
    """Readings that drift within a window are flagged."""
    expected_kernel: bool = True
    """The kernel that an implementation says it is was seen to run."""

    def without(self, name: str) -> Defences:
        """All but one."""
        return replace(self, **{name: False})


ALL = Defences()
