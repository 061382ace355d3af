"""Runs the fused kernels of an engine step in Triton's interpreter against plain torch; exits with 1 if one is wrong.

Started by test_triton_step, float32 only.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from kbench.catalog import ModelShape, model_shape
from kbench.engine.fused import StepOps, TorchOps, TritonOps
from kbench.engine.inputs import StepInputs
from kbench.engine.kv import KVPool, Slots
from kbench.engine.rope import rotary_tables
from kbench.engine.seeded import seeded_weights
from kbench.ops.base import Layout

CPU = torch.device("cpu")
TOKENS = 5
BOUND = 1e-6


def inputs_of(page_size: int) -> StepInputs:
    flat = torch.tensor([3, 40, 17, 64, 22])
    return StepInputs(
        tokens=torch.tensor([5, 0, 511, 7, 9], dtype=torch.int32),
        positions=torch.tensor([3, 0, 100, 63, 7], dtype=torch.int32),
        slots=Slots(flat, flat // page_size, flat % page_size),
        decode=None,
        prefill=None,
        decode_tokens=0,
        logit_rows=torch.arange(TOKENS, dtype=torch.int32),
        feed=torch.tensor([-1, 2, -1, 0, -1], dtype=torch.int32),
    )


def wrong(name: str, got: Tensor, expected: Tensor) -> int:
    if got.dtype == torch.int64:
        bad = not torch.equal(got, expected)
    else:
        # Equal where nothing is written: NaN in both.
        both = torch.isnan(got) & torch.isnan(expected)
        difference = (got - expected).masked_fill(both, 0.0)
        bad = not float(difference.abs().max()) <= BOUND * float(expected.masked_fill(both, 0.0).abs().max())
    if bad:
        print(name, (got - expected).abs().max())
    return int(bad)


def place(ops: StepOps, shape: ModelShape, layout: Layout, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, and the pool of K and V, after the K and V of five tokens were placed; equal arguments for both ways."""
    pool = KVPool(shape, pages=8, page_size=page_size, layout=layout, dtype=torch.float32, device=CPU, poison=True)
    made = torch.Generator().manual_seed(3)
    layer = seeded_weights(shape, 1, torch.float32, CPU).layers[0]
    if shape.qk_norm:
        q_norm, k_norm = torch.randn(2, shape.head_dim, generator=made)
        layer = replace(layer, q_norm=q_norm, k_norm=k_norm)
    inputs = inputs_of(page_size)
    qkv = torch.randn(TOKENS, (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim, generator=made)
    q = ops.place(layer, qkv, inputs, ops.turn(inputs), pool, 0, nullcontext())
    return q, pool.layers[0].k, pool.layers[0].v


def main() -> int:
    torch.set_num_threads(1)
    failures = 0
    tiny = replace(model_shape("tiny"), layers=1, q_heads=4)
    shapes = {
        "plain": tiny,
        "half of a head turns": replace(tiny, rope=replace(tiny.rope, share=0.5)),
        "normed heads": replace(tiny, qk_norm=True),
        "heads of 48": replace(tiny, head_dim=48, qk_norm=True),
    }
    for what, shape in shapes.items():
        tables = rotary_tables(shape, 128, torch.float32, CPU)
        arguments = ((shape.q_heads, shape.kv_heads, shape.head_dim), 1e-5, tables)
        plain, fused = TorchOps(*arguments), TritonOps(*arguments)
        made = torch.Generator().manual_seed(1)
        table, weight = torch.randn(512, 96, generator=made), torch.randn(96, generator=made)
        sampled = torch.tensor([11, 12, 13])
        for name, got, expected in zip(
            ("embedding", "embedding norm"),
            fused.embed(inputs_of(16), table, weight, sampled),
            plain.embed(inputs_of(16), table, weight, sampled),
            strict=True,
        ):
            failures += wrong(f"{what} {name}", got, expected)
        change, residual = torch.randn(2, TOKENS, 96, generator=made)
        expected_sum, expected_norm = plain.add_norm(change, residual.clone(), weight)
        got_sum, got_norm = fused.add_norm(change, residual.clone(), weight)
        failures += wrong("sum", got_sum, expected_sum) + wrong("norm of the sum", got_norm, expected_norm)
        for layout, page in (("NHD", 16), ("HND", 24)):
            results = [place(ops, shape, layout, page) for ops in (fused, plain)]
            for name, got, expected in zip(("q", "k", "v"), *results, strict=True):
                failures += wrong(f"{what} {layout} {name}", got, expected)
    logits = torch.randn(4, 9_000, generator=torch.Generator().manual_seed(2))
    logits[1, [8_999, 77, 5_000]] = 9.0
    logits[2] = float("-inf")
    kept = torch.zeros(4, dtype=torch.int64)
    got = fused.argmax(logits, kept)
    failures += wrong("argmax", got, logits.argmax(dim=-1)) + wrong("argmax kept", kept, got)
    return min(1, failures)


if __name__ == "__main__":
    sys.exit(main())
