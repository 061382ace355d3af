"""All kinds, in the order in which a reader would try them."""

from __future__ import annotations

from kbench.kernels.zoo import attention, phases, tampering, tensors
from kbench.kernels.zoo.base import Kind


def kinds(device_type: str) -> tuple[Kind, ...]:
    """What can be tried on a device: wrong answers anywhere, tricks with the clock where they are written for."""
    anywhere = (*attention.KINDS, *tensors.KINDS)
    if device_type != "cuda":
        return (*anywhere, *phases.KINDS, *tampering.KINDS)
    from kbench.kernels.zoo import cuda

    return (*anywhere, *cuda.KINDS)
