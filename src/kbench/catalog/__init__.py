"""Torch-free facts: the case grammar, model presets, operations, and who computes them.

Owns the nouns that every level joins on and the lists behind `kbench list`. It knows names and capabilities, runs
nothing, imports no torch.
"""

from kbench.catalog.cases import LEVELS, Case
from kbench.catalog.implementations import (
    DTYPES,
    LAYOUTS,
    Implementation,
    implementation,
    implementations,
    register,
)
from kbench.catalog.models import LayerKind, ModelShape, Rope
from kbench.catalog.ops import (
    OPS,
    REQUIRED,
    ROUTINGS,
    Axes,
    Operation,
    Resolved,
    op_applies,
    operation,
    resolve_shape,
)
from kbench.catalog.points import (
    MAX_CONTEXT,
    MAX_SEQUENCES,
    Group,
    Point,
    Shape,
    parse_point,
    parse_shape,
)
from kbench.catalog.presets import MODELS, model_shape

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "LEVELS",
    "MAX_CONTEXT",
    "MAX_SEQUENCES",
    "MODELS",
    "OPS",
    "REQUIRED",
    "ROUTINGS",
    "Axes",
    "Case",
    "Group",
    "Implementation",
    "LayerKind",
    "ModelShape",
    "Operation",
    "Point",
    "Resolved",
    "Rope",
    "Shape",
    "implementation",
    "implementations",
    "model_shape",
    "op_applies",
    "operation",
    "parse_point",
    "parse_shape",
    "register",
    "resolve_shape",
]
