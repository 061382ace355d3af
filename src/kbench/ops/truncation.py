"""Top-k and top-p: which logits stay. The contract is that of `ops.filters`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops import logits as made
from kbench.ops.base import Edge, InputSettings, Judgement, Outputs, form_problem
from kbench.ops.filters import MINUS_INFINITY, LogitsOp, roles
from kbench.ops.support import MASS_TOLERANCE, Support, kept_problem, support
from kbench.ops.tensors import TensorInputs, TensorStandard


@dataclass(frozen=True, slots=True)
class FilterStandard(TensorStandard):
    """Between which sets an answer lies, and how much of the possible tokens it must keep."""

    own: Support
    least_count: Tensor
    least_mass: Tensor


class Filter(LogitsOp):
    """One kept set a row; what is kept is unchanged."""

    kinds = ("random", "peaked")

    @abstractmethod
    def limits_of(self, inputs: TensorInputs) -> tuple[Tensor, Tensor]:
        """k and p of every row; the one that this filter does not have is off."""

    def exact(self, inputs: TensorInputs) -> Outputs:
        values = inputs.arguments["logits"].double()
        return (self._kept(values, *self.limits_of(inputs)),)

    def _kept(self, values: Tensor, k: Tensor, p: Tensor) -> Tensor:
        own = support(values, k, p, torch.ones_like(p), tolerance=0.0)
        return values.masked_fill(~own.possible, MINUS_INFINITY)

    def standard(self, inputs: TensorInputs) -> TensorStandard:
        values = inputs.arguments["logits"].double()
        k, p = self.limits_of(inputs)
        own = support(values, k, p, torch.ones_like(p))
        finite = torch.isfinite(values)
        available = finite.sum(dim=-1)
        count = torch.minimum(torch.where(k <= 0, values.shape[1], k), available)
        whole = torch.where(finite, (values - _top(values)).exp(), 0.0).sum(dim=-1)
        least = torch.where(p >= 1, 0.0, (p.double() - MASS_TOLERANCE) * whole)
        only_mass = torch.where(p < 1, torch.minimum(available, torch.ones_like(available)), count)
        return FilterStandard(inputs, self.exact(inputs), (0.0,), own, only_mass, least)

    def judge_output(self, place: int, have: object, form: Tensor, against: TensorStandard) -> Judgement:
        problem = form_problem(have, form)
        if problem or not isinstance(have, Tensor):
            return Judgement(float("inf"), 0.0, problem)
        assert isinstance(against, FilterStandard)
        return self._judge_values(have, against)

    def _judge_values(self, have: Tensor, against: FilterStandard) -> Judgement:
        given = against.inputs.arguments["logits"]
        kept = have != MINUS_INFINITY
        changed = kept & (have != given)
        if bool(changed.any()):
            row, token = (int(index) for index in changed.nonzero()[0])
            return Judgement(float("inf"), 0.0, f"token {token} of row {row} is neither kept as it was nor -inf")
        problem = kept_problem(kept, against.own, against.least_count, against.least_mass)
        return Judgement(float("inf") if problem else 0.0, 0.0, problem)

    def _passes(self, answer: Outputs, own: TensorStandard) -> bool:
        assert isinstance(own, FilterStandard)
        return self._judge_values(answer[0], own).ok


def _top(values: Tensor) -> Tensor:
    top = values.amax(dim=-1, keepdim=True)
    return torch.where(torch.isfinite(top), top, 0.0)


class TopK(Filter):
    """logits, k int32 `[rows]` → logits, `-inf` but for the k largest. k = 0 and k ≥ vocab keep all. Of the tokens that
    are tied with the k-th, all or some may be kept, as long as k are."""

    arguments = ("logits", "k")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        values = made.logits(shape, settings, kind, generator)
        k = made.filled(len(values), shape.integer("k"), torch.int32, settings)
        arguments = {"logits": values, "k": made.mixed_k(k, values.shape[1]) if kind == "mixed" else k}
        return TensorInputs(shape, arguments, roles(arguments), settings.dtype)

    def limits_of(self, inputs: TensorInputs) -> tuple[Tensor, Tensor]:
        k = inputs.arguments["k"]
        return k, torch.ones(k.shape, device=k.device)

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        values, (k, p) = own.inputs.arguments["logits"].double(), self.limits_of(own.inputs)
        smallest = -self._kept(-values, k, p)
        return {
            **super().wrong(own),
            "no filter": (values,),
            "one more": (self._kept(values, torch.where(k > 0, k + 1, k), p),),
            "one fewer": (self._kept(values, torch.where(k > 1, k - 1, k), p),),
            "the smallest": (torch.where(torch.isinf(smallest), MINUS_INFINITY, smallest),),
            "0 for -inf": (torch.nan_to_num(own.expected[0], neginf=0.0),),
        }

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=6, vocab=111)
        more = (
            Edge("k beyond the vocabulary", small.with_axes(k=112)),
            Edge("k of 1", small.with_axes(k=1)),
            Edge("k of 1, tied", small.with_axes(k=1), "tied"),
            Edge("rows of different k", small, "mixed"),
        )
        return (*super().edges(shape, settings), *more)


class TopP(Filter):
    """logits, p float32 `[rows]` → logits, `-inf` but for the smallest set of the largest whose mass is p. p ≥ 1 keeps
    all, p = 0 the largest. The token that crosses p is kept."""

    arguments = ("logits", "p")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        values = made.logits(shape, settings, kind, generator)
        p = made.filled(len(values), shape.number("p"), torch.float32, settings)
        if kind == "mixed":
            p = made.mixed(p, 0.0, 1.0, 0.1, 0.999)
        arguments = {"logits": values, "p": p}
        return TensorInputs(shape, arguments, roles(arguments), settings.dtype)

    def limits_of(self, inputs: TensorInputs) -> tuple[Tensor, Tensor]:
        p = inputs.arguments["p"]
        return torch.zeros(p.shape, dtype=torch.int32, device=p.device), p

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        values, (k, p) = own.inputs.arguments["logits"].double(), self.limits_of(own.inputs)
        kept = torch.isfinite(own.expected[0])
        last = own.expected[0] == torch.where(kept, values, float("inf")).amin(dim=-1, keepdim=True)
        fewer = own.expected[0].masked_fill(last & (kept.sum(dim=-1, keepdim=True) > 1), MINUS_INFINITY)
        probability = values.softmax(dim=-1).nan_to_num()
        return {
            **super().wrong(own),
            "no filter": (values,),
            "the crossing token dropped": (fewer,),
            "1 - p": (self._kept(values, k, 1 - p),),
            "p as a least probability": (values.masked_fill(probability < p[:, None], MINUS_INFINITY),),
        }

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=6, vocab=111)
        more = (
            Edge("p of 1", small.with_axes(p=1.0)),
            Edge("p of 0", small.with_axes(p=0.0)),
            Edge("p of 0.001", small.with_axes(p=0.001)),
            Edge("rows of different p", small, "mixed"),
        )
        return (*super().edges(shape, settings), *more)
