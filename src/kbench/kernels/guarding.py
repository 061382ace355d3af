"""Guard bytes on both sides of every output, and nothing that still runs when an answer is read.

Owns the outputs that a trial hands to an implementation, the look at what lies beside them, and the wait for threads
that a call has started. Outputs that an operation guards in its own way, and those that are no dense block, are left
as they are.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kbench.clock.escape import LateOutputs
from kbench.ops.base import Outputs, tensors_of

BEFORE, AFTER = 4_096, 8_192
"""Bytes, multiples of any alignment that a kernel may want."""
GUARD = 0xA5
LARGEST_COPY = 1 << 28
"""Bytes of an answer up to which a copy shows that it changed later."""
PATIENCE_S = 0.05
"""For each thread that was not there before, once."""


def between_guards(outputs: Outputs) -> Outputs:
    """Outputs of the same form, uninitialised, with guard bytes before and after."""
    return tuple(_between(tensor) if _is_whole(tensor) else tensor for tensor in outputs)


def written_over(outputs: Outputs) -> bool:
    """Whether guard bytes beside one of these outputs hold anything else."""
    return any(bool((guard != GUARD).any()) for tensor in outputs for guard in _guards(tensor))


def _between(like: Tensor) -> Tensor:
    size = like.numel() * like.element_size()
    whole = torch.empty(BEFORE + size + AFTER, dtype=torch.uint8, device=like.device)
    whole[:BEFORE] = GUARD
    whole[BEFORE + size :] = GUARD
    return whole[BEFORE : BEFORE + size].view(like.dtype).view(like.shape)


def _is_whole(tensor: Tensor) -> bool:
    size = tensor.numel() * tensor.element_size()
    return bool(size) and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == size


def _guards(tensor: Tensor) -> tuple[Tensor, ...]:
    size, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage()
    if tensor.storage_offset() * tensor.element_size() != BEFORE or storage.nbytes() != BEFORE + size + AFTER:
        return ()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return whole[:BEFORE], whole[BEFORE + size :]


@dataclass(slots=True)
class Rest:
    """Waits for what calls have started: the device, and threads that came after this was made."""

    device: torch.device
    waited: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))

    def __call__(self) -> None:
        for thread in threading.enumerate():
            if thread not in self.waited:
                thread.join(PATIENCE_S)
                if thread.is_alive():
                    self.waited.add(thread)  # a pool of workers stays: it is waited for once
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def copies(answer: object) -> LateOutputs:
    """What an answer holds as its call returns, of plain tensors up to a size."""
    late = LateOutputs()
    late.take([tensor for tensor in tensors_of(answer) if readable(tensor)])
    return late


def readable(tensor: Tensor) -> bool:
    """Whether a tensor can be copied and compared byte by byte."""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type != "meta"
    return plain and tensor.numel() * tensor.element_size() <= LARGEST_COPY
