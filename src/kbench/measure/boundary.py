"""Where whatever an implementation raises becomes a status and one line."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kbench.errors import KbenchError, UsageError
from kbench.protocol import Outcome, Status


def guarded(step: Callable[[], Outcome]) -> Outcome:
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - the trial boundary: an implementation may raise anything
        return Outcome(_status(error), _line(error), facts={"usage": True} if isinstance(error, KbenchError) else {})


def _status(error: Exception) -> Status:
    """torch raises the CPU allocator's refusal as a plain RuntimeError: only its text tells."""
    starved = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    if starved or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Status.OUT_OF_MEMORY
    return Status.UNSUPPORTED if isinstance(error, NotImplementedError | UsageError) else Status.FAILED


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, KbenchError) else f"{type(error).__name__}: {text}"
