"""Triton attention with features, norms and merge: planning here, kernels in Triton's interpreter, devices in gpu."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def interpreted(script: str, *arguments: str) -> None:
    """In a process of its own: the interpreter is chosen when triton is first imported."""
    path = str(Path(__file__).with_name(script))
    environment = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run(
        [sys.executable, path, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_attention_with_every_feature_is_right_in_the_interpreter(phase: str) -> None:
    interpreted("interpret_features.py", phase)


def test_norms_and_the_merge_are_right_in_the_interpreter() -> None:
    interpreted("interpret_tensors.py")


def test_a_prefill_plan_covers_every_query_once_and_starts_with_the_longest() -> None:
    import torch

    from kbench.kernels.triton_features import TritonPrefill
    from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

    pool = torch.zeros(8, 16, 2, 32)
    batch = AttentionBatch.build([100, 1, 70], [100, 90, 300], [[1], [2], [3]], "cpu")
    plan = TritonPrefill().plan(batch, AttentionSpec(6, 2, 32), PagedKV(pool, pool, 16, "NHD"))
    covered = {
        (sequence, query)
        for sequence, first in zip(plan.sequence_of.tolist(), plan.query_of.tolist(), strict=True)
        for query in range(first, min(first + plan.queries, batch.query_lens[sequence]))
    }
    assert covered == {(sequence, query) for sequence, length in enumerate((100, 1, 70)) for query in range(length)}
    assert plan.sequence_of[0] == 2 and plan.queries * 3 <= plan.rows
