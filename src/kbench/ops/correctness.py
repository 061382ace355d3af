"""When an attention output is right, and whether that question can tell right from wrong.

Owns the error rule and the null models. Error: relative L2 against the float64 oracle per output row (one query token
of one sequence, one head); the worst row decides. Limit: 3× the error that the same mathematics makes in the case's own
dtype on the same input, but not below the dtype's floor. Null models are wrong answers that must exceed the limit in
every sequence; where one would pass, the case cannot tell and says so. It does not know who computed the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kbench.ops.attention import oracle, same_dtype
from kbench.ops.inputs import Inputs

FLOORS: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3})
REFERENCE_FACTOR = 3.0
NULL_MODELS = ("zeros", "dropped last page", "mask one short", "mask one ahead", "heads swapped", "stale output")
SAME_ANSWER = 1e-9
"""Below this float64 error a null model gives the right answer: on such an input it is no wrong model."""


@dataclass(frozen=True, slots=True)
class Standard:
    """The right answer for one input and how far from it an output may be."""

    inputs: Inputs
    expected: Tensor
    limit: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """`problem` is empty if the output passes; `rel_l2` is the worst row, infinite where it is not a number."""

    rel_l2: float
    limit: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem


def standard(inputs: Inputs) -> Standard:
    """The oracle's answer and the limit for this input."""
    expected = oracle(inputs.q, inputs.kv, inputs.batch, inputs.spec)
    plain = same_dtype(inputs.q, inputs.kv, inputs.batch, inputs.spec, torch.empty_like(inputs.q))
    reference_error = _largest(row_errors(plain, expected))
    return Standard(inputs, expected, max(REFERENCE_FACTOR * reference_error, FLOORS[inputs.q.dtype]))


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative L2 of every row, `[tokens, heads]`; infinite where `actual` is not finite or where 0 was expected."""
    difference = torch.linalg.vector_norm(actual.to(torch.float64) - expected, dim=-1)
    size = torch.linalg.vector_norm(expected, dim=-1)
    error = torch.where(difference == 0, torch.zeros_like(size), difference / size)
    return torch.where(torch.isfinite(error), error, torch.full_like(error, float("inf")))


def judge(actual: object, against: Standard) -> Judgement:
    """Shape, type and device first, then the error of the worst row, with the place where it is."""
    q = against.inputs.q
    problem = form_problem(actual, q)
    if problem or not isinstance(actual, Tensor):
        return Judgement(float("inf"), against.limit, problem)
    errors = row_errors(actual, against.expected)
    worst = _largest(errors)
    if worst <= against.limit:
        return Judgement(worst, against.limit)
    token, head = divmod(int(errors.argmax()), errors.shape[1])
    sequence = int(torch.searchsorted(against.inputs.batch.query_start, token, right=True)) - 1
    place = f"sequence {sequence} (KV length {against.inputs.batch.kv_lens[sequence]}), head {head}"
    if bool(torch.isnan(actual[token, head]).any()):
        return Judgement(worst, against.limit, f"NaN in {place}: an unused slot, page or output was read")
    rows = int((errors > against.limit).sum())
    text = f"relative L2 error {worst:.2e} in {place}, limit {against.limit:.2e}; {rows} of {errors.numel()} rows fail"
    return Judgement(worst, against.limit, text)


def form_problem(actual: object, q: Tensor) -> str:
    """What is wrong with the form of an output, or an empty string."""
    if type(actual) is not Tensor:
        return f"returned {type(actual).__name__} instead of a plain tensor"
    for name, have, want in (
        ("shape", tuple(actual.shape), tuple(q.shape)),
        ("dtype", actual.dtype, q.dtype),
        ("device", actual.device, q.device),
    ):
        if have != want:
            return f"returned {name} {have} instead of {want}"
    return ""


def checksum(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Bits of each tensor, added up: equal before and after unless something was written."""
    return tuple(int(_bits(tensor).sum(dtype=torch.int64)) for tensor in tensors)


def _bits(tensor: Tensor) -> Tensor:
    """As integers; eight bytes at a time where rows allow it, which is what makes a checksum of a cache cheap."""
    if tensor.is_contiguous() and tensor.shape[-1] * tensor.element_size() % 8 == 0:
        return tensor.view(torch.int64)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


# ---------------------------------------------------------------------------------------- null models


@dataclass(frozen=True, slots=True)
class NullReport:
    """Wrong models that the limits reject, and those that they would accept."""

    killed: tuple[str, ...]
    survived: tuple[str, ...]

    @property
    def total(self) -> int:
        return len(self.killed) + len(self.survived)


def null_report(standards: tuple[Standard, ...]) -> NullReport:
    """Hold every null model against all inputs of a case; one input that rejects it in a sequence is enough there.

    A sequence on which the model is right on every input (two heads that see one key give one answer) is left out; a
    model that is right everywhere is not counted.
    """
    killed: list[str] = []
    survived: list[str] = []
    for name in NULL_MODELS:
        if name == "mask one ahead" and all(own.inputs.batch.is_decode for own in standards):
            continue  # there is no key ahead of the last query
        verdicts = [_null_rows(name, own, standards[index - 1]) for index, own in enumerate(standards)]
        wrong = torch.stack([is_wrong for is_wrong, _ in verdicts]).any(dim=0)
        caught = torch.stack([is_caught for _, is_caught in verdicts]).any(dim=0)
        if not bool(wrong.any()):
            continue
        (killed if bool(caught[wrong].all()) else survived).append(name)
    return NullReport(tuple(killed), tuple(survived))


def _null_rows(name: str, own: Standard, other: Standard) -> tuple[Tensor, Tensor]:
    """Per sequence: whether the null model is wrong on this input, and whether its error exceeds the limit."""
    errors = row_errors(null_output(name, own, other), own.expected).amax(dim=1)
    worst = torch.stack([rows.max() for rows in torch.split(errors, list(own.inputs.batch.query_lens))])
    return worst > SAME_ANSWER, worst > own.limit


def null_output(name: str, own: Standard, other: Standard) -> Tensor:
    """What the wrong model answers, in float64: its error is its idea, not its rounding."""
    source = own.inputs
    if name == "zeros":
        return torch.zeros_like(own.expected)
    if name == "heads swapped":
        swapped = own.expected.clone()
        swapped[:, 0], swapped[:, -1] = own.expected[:, -1], own.expected[:, 0]
        return swapped
    if name == "stale output":
        return other.expected
    shift = {"mask one short": -1, "mask one ahead": 1}.get(name, 0)
    return oracle(
        source.q, source.kv, source.batch, source.spec, shift=shift, drop_last_page=name == "dropped last page"
    )


def _largest(errors: Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0
