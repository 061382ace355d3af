"""Runs the Triton kernels in Triton's interpreter and exits with 1 if an answer is wrong. Started by test_triton_paged.

float32 and float16 only: the interpreter multiplies bfloat16 bit patterns.
"""

from __future__ import annotations

import sys

import torch

from kbench.catalog import parse_point
from kbench.kernels import triton_paged
from kbench.ops.attention import AttentionSpec
from kbench.ops.base import InputSettings
from kbench.ops.correctness import judge, standard
from kbench.ops.inputs import build, edge_cases

POINT = parse_point("2*1@515+1*1@127")


def main() -> int:
    torch.set_num_threads(1)
    triton_paged._multiprocessors = lambda device: 4
    implementation = triton_paged.TritonPagedDecode()
    failures = 0
    for spec in (AttentionSpec(8, 2, 32), AttentionSpec(7, 1, 16)):
        for dtype, page, layout in ((torch.float32, 16, "NHD"), (torch.float16, 48, "HND")):
            settings = InputSettings(page, layout, dtype, torch.device("cpu"), 7)
            cases = [(edge.point, edge.kind, edge.aliased) for edge in edge_cases("attention.decode", page)]
            for point, kind, aliased in [*cases, (POINT, "random", False), (POINT, "needle", False)]:
                own = standard(build(point, spec, settings, kind, aliased=aliased))
                plan = implementation.plan(own.inputs.batch, spec, own.inputs.kv)
                plan.parts.fill_(float("nan"))
                plan.lse.fill_(float("nan"))
                out = torch.full_like(own.inputs.q, float("nan"))
                verdict = judge(implementation.run(own.inputs.q, own.inputs.kv, plan, out), own)
                if not verdict.ok:
                    failures += 1
                    print(spec, dtype, page, layout, point, kind, verdict.problem)
    return min(1, failures)


if __name__ == "__main__":
    sys.exit(main())
