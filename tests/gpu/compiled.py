"""Where torch's own compiler fails, the test is skipped and says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

COMPILED = ("flex", "compile")
"""Names of implementations that torch's compiler makes."""


@contextmanager
def compiled_or_skipped(name: str) -> Iterator[None]:
    """Skip, saying so, where torch's own compiler fails on an implementation that goes through it."""
    from torch._inductor.exc import InductorError

    try:
        yield
    except InductorError as error:
        if not any(sign in name for sign in COMPILED):
            raise
        pytest.skip(f"torch {torch.__version__} cannot compile {name}: {str(error)[-300:]}")
