"""Random numbers that no library version changes.

Owns the distributions that synthesis needs, written out over the raw output of PCG64, which numpy promises to keep.
(Its `Generator` methods may change between releases.) Knows nothing of traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

_BURST = 50  # arrivals


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths or times between two bounds, log-uniform: as many between 100 and 200 as between 1,000 and 2,000."""

    low: int
    high: int


class Draw:
    """Random numbers from PCG64's raw output by written-out algorithms, so that no numpy version changes a trace."""

    def __init__(self, seed: int, stream: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, stream]))

    def unit(self) -> float:
        """In [0, 1), in steps of 2**-53."""
        return (int(self._bits.random_raw()) >> 11) / 9007199254740992.0

    def units(self, count: int) -> NDArray[np.float64]:
        """`count` numbers as `unit` makes them."""
        return (self._bits.random_raw(count) >> np.uint64(11)).astype(np.float64) / 9007199254740992.0

    def below(self, bound: int) -> int:
        return (int(self._bits.random_raw()) >> 11) % bound

    def between(self, span: Span) -> int:
        """Log-uniform, both bounds included."""
        value = span.low * math.exp(self.unit() * math.log((span.high + 1) / span.low))
        return min(span.high, max(span.low, int(value)))

    def normal(self) -> float:
        """Box and Muller; the second number is not used."""
        return math.sqrt(-2.0 * math.log(1.0 - self.unit())) * math.cos(2.0 * math.pi * self.unit())

    def gamma(self, shape: float) -> float:
        """Mean `shape`. Marsaglia and Tsang (2000); for a shape below 1, their boost."""
        if shape < 1.0:
            return self.gamma(shape + 1.0) * float((1.0 - self.unit()) ** (1.0 / shape))
        d = shape - 1.0 / 3.0
        while True:
            x = self.normal()
            v = (1.0 + x / math.sqrt(9.0 * d)) ** 3
            if v > 0.0 and math.log(1.0 - self.unit()) < 0.5 * x * x + d * (1.0 - v + math.log(v)):
                return d * v

    def gap(self, arrivals: str, cv: float) -> float:
        """Time to the next arrival, mean 1. Bursty arrivals remember: they are `Gaps`'."""
        if arrivals == "poisson":
            return self.exponential()
        if arrivals == "weibull":
            shape = weibull_shape(cv)
            return float(self.exponential() ** (1.0 / shape)) / math.gamma(1.0 + 1.0 / shape)
        shape = 1.0 / (cv * cv)
        return self.gamma(shape) / shape

    def exponential(self) -> float:
        return -math.log(1.0 - self.unit())


@cache
def weibull_shape(cv: float) -> float:
    """The shape whose coefficient of variation is `cv`, by bisection: it falls as the shape grows."""
    low, high = 0.05, 100.0
    for _ in range(80):
        middle = (low + high) / 2.0
        first, second = (math.lgamma(1.0 + k / middle) for k in (1, 2))
        if math.expm1(second - 2.0 * first) > cv * cv:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


class Gaps:
    """Times between arrivals, mean 1; `bursty` ones come in phases, the others one by one.

    A burst is about `_BURST` arrivals at a high rate, what follows a few at a low one. Both phases take half of the
    time (balanced means), so that their rates follow from `cv`, which is above 1. Each gap alone is hyperexponential
    with exactly that variation; unlike gamma gaps, short ones follow short ones.
    """

    def __init__(self, draw: Draw, arrivals: str, cv: float) -> None:
        self._draw, self._arrivals, self._cv = draw, arrivals, cv
        if arrivals == "bursty":
            self._calm = (1.0 - math.sqrt((cv * cv - 1.0) / (cv * cv + 1.0))) / 2.0  # share of arrivals in calm
            burst = max(_BURST, (1.0 - self._calm) / self._calm)
            self._leave_burst, self._leave_calm = 1.0 / burst, (1.0 - self._calm) / (self._calm * burst)
            self._in_burst = draw.unit() >= self._calm

    def next(self) -> float:
        if self._arrivals != "bursty":
            return self._draw.gap(self._arrivals, self._cv)
        share = 1.0 - self._calm if self._in_burst else self._calm
        gap = self._draw.exponential() / (2.0 * share)
        if self._draw.unit() < (self._leave_burst if self._in_burst else self._leave_calm):
            self._in_burst = not self._in_burst
        return gap
