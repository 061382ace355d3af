"""What every operation tells: its inputs, its right answers, its cost, and how an implementation of it is called.

Owns the contract between an operation and whoever measures it. `measure.kernel` and `kernels.verify` know operations
through `Op` only. It does not know who computes (`kernels`) nor how time is read (`clock`).

An operation has inputs of its own type, opaque to its callers; a `Standard` holds inputs with their right answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.catalog.tolerances import KERNEL_FLOORS

Layout = Literal["NHD", "HND"]
Outputs = tuple[Tensor, ...]
FLOORS: Mapping[torch.dtype, float] = MappingProxyType(
    {getattr(torch, name): floor for name, floor in KERNEL_FLOORS.items()}
)
"""Relative L2 error that is forgiven whatever the reference of the same dtype achieves."""
REFERENCE_FACTOR = 3.0
"""Errors up to so many times those of the same mathematics in the case's dtype pass."""


@dataclass(frozen=True, slots=True)
class InputSettings:
    """What the values do not depend on (`page_size`, `layout`) and what they do (`dtype`, `device`, `seed`)."""

    page_size: int
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    seed: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call must do at least, from actual lengths: padding and page tails are nobody's work."""

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, slots=True)
class Judgement:
    """`problem` is empty if the output passes; `rel_l2` is the worst row, infinite where it is not a number."""

    rel_l2: float
    limit: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class NullReport:
    """Wrong models that the limits reject, and those that they would accept."""

    killed: tuple[str, ...]
    survived: tuple[str, ...]

    @property
    def total(self) -> int:
        return len(self.killed) + len(self.survived)


@dataclass(frozen=True, slots=True)
class Edge:
    """A small case on which implementations of an operation tend to break. `options` go to `build` as they are."""

    name: str
    shape: Resolved
    kind: str = "random"
    options: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""
    """Why this machine cannot hold it; empty where it can."""

    def __str__(self) -> str:
        where = str(self.shape.point) if self.shape.point is not None else ""
        return f"edge case {self.name!r}" + (f" ({where})" if where else "")


@dataclass(frozen=True, slots=True)
class Steps:
    """An implementation bound to one set of inputs. Each part is timed as a scope of its own.

    convert  weights or cache in the layout that the implementation wants; what it returns goes to `plan` and `run`
    plan     metadata and workspaces of this batch
    run      the call itself, with state, plan and outputs that it may fill; returns the answer
    """

    convert: Callable[[], Any]
    plan: Callable[[Any], Any]
    run: Callable[[Any, Any, Outputs], Any]


I = TypeVar("I")  # noqa: E741  inputs
S = TypeVar("S")  # inputs with their right answer


