"""Random numbers that no library version changes.

Owns the distributions that synthesis needs, written out over the raw output of PCG64, which numpy promises to keep.
(Its `Generator` methods may change between releases.) Knows nothing of traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


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
        """Time to the next arrival, mean 1."""
        if arrivals == "poisson":
            return -math.log(1.0 - self.unit())
        shape = 1.0 / (cv * cv)
        return self.gamma(shape) / shape
