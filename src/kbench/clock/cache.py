"""Cold and warm caches, as labels that were checked.

Owns the arithmetic of rotation: a call finds its data cold only if enough other data was read since it ran last. The
label is `cold` where the rotated union is at least 3× the last-level cache, `warm` where it is less, `unverified` where
nobody knows how large the cache is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

COLD_FACTOR = 3
MAX_SETS = {"cuda": 1_024, "cpu": 32}
MAX_BYTES = {"cuda": 8 << 30, "cpu": 96 << 20}
"""Rotation stops growing here; on a CPU with a huge shared cache the honest label is then `warm`."""
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class CacheState:
    label: str
    rotated_bytes: int
    cache_bytes: int
    """Size of the last-level cache; 0 where it is unknown."""
    sets: int


def last_level_bytes(device: torch.device, caches: Path = CPU_CACHES) -> int:
    """L2 of a CUDA device; the highest cache level that /sys names for CPU 0; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    found: list[tuple[int, int]] = []
    for index in sorted(caches.glob("index*")):
        try:
            level, size = (index / "level").read_text(), (index / "size").read_text().strip()
            found.append((int(level), int(size.rstrip("KMG")) * _UNITS[size[-1]] if size[-1] in _UNITS else int(size)))
        except (OSError, ValueError, IndexError):
            continue
    return max(found)[1] if found else 0


_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def plan_rotation(set_bytes: int, cache_bytes: int, device_type: str) -> CacheState:
    """How many input sets to rotate, at least two, and the label that this rotation earns."""
    kind = "cuda" if device_type == "cuda" else "cpu"
    size = max(1, set_bytes)
    wanted = -(-COLD_FACTOR * cache_bytes // size)
    sets = max(2, min(wanted, MAX_SETS[kind], MAX_BYTES[kind] // size))
    if not cache_bytes:
        label = "unverified"
    else:
        label = "cold" if sets * set_bytes >= COLD_FACTOR * cache_bytes else "warm"
    return CacheState(label, sets * set_bytes, cache_bytes, sets)
