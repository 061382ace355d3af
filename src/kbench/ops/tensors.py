"""Operations whose inputs are named tensors and numbers: everything but paged attention.

Owns the shared half of their contract: arguments with roles, row-wise judgement, null models that must fail, redrawing.
An operation adds how its arguments are made, its float64 oracle, the same mathematics in the case's dtype, its cost,
its edge cases and its own wrong models.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops.base import (
    FLOORS,
    REFERENCE_FACTOR,
    Cost,
    InputSettings,
    Judgement,
    NullReport,
    Op,
    Outputs,
    Steps,
    form_problem,
    largest,
    row_errors,
)

Role = Literal["activation", "weight", "kv", "metadata", "inout", "scalar"]
"""activation: redrawn between timed calls, hot in serving · weight, kv: cold in serving · metadata: indices, lengths ·
inout: written by the call, which answers with it · scalar: a number."""
Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TensorInputs:
    """Arguments of one call by name. `initial` holds what inout tensors were before the call."""

    shape: Resolved
    arguments: Arguments
    roles: Mapping[str, Role]
    dtype: torch.dtype
    initial: Mapping[str, Tensor] = field(default_factory=dict)

    def having(self, *roles: Role) -> tuple[Tensor, ...]:
        return tuple(
            value for name, value in self.arguments.items() if isinstance(value, Tensor) and self.roles[name] in roles
        )


@dataclass(frozen=True, slots=True)
class TensorStandard:
    """The right answer: float64 outputs with a limit each; an integer output is exact."""

    inputs: TensorInputs
    expected: Outputs
    limits: tuple[float, ...]


SUMMED_IN = (torch.float32, torch.float64)
"""Dtypes that a sum is taken in; of narrower ones only the answer is rounded."""


class TensorOp(Op[TensorInputs, TensorStandard]):
    """Implementations follow `kernels.base.TensorKernel`."""

    names: ClassVar[tuple[str, ...]] = ("output",)
    """What each output is called in a message."""
    stale: ClassVar[bool] = True
    """Whether the answer to other inputs is one of the wrong models."""

    @abstractmethod
    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        """One set of inputs; draw everything from `generator` (it lives on the device)."""

    @abstractmethod
    def exact(self, inputs: TensorInputs) -> Outputs:
        """The answer in float64; integer outputs as int64."""

    @abstractmethod
    def plain(self, inputs: TensorInputs) -> Outputs:
        """The same mathematics with every intermediate in the case's dtype, in the dtypes that an answer must have."""

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        """Wrong answers of this operation by name, float64 as `exact`."""
        return {"zeros": tuple(torch.zeros_like(value) for value in own.expected)}

    def terms(self, inputs: TensorInputs) -> int:
        """How many products are summed for one element of the answer; 1: no long sum whose order is open."""
        return 1

    def build(
        self, shape: Resolved, settings: InputSettings, kind: str = "random", *, sets: int = 1, **options: Any
    ) -> list[TensorInputs]:
        generator = torch.Generator(device=settings.device).manual_seed(settings.seed)
        return [self.make(shape, settings, kind, generator, **options) for _ in range(sets)]

    def standard(self, inputs: TensorInputs) -> TensorStandard:
        expected, plain = self.exact(inputs), self.plain(inputs)
        terms = self.terms(inputs)
        limits = tuple(limit_of(have, want, terms) for have, want in zip(plain, expected, strict=True))
        return TensorStandard(inputs, expected, limits)

    def held_to(self, standard: TensorStandard, limits: Mapping[torch.dtype, float]) -> TensorStandard:
        forms = self.forms(standard.inputs)
        pairs = zip(standard.limits, forms, strict=True)
        return replace(standard, limits=tuple(min(own, limits.get(form.dtype, own)) for own, form in pairs))

    def judge(self, answer: object, against: TensorStandard) -> Judgement:
        """The first output with a problem, or the one that is nearest to its limit."""
        answers = answer if isinstance(answer, tuple | list) else (answer,)
        if len(answers) != len(against.expected):
            text = f"returned {len(answers)} outputs instead of {len(against.expected)}"
            return Judgement(float("inf"), against.limits[0], text)
        wanted = self.forms(against.inputs)
        judged = []
        for place, (have, want) in enumerate(zip(answers, wanted, strict=True)):
            judgement = self.judge_output(place, have, want, against)
            if not judgement.ok:
                return judgement
            judged.append(judgement)
        return max(judged, key=lambda own: own.rel_l2 / own.limit if own.limit else own.rel_l2)

    def judge_output(self, place: int, have: object, form: Tensor, against: TensorStandard) -> Judgement:
        """One output: its form, then its rows."""
        limit = against.limits[place]
        problem = form_problem(have, form)
        if problem or not isinstance(have, Tensor):
            return Judgement(float("inf"), limit, f"{self.names[place]}: {problem}")
        return judge_rows(have, against.expected[place], limit, self.names[place])

    def forms(self, inputs: TensorInputs) -> Outputs:
        """Tensors with the shape, dtype and device that each output must have: `outputs`, or the inout arguments."""
        return self.outputs(inputs) or inputs.having("inout")

    def nulls(self, standards: tuple[TensorStandard, ...]) -> NullReport:
        killed: list[str] = []
        survived: list[str] = []
        models = [dict(self.wrong(own)) for own in standards]
        for place, own in enumerate(standards):
            other = standards[place - 1]
            if self.stale and other is not own and _same_forms(own.expected, other.expected):
                models[place]["stale output"] = other.expected
        for name in dict.fromkeys(name for model in models for name in model):
            held = [(own, model[name]) for own, model in zip(standards, models, strict=True) if name in model]
            wrong = [(own, answer) for own, answer in held if not _equal(answer, own.expected)]
            if wrong:
                caught = any(not self._passes(answer, own) for own, answer in wrong)
                (killed if caught else survived).append(name)
        return NullReport(tuple(killed), tuple(survived))

    def _passes(self, answer: Outputs, own: TensorStandard) -> bool:
        """In float64 a wrong model's error is its idea, not its rounding."""
        pairs = zip(answer, own.expected, own.limits, strict=True)
        return all(judge_rows(have, want, limit, "").ok for have, want, limit in pairs)

    def streamed_bytes(self, inputs: TensorInputs) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in inputs.having("weight", "kv", "inout"))

    def read_only(self, inputs: TensorInputs) -> tuple[Tensor, ...]:
        return inputs.having("activation", "weight", "kv", "metadata")

    def written(self, inputs: TensorInputs) -> tuple[Tensor, ...]:
        return inputs.having("inout")

    def activations(self, inputs: TensorInputs) -> Outputs:
        return inputs.having("activation")

    def sharing(self, inputs: TensorInputs, first: TensorInputs) -> TensorInputs:
        shared = {name: first.arguments[name] for name, role in inputs.roles.items() if role == "activation"}
        return replace(inputs, arguments={**inputs.arguments, **shared})

    def restore(self, inputs: TensorInputs) -> None:
        for name, before in inputs.initial.items():
            inputs.arguments[name].copy_(before)

    def bind(self, implementation: Any, inputs: TensorInputs) -> Steps:
        return Steps(
            convert=lambda: implementation.convert(inputs.arguments),
            plan=implementation.plan,
            run=implementation.run,
        )


