"""Planning without Triton; the kernels in Triton's interpreter where it is installed, on devices in tests/gpu."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kbench.kernels.triton_paged import MAX_SPLITS, TOKENS_PER_SPLIT, choose_splits


def test_splits_fill_the_device_without_becoming_tiny() -> None:
    assert choose_splits(programs=8, max_kv=127, multiprocessors=132) == 1
    assert choose_splits(programs=8, max_kv=4_096, multiprocessors=132) == 4_096 // TOKENS_PER_SPLIT
    assert choose_splits(programs=256, max_kv=4_096, multiprocessors=132) == 2
    assert choose_splits(programs=100_000, max_kv=131_072, multiprocessors=132) == 1
    assert choose_splits(programs=1, max_kv=131_072, multiprocessors=132) == MAX_SPLITS


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_are_right_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when triton is first imported."""
    script = Path(__file__).with_name("interpret_triton.py")
    environment = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
