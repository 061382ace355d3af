"""The trial boundary: where a failure of what is measured becomes a status.

Owns the mapping from exceptions to `Status`. It is the only place of a trial that catches everything; the
worker around it catches what is raised outside of trials.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kbench.errors import KbenchError, UsageError
from kbench.protocol import Outcome, Status


def guarded(run: Callable[[], Outcome]) -> Outcome:
    """The outcome of `run`, or the status of what it raised; the fact `usage` marks what its user can mend."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - the trial boundary: a broken implementation ends its trial, not the run
        return failure(error)


def failure(error: Exception) -> Outcome:
    """torch raises the CPU allocator's refusal as a plain RuntimeError: only its text tells."""
    starved = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    if starved or isinstance(error, torch.OutOfMemoryError | MemoryError):
        status = Status.OUT_OF_MEMORY
    else:
        status = Status.UNSUPPORTED if isinstance(error, NotImplementedError | UsageError) else Status.FAILED
    return Outcome(status, one_line(error), facts={"usage": True} if isinstance(error, KbenchError) else {})


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, KbenchError) else f"{type(error).__name__}: {text}"
