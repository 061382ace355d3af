"""Runs the Triton norms and the Triton merge in Triton's interpreter and exits with 1 if an answer is wrong.

Started by test_triton_features, float32 only.
"""

from __future__ import annotations

import sys

import torch

from kbench.catalog import parse_shape, resolve_shape
from kbench.kernels.merging import TritonMerge
from kbench.kernels.norms import TritonAddRmsNorm, TritonRmsNorm
from kbench.kernels.verify import verify
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.protocol import Status

CASES = (
    (TritonRmsNorm, "norm.rmsnorm", "rows=5,hidden=96"),
    (TritonAddRmsNorm, "norm.add_rmsnorm", "rows=5,hidden=96"),
    (TritonAddRmsNorm, "norm.add_rmsnorm", "rows=2,hidden=20000"),
    (TritonMerge, "attention.cascade_merge", "rows=5,heads=4,head_dim=32,parts=3"),
)


def main() -> int:
    torch.set_num_threads(1)
    settings = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), 7)
    failures = 0
    for made, op, shape in CASES:
        found = verify(made(), load_op(op), resolve_shape(op, parse_shape(shape), None), settings)
        if found.status is not Status.OK:
            failures += 1
            print(op, shape, found.message)
    return min(1, failures)


if __name__ == "__main__":
    sys.exit(main())
