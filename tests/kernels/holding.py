"""Hold an implementation of paged attention to the oracle, from what a test has at hand."""

from __future__ import annotations

from kbench.catalog import Point, Resolved
from kbench.kernels.verify import Verification, verify
from kbench.ops.attention import AttentionSpec
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op


def hold(
    implementation: object, op: str, point: Point, spec: AttentionSpec, settings: InputSettings, *, sinks: bool = False
) -> Verification:
    """`sinks`: with sinks, whose values the operation draws."""
    axes = {name: getattr(spec, name) for name in ("q_heads", "kv_heads", "head_dim", "window", "softcap")}
    axes |= {"sinks": int(sinks), "lse": int(spec.lse)}
    return verify(implementation, load_op(op), Resolved(op, point, axes), settings)
