"""What a compiled kernel takes of a multiprocessor: registers, spills, shared memory, and the occupancy they allow.

Owns the arithmetic of occupancy (a pure function of limits and needs) and the look at the Triton kernels that a call
launches. Sources: CUDA C++ Best Practices Guide, "Calculating Occupancy"; CUDA C++ Programming Guide, table "Technical
Specifications per Compute Capability". Kernels that no Triton function of this process launches (libraries, replayed
graphs, Inductor's) tell nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

REGISTER_UNIT = 256
"""Registers are given to a warp in multiples of so many."""
WARP_GRANULARITY = 4
"""Warps are given registers in fours: one for each of the four partitions of a multiprocessor."""
SHARED_UNIT = 128
RESERVED_SHARED = 1_024
"""Shared memory that the system keeps of each block from compute capability 8.0 on."""
BLOCKS: Mapping[tuple[int, int], int] = MappingProxyType(
    {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}
)
"""Blocks that may live on a multiprocessor, where they are not 32."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a multiprocessor has."""

    capability: tuple[int, int]
    warps: int
    registers: int
    shared_bytes: int
    blocks: int
    warp_size: int = 32


@dataclass(frozen=True, slots=True)
class Occupancy:
    blocks: int
    """Blocks that are on a multiprocessor at once."""
    share: float
    """Of its warps."""
    bound: str
    """What there is not more of: warps, registers, shared memory or blocks."""


def occupancy(limits: Limits, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Theoretical occupancy of blocks of `threads` with `registers` a thread and `shared_bytes` a block."""
    warps = -(-threads // limits.warp_size)
    each = -(-registers * limits.warp_size // REGISTER_UNIT) * REGISTER_UNIT
    held = limits.registers // each // WARP_GRANULARITY * WARP_GRANULARITY if each else limits.warps
    reserved = RESERVED_SHARED if limits.capability >= (8, 0) else 0
    shared = -(-(shared_bytes + reserved) // SHARED_UNIT) * SHARED_UNIT
    most = {
        "warps": limits.warps // warps,
        "registers": held // warps,
        "shared memory": limits.shared_bytes // shared if shared else limits.blocks,
        "blocks": limits.blocks,
    }
    bound = min(most, key=lambda name: most[name])
    return Occupancy(most[bound], most[bound] * warps / limits.warps, bound)


def device_limits() -> Limits | None:
    """Of the current CUDA device; None where there is none, or its driver does not say."""
    import torch

    if not torch.cuda.is_available():
        return None
    has: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        capability = (int(has.major), int(has.minor))
        return Limits(
            capability,
            int(has.max_threads_per_multi_processor) // int(has.warp_size),
            int(has.regs_per_multiprocessor),
            int(has.shared_memory_per_multiprocessor),
            BLOCKS.get(capability, 32),
            int(has.warp_size),
        )
    except AttributeError:
        return None


def resources(call: Callable[[], object]) -> list[dict[str, Any]]:
    """One entry a distinct Triton kernel that `call` launches: kernel, registers, spills, shared_bytes, threads,
    occupancy and what bounds it. `call` runs twice, eagerly: a search for configurations is over the first time.
    """
    call()
    found: dict[Any, dict[str, Any]] = {}
    limits = device_limits()
    for kernel in _launched(call):
        registers, spills = getattr(kernel, "n_regs", None), getattr(kernel, "n_spills", None)
        about = kernel.metadata
        threads = int(about.num_warps) * int(getattr(about, "warp_size", 32))
        entry: dict[str, Any] = {"kernel": str(kernel.name), "registers": registers, "spills": spills}
        entry |= {"shared_bytes": int(about.shared), "threads": threads, "occupancy": None, "bound": None}
        if limits is not None and registers is not None:
            reached = occupancy(limits, threads, int(registers), int(about.shared))
            entry |= {"occupancy": reached.share, "bound": reached.bound}
        found.setdefault(getattr(kernel, "hash", str(kernel.name)), entry)
    return list(found.values())


def _launched(call: Callable[[], object]) -> list[Any]:
    """The compiled kernels of every launch in `call`. Without Triton there are none."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return []
    launched: list[Any] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = original(self, *args, **kwargs)
        if kernel is not None and hasattr(kernel, "metadata"):
            launched.append(kernel)
        return kernel

    JITFunction.run = run
    try:
        call()
    finally:
        JITFunction.run = original
    return launched
