"""Runs the Triton kernels of sampling, KV movement, RoPE, SiLU-mul and fp8 in the interpreter; 1 if an answer is wrong.

Started by test_triton_small_ops, one operation at a time.
"""

from __future__ import annotations

import sys

import torch

from kbench.catalog import Resolved, parse_shape, resolve_shape
from kbench.kernels.registry import load
from kbench.kernels.verify import poison
from kbench.ops.base import InputSettings, Layout
from kbench.ops.registry import load_op

KV = "2*1@37+1*5@20,kv_heads=2,head_dim=32"
CASES = {
    "sampling.chain": (
        "triton-fused-sampling",
        (
            "rows=2,vocab=3000,history=16",
            "rows=1,vocab=9000,history=8,k=0",  # more candidates than registers hold: the mass is searched in the row
            "rows=1,vocab=9000,history=8,k=0,p=1.0",  # and drawn from the row
            "rows=1,vocab=9000,history=8,k=2500",
            "rows=1,vocab=20000,history=8,k=5,allowed=1.0",  # tied: thousands of candidates that no search parts
        ),
    ),
    "kv.append": ("triton-kv-append", (KV,)),
    "kv.convert_pages": ("triton-convert-pages", (KV,)),
    "kv.convert_layout": ("triton-convert-pages", (KV,)),
    "rope": ("triton-rope", ("tokens=5,q_heads=4,kv_heads=2,head_dim=32",)),
    "activation.silu_mul": ("triton-silu-mul", ("rows=3,intermediate=96",)),
    "quant.per_token_fp8": ("triton-quant-fp8", ("rows=3,hidden=96",)),
}


def main(op_name: str) -> int:
    torch.set_num_threads(1)
    name, shapes = CASES[op_name]
    op, implementation = load_op(op_name), load(name, op_name)
    places: tuple[tuple[Layout, int], ...] = (("NHD", 16), ("HND", 64)) if op_name.startswith("kv.") else (("NHD", 16),)
    failures = 0
    for layout, page in places:
        settings = InputSettings(page, layout, torch.float32, torch.device("cpu"), 5)
        for place, text in enumerate(shapes):
            shape = resolve_shape(op_name, parse_shape(text), None)
            kinds = [kind for kind in op.kinds if kind != "same"] if place == 0 else ["random"]
            cases = [(shape, kind) for kind in ["tied"] if "20000" in text] or [(shape, kind) for kind in kinds]
            cases += [(edge.shape, edge.kind) for edge in op.edges(shape, settings) if place == 0 and cheap(edge.shape)]
            for own, kind in cases:
                standard = op.standard(op.build(own, settings, kind)[0])
                op.restore(standard.inputs)
                out = op.outputs(standard.inputs)
                poison(out, float("nan"))
                steps = op.bind(implementation, standard.inputs)
                state = steps.convert()
                judgement = op.judge(steps.run(state, steps.plan(state), out), standard)
                if not judgement.ok:
                    failures += 1
                    print(op_name, own, kind, layout, page, judgement.problem)
    return min(1, failures)


def cheap(shape: Resolved) -> bool:
    return int(shape.axes.get("vocab", 0)) <= 4_096


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
