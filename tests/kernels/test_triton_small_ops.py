"""The Triton kernels of the small operations in Triton's interpreter; on devices they run in tests/gpu."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

OPS = (
    "sampling.chain",
    "kv.append",
    "kv.convert_pages",
    "kv.convert_layout",
    "rope",
    "activation.silu_mul",
    "quant.per_token_fp8",
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("op", OPS)
def test_the_kernels_are_right_in_the_interpreter(op: str) -> None:
    """In a process of its own: the interpreter is chosen when triton is first imported."""
    script = Path(__file__).with_name("interpret_small_ops.py")
    environment = dict(os.environ, TRITON_INTERPRET="1")
    command = [sys.executable, str(script), op]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