def limit_of(plain: Tensor, exact: Tensor, terms: int = 1) -> float:
    """3× the worst row's error of the plain mathematics, not below the dtype's floor; 0 where the answer is exact.

    A sum of n terms may be taken in any order, also one after the other: what that costs by chance, u·√n of the dtype's
    unit roundoff u (Higham and Mary, SIAM J. Sci. Comput. 41, 2019), is forgiven even where the plain sum, which some
    libraries take in blocks, errs by less.
    """
    if not plain.dtype.is_floating_point:
        return 0.0
    roundoff = torch.finfo(plain.dtype).eps / 2 if plain.dtype in SUMMED_IN else 0.0
    floor = max(FLOORS.get(plain.dtype, 0.0), roundoff * math.sqrt(terms))
    error = largest(row_errors(plain, exact))
    return max(REFERENCE_FACTOR * error, floor) if error < float("inf") else floor


def judge_rows(actual: Tensor, expected: Tensor, limit: float, name: str) -> Judgement:
    """The worst row decides. Where the oracle is infinite, so must the answer be, with the same sign."""
    if not expected.dtype.is_floating_point:
        wrong = actual.to(torch.int64) != expected
        if not bool(wrong.any()):
            return Judgement(0.0, limit)
        first = tuple(int(index) for index in wrong.nonzero()[0])
        text = f"{name}: {int(actual[first])} instead of {int(expected[first])} at {first}; {int(wrong.sum())} differ"
        return Judgement(float("inf"), limit, text)
    infinite = torch.isinf(expected)
    same = actual.to(torch.float64) == expected
    if bool((infinite & ~same).any()):
        first = tuple(int(index) for index in (infinite & ~same).nonzero()[0])
        text = f"{name}: {float(actual[first]):g} instead of {float(expected[first]):g} at {first}"
        return Judgement(float("inf"), limit, text)
    finite = torch.where(infinite, torch.zeros_like(expected), expected)
    errors = row_errors(torch.where(infinite, torch.zeros_like(actual), actual), finite)
    worst = largest(errors)
    if worst <= limit:
        return Judgement(worst, limit)
    row = int(errors.reshape(-1).argmax())
    bad = int((errors > limit).sum())
    text = f"{name}: relative L2 error {worst:.2e} in row {row}, limit {limit:.2e}; {bad} of {errors.numel()} rows fail"
    if bool(torch.isnan(actual.reshape(errors.numel(), -1)[row] if actual.dim() else actual).any()):
        text = f"{name}: NaN in row {row}: something unused was read, or an output was not written"
    return Judgement(worst, limit, text)


def _same_forms(first: Outputs, second: Outputs) -> bool:
    return all(a.shape == b.shape for a, b in zip(first, second, strict=True))


def _equal(first: Outputs, second: Outputs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def rows_cost(flops: int, read: tuple[Tensor, ...], written: tuple[Tensor, ...]) -> Cost:
    """Every byte of `read` once, every byte of `written` once."""
    return Cost(flops, *(sum(tensor.numel() * tensor.element_size() for tensor in side) for side in (read, written)))
