"""Runs the Triton attention with features in Triton's interpreter and exits with 1 if an answer is wrong.

Started by test_triton_features. float32 and float16 only: the interpreter multiplies bfloat16 bit patterns.
"""

from __future__ import annotations

import sys

import torch

from kbench.catalog import parse_shape, resolve_shape
from kbench.kernels import triton_features
from kbench.kernels.verify import verify
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.protocol import Status

HEADS = ("q_heads=4,kv_heads=2,head_dim=32", "q_heads=7,kv_heads=1,head_dim=16")
FEATURES = (
    ("lse=1", 0, torch.float32, 16, "NHD"),
    ("window=40", 1, torch.float32, 16, "HND"),
    ("window=24,softcap=30,sinks=1,lse=1", 1, torch.float32, 5, "NHD"),
    ("softcap=30,sinks=1", 0, torch.float16, 48, "HND"),
)


def main(phase: str) -> int:
    torch.set_num_threads(1)
    triton_features.multiprocessors = lambda device: 4
    decode = phase == "decode"
    implementation = (triton_features.TritonFeaturesDecode if decode else triton_features.TritonPrefill)()
    op, point = f"attention.{phase}", "2*1@515+1*1@127" if decode else "1*9@77+1*70"
    failures = 0
    for features, heads, dtype, page, layout in FEATURES:
        settings = InputSettings(page, layout, dtype, torch.device("cpu"), 7)  # type: ignore[arg-type]
        shape = resolve_shape(op, parse_shape(f"{point},{HEADS[heads]},{features}"), None)
        found = verify(implementation, load_op(op), shape, settings)
        if found.status is not Status.OK:
            failures += 1
            print(shape, dtype, page, layout, found.message, found.facts)
    return min(1, failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
