"""What one measurement is of: the join key of all records."""

from __future__ import annotations

from dataclasses import dataclass

from kbench.catalog.attributes import StepAttributes, parse_attributes
from kbench.catalog.points import Point, Shape, parse_point, parse_shape
from kbench.errors import UsageError

LEVELS = ("timeline", "kernel", "step", "workload")


@dataclass(frozen=True, slots=True)
class Case:
    """What one measurement is of; `str(case)` is its id, the join key of all records.

    `level/op/model/point` with `;name=value` attributes, e.g. `kernel/attention.decode/tiny/32*1@4096`.
    Attributes that belong to a variant (page size, layout) are not part of the id: both arms share the case.
    """

    level: str
    op: str
    model: str
    point: str
    attributes: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        head = "/".join((self.level, self.op, self.model, self.point))
        return head + "".join(f";{name}={value}" for name, value in self.attributes)

    @property
    def parsed(self) -> Point:
        return parse_point(self.point)

    @property
    def shape(self) -> Shape:
        """Of a kernel case: a point, axes, or both."""
        return parse_shape(self.point)

    @property
    def step_attributes(self) -> StepAttributes:
        """Of a step case."""
        return parse_attributes([f"{name}={value}" for name, value in self.attributes])

    @classmethod
    def parse(cls, text: str) -> Case:
        head, *attributes = text.split(";")
        parts = head.split("/")
        if len(parts) != 4 or parts[0] not in LEVELS or not all("=" in item for item in attributes):
            raise UsageError(f"{text!r} is not a case", remedy="level/op/model/point[;name=value], see kbench plan")
        pairs = tuple((name, value) for name, _, value in (item.partition("=") for item in attributes))
        return cls(parts[0], parts[1], parts[2], parts[3], pairs)
