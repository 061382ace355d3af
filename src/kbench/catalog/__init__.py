"""Torch-free facts: the case grammar, model presets, operations, and who computes them.

Owns the nouns that every level joins on and the lists behind `kbench list`. It knows names and capabilities, runs
nothing, imports no torch.
"""

from kbench.catalog.attributes import PLAIN, StepAttributes, parse_attributes
from kbench.catalog.capability import (
    AUTO,
    CUSTOM,
    DTYPES,
    KV_DTYPES,
    LAYOUTS,
    ROLES,
    Capability,
    GraphSupport,
    Implementation,
)
from kbench.catalog.cases import LEVELS, Case
from kbench.catalog.implementations import Registry, implementation, implementations, registry
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
    parse_step,
)
from kbench.catalog.presets import MODELS, model_shape
from kbench.catalog.routing import ROUTING_KINDS, RoutingControl, RoutingKind, declared_visits, visits_of

__all__ = [
    "AUTO",
    "CUSTOM",
    "DTYPES",
    "KV_DTYPES",
    "LAYOUTS",
    "LEVELS",
    "MAX_CONTEXT",
    "MAX_SEQUENCES",
    "MODELS",
    "OPS",
    "PLAIN",
    "REQUIRED",
    "ROLES",
    "ROUTINGS",
    "ROUTING_KINDS",
    "Axes",
    "Capability",
    "Case",
    "GraphSupport",
    "Group",
    "Implementation",
    "LayerKind",
    "ModelShape",
    "Operation",
    "Point",
    "Registry",
    "Resolved",
    "Rope",
    "RoutingControl",
    "RoutingKind",
    "Shape",
    "StepAttributes",
    "declared_visits",
    "implementation",
    "implementations",
    "model_shape",
    "op_applies",
    "operation",
    "parse_attributes",
    "parse_point",
    "parse_shape",
    "parse_step",
    "registry",
    "resolve_shape",
    "visits_of",
]
