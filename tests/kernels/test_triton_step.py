"""The fused kernels of an engine step in Triton's interpreter; on devices they run in tests/gpu."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["interpret_step.py", "interpret_graph_step.py"])
def test_the_fused_kernels_compute_what_plain_torch_does(name: str) -> None:
    """In a process of its own: the interpreter is chosen when triton is first imported."""
    script = Path(__file__).with_name(name)
    environment = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
