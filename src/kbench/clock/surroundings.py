"""What of the process changes times or limits and belongs to nobody's kernel: threads, precisions, reserved cache.

Owns the reading of these and the comparison. Precisions count because the limit of an answer comes from the same
mathematics in the case's dtype: whoever coarsens that for all loosens the limit for itself.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

import torch

_PERSISTING_L2 = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of cuda.h."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    threads: int
    default_dtype: str
    matmul_precision: str
    persisting_l2_bytes: int | None
    """L2 that is set aside and survives a flush; None where it cannot be read."""

    @classmethod
    def of(cls, device: torch.device) -> Surroundings:
        return cls(
            torch.get_num_threads(),
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            _persisting_l2_bytes(device) if device.type == "cuda" else None,
        )

    def changed(self, device: torch.device) -> list[str]:
        """What is different now, in words; what could not be read at either time is not."""
        now = Surroundings.of(device)
        pairs = ((field.name, getattr(self, field.name), getattr(now, field.name)) for field in fields(self))
        return [
            f"{name} {before} → {after}"
            for name, before, after in pairs
            if None not in (before, after) and before != after
        ]


def _persisting_l2_bytes(device: torch.device) -> int | None:
    size = ctypes.c_size_t(0)
    torch.cuda.synchronize(device)  # without a context there is nothing to ask, and the driver has its own default
    try:
        done = ctypes.CDLL("libcuda.so.1").cuCtxGetLimit(ctypes.byref(size), _PERSISTING_L2)
    except (OSError, AttributeError):
        return None
    return int(size.value) if done == 0 else None
