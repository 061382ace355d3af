"""What GPU tests share: memory goes back after each, and a process whose CUDA context is broken ends."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch

STICKY = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")


@pytest.fixture(autouse=True)
def returned_memory() -> Iterator[None]:
    """Pools beyond 2^31 elements stay in the allocator's cache, where the processes beside this one miss them."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(call: pytest.CallInfo[None]) -> None:
    """Everything after a sticky error fails for its sake: under xdist the process is replaced by a fresh one."""
    text = str(call.excinfo.value) if call.excinfo else ""
    if "PYTEST_XDIST_WORKER" in os.environ and any(sign in text for sign in STICKY):
        sys.stderr.write(f"the CUDA context is broken: {text.splitlines()[0]}\n")
        os._exit(1)