class Op(ABC, Generic[I, S]):
    """One operation. Instances hold no state."""

    kinds: ClassVar[tuple[str, ...]] = ("random",)
    """Kinds of inputs that a case itself is judged on; the last one is the sharpest."""
    arguments: ClassVar[tuple[str, ...]]
    """Names, in order, of what a plug-in function is called with."""

    @abstractmethod
    def build(
        self, shape: Resolved, settings: InputSettings, kind: str = "random", *, sets: int = 1, **options: Any
    ) -> list[I]:
        """`sets` independent inputs of one kind; the same settings give the same values."""

    @abstractmethod
    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        """Small cases of the same operation at which implementations break."""

    @abstractmethod
    def standard(self, inputs: I) -> S:
        """The float64 answer and the limit for this input."""

    @abstractmethod
    def held_to(self, standard: S, limits: Mapping[torch.dtype, float]) -> S:
        """`standard` with no output allowed further off than `limits` says for its dtype."""

    @abstractmethod
    def judge(self, answer: object, against: S) -> Judgement:
        """Form first (type, shape, dtype, device), then the worst row's error, with the place where it is."""

    @abstractmethod
    def nulls(self, standards: tuple[S, ...]) -> NullReport:
        """Hold wrong models against all inputs of a case: each must be rejected by one of them."""

    @abstractmethod
    def cost(self, inputs: I) -> Cost:
        """FLOPs and bytes from actual lengths."""

    @abstractmethod
    def outputs(self, inputs: I) -> Outputs:
        """Tensors that an answer fits into, uninitialised; none where a call writes into its inputs."""

    @abstractmethod
    def streamed_bytes(self, inputs: I) -> int:
        """Bytes of one call that serving finds cold: weights and cached keys and values."""

    @abstractmethod
    def read_only(self, inputs: I) -> tuple[Tensor, ...]:
        """Everything that a call may read and must not change."""

    def unchanging(self, inputs: I) -> tuple[Tensor, ...]:
        """Of what is read only, what nobody redraws."""
        drawn = {tensor.data_ptr() for tensor in self.activations(inputs)}
        return tuple(tensor for tensor in self.read_only(inputs) if tensor.data_ptr() not in drawn)

    def written(self, inputs: I) -> tuple[Tensor, ...]:
        """Inputs that a call writes into; its answer is these."""
        return ()

    @abstractmethod
    def activations(self, inputs: I) -> Outputs:
        """What changes from call to call: hot in serving, and drawn afresh between timed calls."""

    @abstractmethod
    def sharing(self, inputs: I, first: I) -> I:
        """The same weights or cache with the activations of `first`, in the same memory."""

    def redraw(self, inputs: I, generator: torch.Generator) -> None:
        """Put fresh activations into the same memory: an answer kept from before is then wrong."""
        for tensor in self.activations(inputs):
            if tensor.dtype.is_floating_point:
                tensor.normal_(generator=generator)

    @abstractmethod
    def bind(self, implementation: Any, inputs: I) -> Steps:
        """How `implementation` is called on `inputs`."""

    def repeats(self, answer: object) -> bool:
        """Whether the same inputs must give this answer again; a draw from a generator of its own need not."""
        return True

    def restore(self, inputs: I) -> None:
        """Undo what calls wrote into inputs that they may write to."""
        return


# ------------------------------------------------------------------------------------------ judging


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative L2 of every row (last dimension); infinite where `actual` is not finite or where 0 was expected."""
    difference = torch.linalg.vector_norm(actual.to(torch.float64) - expected, dim=-1)
    size = torch.linalg.vector_norm(expected, dim=-1)
    error = torch.where(difference == 0, torch.zeros_like(size), difference / size)
    return torch.where(torch.isfinite(error), error, torch.full_like(error, float("inf")))


def largest(errors: Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0


def form_problem(actual: object, want: Tensor) -> str:
    """What is wrong with the form of an output, or an empty string."""
    if type(actual) is not Tensor:
        return f"returned {type(actual).__name__} instead of a plain tensor"
    for name, have, wanted in (
        ("shape", tuple(actual.shape), tuple(want.shape)),
        ("dtype", actual.dtype, want.dtype),
        ("device", actual.device, want.device),
    ):
        if have != wanted:
            return f"returned {name} {have} instead of {wanted}"
    return ""


def checksum(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Bits of each tensor, added up: equal before and after unless something was written."""
    return tuple(int(_bits(tensor).sum(dtype=torch.int64)) for tensor in tensors)


def _bits(tensor: Tensor) -> Tensor:
    """As integers; eight bytes at a time where rows allow it, which is what makes a checksum of a cache cheap."""
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    if tensor.dim() and tensor.is_contiguous() and tensor.shape[-1] * tensor.element_size() % 8 == 0:
        return tensor.reshape(-1).view(torch.int64)  # flat: a dimension of one element may have any stride
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def tensors_of(answer: object) -> Iterator[Tensor]:
    """The tensors of an answer, whether it is one or a tuple of them."""
    for item in answer if isinstance(answer, tuple | list) else (answer,):
        if isinstance(item, Tensor):
            yield item


def aliases(answer: object, inputs: tuple[Tensor, ...]) -> bool:
    """Whether an answer lives in the memory of an input."""
    stored = {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.numel()}
    return any(
        tensor.untyped_storage().data_ptr() in stored
        for tensor in tensors_of(answer)
        if type(tensor) is Tensor and tensor.layout == torch.strided and tensor.numel()
    )
