"""Cache states, as labels that were checked.

Owns the arithmetic of a wanted state: which buffers are rotated and how many sets of them, how much is written to
flush, and the label that this earns. It is the wanted state's name only where it is met:

- `cold`: all of a call's data was pushed out, because at least 3× the last-level cache was read since it was used last;
- `hot`: the same buffers again, and they fit into the cache;
- `flush`: at least 2× the cache is written before every single call;
- `serving`: weights and KV (streamed) are cold by rotation, activations are the same each time and still in the cache.
  Where a call's data do not fit into the cache they are not, in serving either: it is then measured `cold`; and where
  more sets than can be rotated were needed to push tiny weights out of a GPU's cache, `hot`.

`warm` is whatever is none of these; `unverified` is a cache whose size nobody knows. How a state is brought about while
a clock runs is the timers' business.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

State = Literal["hot", "cold", "flush", "serving"]
STATES: tuple[State, ...] = ("hot", "cold", "flush", "serving")

COLD_FACTOR = 3
FLUSH_FACTOR = 2
MAX_SETS = {"cuda": 1_024, "cpu": 32}
MAX_BYTES = {"cuda": 8 << 30, "cpu": 96 << 20}
"""Rotation stops growing here; on a CPU with a huge shared cache the honest label is then `warm`."""
MAX_FLUSH_BYTES = 1 << 30
IMMATERIAL = 0.01
"""Activations below this share of a call's data make no difference, hot or cold."""
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class CacheState:
    label: str
    rotated_bytes: int
    cache_bytes: int
    """Size of the last-level cache; 0 where it is unknown."""
    sets: int
    """Sets of the streamed data; 1 where nothing is rotated."""
    activation_sets: int = 1
    """Sets of the activations: as many as `sets` where they are rotated too."""
    flush_bytes: int = 0
    """Written before every call; 0 where nothing is."""
    wanted: str = "cold"


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


def plan_state(
    streamed_bytes: int, activation_bytes: int, cache_bytes: int, device_type: str, wanted: State
) -> CacheState:
    """What to rotate and to flush for a wanted state, and the label that it earns.

    `streamed_bytes`: what a call reads of weights and KV; `activation_bytes`: everything else that it touches, outputs
    included. Where next to nothing is streamed (an activation function, a norm of many rows), `serving` is its
    activations alone.
    """
    whole = streamed_bytes + activation_bytes
    if wanted == "cold":
        return _rotated(whole, cache_bytes, device_type, wanted)
    if wanted == "flush":
        flush = min(FLUSH_FACTOR * cache_bytes, MAX_FLUSH_BYTES)
        met = flush >= FLUSH_FACTOR * cache_bytes
        return CacheState(_label(wanted, met, cache_bytes), whole, cache_bytes, 1, 1, flush, wanted)
    if wanted == "hot":
        return CacheState(_label(wanted, whole <= cache_bytes, cache_bytes), whole, cache_bytes, 1, 1, 0, wanted)
    if cache_bytes and whole > cache_bytes and activation_bytes > IMMATERIAL * whole:
        return _rotated(whole, cache_bytes, device_type, wanted)
    if streamed_bytes <= IMMATERIAL * whole:
        return CacheState(_label(wanted, whole <= cache_bytes, cache_bytes), whole, cache_bytes, 1, 1, 0, wanted)
    if device_type == "cuda" and MAX_SETS["cuda"] * streamed_bytes < COLD_FACTOR * cache_bytes:
        # A CPU's cache is shared with neighbours, so that not even the same buffers are known to stay there.
        return CacheState("hot", whole, cache_bytes, 1, 1, 0, wanted)
    sets = _sets(streamed_bytes, cache_bytes, device_type)
    rotated = sets * streamed_bytes
    label = _label(wanted, rotated >= COLD_FACTOR * cache_bytes, cache_bytes)
    return CacheState(label, rotated + activation_bytes, cache_bytes, sets, 1, 0, wanted)


def _rotated(set_bytes: int, cache_bytes: int, device_type: str, wanted: State) -> CacheState:
    """Everything of a call in so many sets that none is left in the cache when its turn comes again."""
    sets = _sets(set_bytes, cache_bytes, device_type)
    met = sets * set_bytes >= COLD_FACTOR * cache_bytes
    return CacheState(_label("cold", met, cache_bytes), sets * set_bytes, cache_bytes, sets, sets, 0, wanted)


def plan_rotation(set_bytes: int, cache_bytes: int, device_type: str) -> CacheState:
    """`cold` of data that are all streamed."""
    return plan_state(set_bytes, 0, cache_bytes, device_type, "cold")


def _sets(set_bytes: int, cache_bytes: int, device_type: str) -> int:
    kind = "cuda" if device_type == "cuda" else "cpu"
    size = max(1, set_bytes)
    return max(2, min(-(-COLD_FACTOR * cache_bytes // size), MAX_SETS[kind], MAX_BYTES[kind] // size))


def _label(wanted: str, met: bool, cache_bytes: int) -> str:
    if not cache_bytes:
        return "unverified"
    return wanted if met else "warm"


class Flush:
    """Writes a buffer that is larger than the cache: whatever was cached is not any more. One kernel on CUDA."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._buffer = torch.empty(max(1, size // 4), dtype=torch.int32, device=device)
        self._value = 0
        if device.type == "cuda":
            reset_persisting()

    @property
    def bytes(self) -> int:
        return self._buffer.numel() * 4

    def __call__(self) -> None:
        self._value ^= 1
        self._buffer.fill_(self._value)


def reset_persisting() -> bool:
    """Give back L2 lines that code under test set aside as persisting: a flush does not evict those. False: unknown."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()) == 0
    except (OSError, AttributeError):
        return False
