"""The calls of a timer, and what they answered: a call that was right once is not believed to be right under the clock.

Owns the calls and the watch over them. Outputs are poisoned and activations drawn afresh before every window, in the
same memory; answers of calls that nobody can predict are kept and held against the oracle in the end. What else is
asked of timed calls is in `measure.checks`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.defences import ALL, Defences
from kbench.kernels.guarding import Rest, between_guards, written_over
from kbench.kernels.holding import hold
from kbench.kernels.verify import ALIASED, WRITTEN_OVER, poison
from kbench.ops.base import Op, Outputs, Steps, aliases, tensors_of

WATCHED_SETS = 2
"""Input sets whose timed answers are compared in the end; chosen by the seed, unknown to the implementation."""
REDRAWN_ELEMENTS = 1 << 22
"""Activations of all sets are redrawn before every window where they are no more; else those of the watched sets."""


@dataclass(slots=True)
class TimedCall:
    """One input set under the timer. `latest` is what the last call answered; a graph replay fills it anew."""

    inputs: Any
    steps: Steps
    state: Any
    plan: Any
    out: Outputs
    latest: object = None
    called: bool = False

    @classmethod
    def of(cls, op: Op[Any, Any], implementation: Any, inputs: Any) -> TimedCall:
        steps = op.bind(implementation, inputs)
        state = steps.convert()
        return cls(inputs, steps, state, steps.plan(state), between_guards(op.outputs(inputs)))

    def __call__(self) -> object:
        self.latest = self.steps.run(self.state, self.plan, self.out)
        self.called = True
        return self.latest


@dataclass(slots=True)
class Kept:
    """One answer of a timed call, with the activations that it was given."""

    answer: object
    activations: Outputs


@dataclass(slots=True)
class Watch:
    """Poisons, redraws and keeps answers, around the windows of one trial."""

    op: Op[Any, Any]
    calls: Sequence[TimedCall]
    chance: random.Random
    rest: Rest
    defences: Defences = ALL
    borrowed: bool = False
    """Whether an answer was found in the memory of an input."""
    kept: dict[int, Kept] = field(default_factory=dict)
    watched: frozenset[int] = field(init=False)
    generator: torch.Generator = field(init=False)
    redrawn: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.calls)
        self.watched = frozenset(self.chance.sample(range(count), min(WATCHED_SETS, count)))
        self.generator = torch.Generator(device=self.device).manual_seed(self.chance.getrandbits(48))
        each = sum(tensor.numel() for tensor in self.op.activations(self.calls[0].inputs))
        self.redrawn = tuple(range(count)) if each * count <= REDRAWN_ELEMENTS else tuple(sorted(self.watched))

    @property
    def device(self) -> torch.device:
        return self.rest.device

    def before_window(self) -> None:
        self.redraw()
        self.poison(self.chance.choice((float("nan"), -3.5)))

    def redraw(self) -> None:
        if not self.defences.fresh_activations:
            return
        seen: set[int] = set()
        for index in self.redrawn:
            inputs = self.calls[index].inputs
            first = next(iter(self.op.activations(inputs)), None)
            if first is None or first.data_ptr() in seen:
                continue  # activations that all sets share are drawn once
            seen.add(first.data_ptr())
            self.op.redraw(inputs, self.generator)

    def rewrite(self) -> None:
        """Write the activations that are there, once more."""
        for index in self.redrawn:
            for tensor in self.op.activations(self.calls[index].inputs):
                tensor.copy_(tensor.clone())

    def poison(self, value: float) -> None:
        """Whatever the next calls may write or answer in again; never an input, whoever answers with one."""
        if not self.defences.poison:
            value = 0.0
        elif not self.defences.varied_poison:
            value = float("nan")
        for call in self.calls:
            call.called = False
            self.op.restore(call.inputs)
            given = (*self.op.written(call.inputs), *self.op.read_only(call.inputs))
            latest = (tensor for tensor in tensors_of(call.latest) if type(tensor) is Tensor)
            poison((*call.out, *(tensor for tensor in latest if not aliases(tensor, given))), value)

    def after_window(self) -> None:
        """Copy the answer of one call that this window made. A graph replays all of them and calls none in Python."""
        self.rest()
        made = [index for index, call in enumerate(self.calls) if call.called] or list(range(len(self.calls)))
        watched = [index for index in made if index in self.watched]
        if not watched and self.kept:
            return
        index = self.chance.choice(watched or made)
        call = self.calls[index]
        self.borrowed |= aliases(call.latest, self.op.read_only(call.inputs))
        activations = tuple(tensor.clone() for tensor in self.op.activations(call.inputs))
        self.kept[index] = Kept(copied(call.latest), activations)

    def problem(self) -> str:
        """What is wrong with an answer that was kept, or an empty string."""
        for index, kept in sorted(self.kept.items()):
            inputs = self.calls[index].inputs
            for memory, value in zip(self.op.activations(inputs), kept.activations, strict=True):
                memory.copy_(value)
            self.op.restore(inputs)
            judgement = hold(self.op, kept.answer, self.op.standard(inputs), self.defences)
            if not judgement.ok:
                return f"output of a timed call: {judgement.problem}"
        return ""

    def memory_problem(self) -> str:
        """Whether calls used memory that was not theirs."""
        if self.defences.own_memory and self.borrowed:
            return f"timed call: {ALIASED}"
        over = self.defences.guards and any(written_over(call.out) for call in self.calls)
        return f"timed call: {WRITTEN_OVER}" if over else ""


def copied(answer: object) -> object:
    """The answer in memory of its own; what is no tensor stays, for the judgement to name."""
    if type(answer) is Tensor:
        return answer.clone()
    if isinstance(answer, tuple | list):
        return tuple(copied(item) for item in answer)
    return answer
