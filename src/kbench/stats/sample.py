"""What a list of values must be before any formula sees it, and the interval that most formulas return.

Owns the checks (`finite_values`, `finite`, `fraction`, `count`) so that every function of `kbench.stats` refuses bad
input with the same words: the argument's name and the offending place. It knows no formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Values: TypeAlias = Sequence[float] | Floats
Side: TypeAlias = Literal["two-sided", "lower", "upper"]
"""Which limits an interval has: both, or only the one that is named (the other is infinite)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A point estimate with its confidence limits, from `n` values. A limit that the data cannot give is infinite."""

    point: float
    low: float
    high: float
    n: int

    @property
    def bounded(self) -> bool:
        """Whether both limits are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def finite_values(values: Values, name: str, *, at_least: int = 1) -> Floats:
    """`values` as a float64 vector; ValueError when it is not one, too short, or holds a value that is not finite."""
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {vector.shape}")
    if vector.size < at_least:
        found = "is empty" if vector.size == 0 else f"has {vector.size} value(s)"
        raise ValueError(f"{name} {found}, needs at least {at_least}")
    bad = np.flatnonzero(~np.isfinite(vector))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {vector[bad[0]]}, must be finite ({bad.size} such value(s))")
    return vector


def finite(value: float, name: str) -> float:
    """`value`, or ValueError when it is NaN or infinite."""
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, must be finite")
    return float(value)


def positive(value: float, name: str) -> float:
    """`value`, or ValueError unless it is finite and above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}, must be a finite number above 0")
    return float(value)


def nonnegative(value: float, name: str) -> float:
    """`value`, or ValueError unless it is finite and not below zero."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}, must be a finite number of at least 0")
    return float(value)


def fraction(value: float, name: str) -> float:
    """`value`, or ValueError unless it lies strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} is {value}, must lie between 0 and 1, both excluded")
    return float(value)


def count(value: int, name: str, *, at_least: int) -> int:
    """`value`, or ValueError unless it is a whole number of at least `at_least`."""
    if not (isinstance(value, int | np.integer) and not isinstance(value, bool)) or value < at_least:
        raise ValueError(f"{name} is {value!r}, must be a whole number of at least {at_least}")
    return int(value)


def tail(confidence: float, side: Side) -> float:
    """The error probability that each finite limit of an interval carries."""
    error = 1.0 - fraction(confidence, "confidence")
    if side not in ("two-sided", "lower", "upper"):
        raise ValueError(f"side is {side!r}, must be 'two-sided', 'lower' or 'upper'")
    return error / 2.0 if side == "two-sided" else error


def one_sided(point: float, low: float, high: float, n: int, side: Side) -> Interval:
    """The interval with the limit that `side` leaves out made infinite."""
    return Interval(
        point=point,
        low=-math.inf if side == "upper" else low,
        high=math.inf if side == "lower" else high,
        n=n,
    )
