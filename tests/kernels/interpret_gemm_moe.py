"""Runs the Triton kernels of matrix products and experts in Triton's interpreter; exits with 1 if an answer is wrong.

Started by test_triton_gemm_moe. float32 only: the interpreter multiplies bfloat16 bit patterns. It takes a while for
every program, so large edge cases are left to tests/gpu.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from kbench.catalog import parse_shape, resolve_shape
from kbench.kernels import triton_gemm
from kbench.kernels.registry import load
from kbench.kernels.verify import check
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op

triton_gemm.MAX_SPLITS = 4
CASES = (
    ("triton-gemm", "gemm", "m=17,n=96,k=300", 1),
    ("triton-gemm", "gemm", "m=3,n=40,k=1000,layout=nn", 8),
    ("triton-gemm", "gemm", "m=70,n=100,k=130,layout=tn", 1),
    ("triton-router", "moe.router", "tokens=5,experts=60,top_k=6", 1),
    ("triton-permute", "moe.permute", "tokens=9,experts=8,top_k=2,hidden=64,routing=zipf", 1),
    ("triton-grouped", "moe.grouped_gemm", "tokens=33,experts=4,top_k=2,n=72,k=100,routing=empty", 1),
    ("triton-grouped", "moe.grouped_gemm", "tokens=64,experts=2,top_k=2,n=72,k=64", 1),
    ("triton-moe", "moe.fused", "tokens=5,experts=8,top_k=3,hidden=72,intermediate=48,routing=zipf", 1),
)
"""Implementation, operation, shape, multiprocessors: with more of them products are split along k."""
EDGES = (
    *(
        "1 rows",
        "nn, misaligned",
        "k of one",
        "one column",
        "no rows",
        "no k",
        "a row of zeros",
        "NaN beside and below",
    ),
    *("no tokens", "one expert", "one of many", "ties", "all equal", "half of the experts at -inf"),
    *("the last expert empty", "every expert for every token", "every other expert not here", "no expert here"),
    *("guard rows beside an empty expert", "one row an expert at most", "unused experts' weights are NaN"),
)
LIMIT = 6
"""Tokens of an edge case of the whole layer, which starts the most programs."""


def main() -> int:
    torch.set_num_threads(1)
    failures, seen = 0, set()
    for name, op, text, count in CASES:

        def multiprocessors(device: torch.device, count: int = count) -> int:
            return count

        triton_gemm.multiprocessors = multiprocessors
        settings = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), 5)
        shape, own = resolve_shape(op, parse_shape(text), None), load_op(op)
        cases: list[tuple[str, Any, str]] = [(kind, shape, kind) for kind in own.kinds]
        if name not in seen:
            cases += [(edge.name, edge.shape, edge.kind) for edge in own.edges(shape, settings) if edge.name in EDGES]
        seen.add(name)
        implementation: Any = load(name, op)
        for label, resolved, kind in cases:
            small = resolved.with_axes(tokens=min(LIMIT, resolved.integer("tokens"))) if op == "moe.fused" else resolved
            judgement = check(implementation, own, own.standard(own.build(small, settings, kind)[0]))
            if not judgement.ok:
                failures += 1
                print(name, op, text, label, judgement.problem)
    return min(1, failures)


if __name__ == "__main__":
    sys.exit(main())
