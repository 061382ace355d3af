"""Run in Triton's interpreter by test_triton_step: draws, and a prefill whose lengths only the device knows."""

from __future__ import annotations

from dataclasses import replace

import torch

from kbench.engine.requests import Sampling
from kbench.engine.sampler import Ask, noise_state, sample
from kbench.kernels.registry import load
from kbench.kernels.triton_step import draw
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

HOW = (
    *(Sampling(temperature=0.8, top_p=0.5 + 0.1 * seed, seed=seed) for seed in range(4)),
    *(Sampling(temperature=1.3, top_k=5 * seed + 1, seed=seed) for seed in range(3)),
    Sampling(temperature=0.7, top_k=20, top_p=0.8, seed=9),
    Sampling(temperature=2.0, seed=4),
    Sampling(),
)


def draws_are_the_samplers() -> None:
    """Half of the rows of logits are rounded, so that scores tie at the edge of what is kept."""
    vocab, generator = 1_000, torch.Generator().manual_seed(0)
    for step in range(4):
        logits = torch.randn(len(HOW), vocab, generator=generator) * 3
        if step % 2:
            logits = logits.bfloat16().float()
        asks = [Ask(how, 10 + step, [1] * 10, 10) for how in HOW]
        sampled = torch.zeros(len(HOW), dtype=torch.int64)
        found = draw(
            logits,
            torch.tensor([how.temperature for how in HOW]),
            torch.tensor([how.top_k for how in HOW], dtype=torch.int32),
            torch.tensor([how.top_p for how in HOW]),
            torch.tensor([noise_state(how.seed, 10 + step) for how in HOW]),
            sampled,
        )
        assert torch.equal(found, sampled)
        assert found.tolist() == sample(logits, asks).tolist()
    dead = torch.full((1, vocab), float("-inf"))
    ones = torch.ones(1)
    assert draw(dead, ones, ones.int(), ones, ones.long(), ones.long()).tolist() == [0]


def a_bounded_prefill_reads_its_lengths_on_the_device() -> None:
    generator = torch.Generator().manual_seed(0)
    spec = AttentionSpec(4, 2, 16)
    pool = [torch.randn(12, 16, 2, 16, generator=generator) for _ in range(2)]
    kv = PagedKV(pool[0], pool[1], 16, "NHD")
    rows, exact = 47, AttentionBatch.build([5, 42], [20, 42], [[1, 2], [3, 4, 5]], "cpu")
    padded = AttentionBatch.build([5, 0, 42, 0], [20, 1, 42, 1], [[1, 2], [11], [3, 4, 5], [11]], "cpu")
    padded = replace(padded, bounded=True, query_lens=(1,) * 4, kv_lens=(1,) * 4, max_query=64, max_kv=64)
    q = torch.randn(70, 4, 16, generator=generator)
    kernel, reference = (load(name, "attention.prefill") for name in ("triton-prefill", "reference"))
    out = kernel.run(q, kv, kernel.plan(padded, spec, kv), torch.full_like(q, float("nan")))
    expected = reference.run(q[:rows], kv, reference.plan(exact, spec, kv), torch.empty_like(q[:rows]))
    assert torch.allclose(out[:rows], expected, atol=1e-5)
    assert torch.isnan(out[rows:]).all()


if __name__ == "__main__":
    draws_are_the_samplers()
    a_bounded_prefill_reads_its_lengths_on_the_device()
