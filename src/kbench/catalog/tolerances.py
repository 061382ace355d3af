"""How far from the right answer is forgiven whatever the reference achieves, per element type and check.

Owns the numbers alone, by the names that a suite uses; `ops` and `measure` apply them. A rule may declare smaller ones
(`[rule.tolerance.DTYPE]`), never larger ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KERNEL_FLOORS: Mapping[str, float] = MappingProxyType(
    {"float64": 1e-12, "float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}
)
"""Relative L2 error of an output row of an operation."""
ATTENTION_FLOORS: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2})
"""Relative L2 error of a token and head of a layer's attention inside a step."""
LOGITS_FLOORS: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3})
"""Relative L2 distance of a row of a step's logits from the reference step's."""
FLOORS_OF: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {"kernel": KERNEL_FLOORS, "attention": ATTENTION_FLOORS, "logits": LOGITS_FLOORS}
)
ROUNDING: Mapping[str, float] = MappingProxyType({"float32": 2.4e-8, "float16": 2.0e-4, "bfloat16": 1.6e-3})
"""Relative L2 error that rounding the right values to the type makes by itself: u·√(1/3 · 1/2) of the unit roundoff u
(errors uniform within half a unit in the last place, significands uniform in [1, 2))."""
