"""What a kernel must do at least, and how fast a device lets it: FLOPs, bytes, intensity, the roofline.

Owns arithmetic that needs no tensor. Formulas are the textbook's: a multiply-add is two FLOPs, every input is read
once, every output written once. Ceilings are measured elsewhere (`clock.ceilings`) and come in as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

ITEMSIZE: Mapping[str, int] = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1})
Bound = Literal["memory", "compute"]
SCORE_PASSES = 3
"""Naive attention writes its scores once, reads them for the softmax and again for the product with V."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Where an operation stands against a device's measured ceilings (Williams et al. 2009)."""

    flops: int
    bytes: int
    bytes_per_us: float
    flops_per_us: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte of traffic that cannot be avoided."""
        return self.flops / self.bytes if self.bytes else math.inf

    @property
    def crossover(self) -> float:
        """Intensity at which memory and arithmetic take equally long."""
        return self.flops_per_us / self.bytes_per_us

    @property
    def bound(self) -> Bound:
        return "memory" if self.intensity < self.crossover else "compute"

    @property
    def floor_us(self) -> float:
        """Time at the roofline, in µs."""
        return max(self.bytes / self.bytes_per_us, self.flops / self.flops_per_us)

    def headroom(self, latency_us: float) -> float:
        """Share of `latency_us` above the roofline: what no implementation of this operation can lose more of."""
        return 1.0 - self.floor_us / latency_us


def roofline(cost: Mapping[str, Any], ceilings: Mapping[str, Any], dtype: str) -> Roofline | None:
    """From recorded facts: what one call must do, and what its device was measured to reach.

    Bandwidth is that of the call's own mix: reading alone, writing alone, or both. None where something is missing.
    """
    try:
        read, written, flops = int(cost["bytes_read"]), int(cost["bytes_written"]), int(cost["flops"])
        gemms = ceilings["gemm_flops_per_us"]
        rate = float(gemms.get(dtype) or gemms.get("tf32") or 0.0)
        kind = "read" if written < 0.1 * read else "write" if read < 0.1 * written else "copy"
        bandwidth = float(ceilings[f"{kind}_bytes_per_us"])
    except (KeyError, TypeError, ValueError):
        return None
    return Roofline(flops, read + written, bandwidth, rate) if bandwidth > 0.0 and rate > 0.0 else None


@dataclass(frozen=True, slots=True)
class AttentionTraffic:
    """Memory traffic of one head, in bytes."""

    scores: int
    """The score matrix, once."""
    naive: int
    """Scores materialised: written once and read twice."""
    tiled: int
    """Keys and values streamed once."""


def attention_traffic(query_tokens: int, kv_tokens: int, head_dim: int, itemsize: int) -> AttentionTraffic:
    """What materialising the scores of one head moves, and what streaming K and V through on-chip memory moves."""
    scores = query_tokens * kv_tokens * itemsize
    return AttentionTraffic(scores, SCORE_PASSES * scores, 2 * kv_tokens * head_dim * itemsize)


@dataclass(frozen=True, slots=True)
class Fusion:
    """What fusing two elementwise kernels of every layer can save of a step."""

    bytes_per_position: int
    round_trip_bytes: int
    """The intermediate, written and read back, for one position."""
    launches: int
    launch_us: float
    """Time of the launches that go away, in µs a step."""
    share: float
    """Of the step's time."""


def fusion(hidden: int, itemsize: int, layers: int, launch_us: float, step_us: float) -> Fusion:
    """One fused pair a layer: one launch and one round trip of an intermediate less. `launch_us` is what a launch costs
    on the critical path: microseconds when eager, below one as a node of a captured graph."""
    width = hidden * itemsize
    saved = layers * launch_us
    return Fusion(width, 2 * width, layers, saved, saved / step_us)


def tile_efficiency(m: int, n: int, k: int, tile: tuple[int, int, int] = (128, 128, 64)) -> float:
    """Share of the arithmetic of whole tiles that is the product's own; the rest is padding of ragged edges."""
    padded = math.prod(-(-size // edge) * edge for size, edge in zip((m, n, k), tile, strict=True))
    return m * n * k / padded


def tile_fill(rows: int, edge: int = 128) -> float:
    """How much of a tile's edge the rows of a thin product fill."""
    return rows / (-(-rows // edge) * edge)
