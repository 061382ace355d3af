"""The kernels of `kernel_truth.py`: from 1 µs to 10 ms, one kernel or several, bound by memory, arithmetic or launches.

Owns how each is built: any number of independent input sets, a call without arguments for each, and the bytes that one
call touches. It knows no timer. A call writes into its own output or keeps none: where a captured graph held every
result, a rotation would hide in the outputs. Triton is imported when a kernel needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Call = Callable[[], object]
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Built:
    """`sets(n)` makes n calls, each with its own inputs and outputs."""

    sets: Callable[[int], list[Call]]
    bytes: int


Builder = Callable[[torch.device], Built]


def independent(make: Callable[[], Call], size: int) -> Built:
    return Built(lambda count: [make() for _ in range(count)], size)


def _random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


def add(elements: int) -> Builder:
    def build(device: torch.device) -> Built:
        def make() -> Call:
            values = torch.zeros(elements, device=device)
            return lambda: values.add_(1)

        return independent(make, 8 * elements)

    return build


def negate(elements: int) -> Builder:
    """A calibrator: in no row of the table."""

    def build(device: torch.device) -> Built:
        def make() -> Call:
            values = torch.ones(elements, device=device)
            return lambda: torch.neg(values, out=values)

        return independent(make, 8 * elements)

    return build


def copy(size: int) -> Builder:
    def build(device: torch.device) -> Built:
        def make() -> Call:
            source = torch.ones(size // 4, device=device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)

        return independent(make, 2 * size)

    return build


def gemm(m: int, n: int, k: int) -> Builder:
    """x[m, k] · w[n, k]ᵀ, as a linear layer."""

    def build(device: torch.device) -> Built:
        def make() -> Call:
            x, w = _random(m, k, device=device), _random(n, k, device=device)
            out = torch.empty(m, n, device=device, dtype=x.dtype)
            weight = w.t()
            return lambda: torch.mm(x, weight, out=out)

        return independent(make, 2 * (m * k + n * k + m * n))

    return build


def silu_mul(rows: int, width: int) -> Builder:
    """Two torch kernels, unfused."""

    def build(device: torch.device) -> Built:
        def make() -> Call:
            gate, up = _random(rows, width, device=device), _random(rows, width, device=device)
            between, out = torch.empty_like(gate), torch.empty_like(gate)

            def call() -> None:
                torch.ops.aten.silu.out(gate, out=between)
                torch.mul(between, up, out=out)

            return call

        return independent(make, 2 * 4 * rows * width)

    return build


def softmax(rows: int, width: int) -> Builder:
    def build(device: torch.device) -> Built:
        def make() -> Call:
            logits = _random(rows, width, device=device, dtype=torch.float32)
            out = torch.empty_like(logits)
            return lambda: torch.softmax(logits, dim=-1, out=out)

        return independent(make, 8 * rows * width)

    return build


def top_p(rows: int, vocabulary: int, p: float = 0.9) -> Builder:
    """Sort, accumulate, cut off, renormalise: about ten torch kernels."""

    def build(device: torch.device) -> Built:
        def make() -> Call:
            logits = _random(rows, vocabulary, device=device, dtype=torch.float32)

            def call() -> None:
                ordered, index = torch.sort(torch.softmax(logits, dim=-1), dim=-1, descending=True)
                dropped = torch.cumsum(ordered, dim=-1) - ordered > p
                kept = ordered.masked_fill(dropped, 0.0)
                kept = kept / kept.sum(dim=-1, keepdim=True)
                torch.zeros_like(kept).scatter_(-1, index, kept)

            return call

        return independent(make, 8 * rows * vocabulary)

    return build


def rms_norm(rows: int, width: int) -> Builder:
    def build(device: torch.device) -> Built:
        from kernel_truth_triton import rms_norm_kernel

        def make() -> Call:
            x, weight = _random(rows, width, device=device), _random(width, device=device)
            out = torch.empty_like(x)

            def call() -> torch.Tensor:
                rms_norm_kernel[(rows,)](x, weight, out, width, 1e-5, BLOCK=1 << (width - 1).bit_length(), num_warps=8)
                return out

            return call

        return independent(make, 2 * (2 * rows * width + width))

    return build


def prefill(tokens: int, q_heads: int = 32, kv_heads: int = 8, head_dim: int = 128) -> Builder:
    """Causal attention by torch's own choice of a kernel."""

    def build(device: torch.device) -> Built:
        def make() -> Call:
            q = _random(1, q_heads, tokens, head_dim, device=device)
            k, v = (_random(1, kv_heads, tokens, head_dim, device=device) for _ in range(2))

            def call() -> None:
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            return call

        return independent(make, 2 * tokens * head_dim * 2 * (q_heads + kv_heads))

    return build


def paged_decode(batch: int, context: int) -> Builder:
    """kbench's Triton paged decode, Llama-3-8B heads, pages of 16 tokens, scattered."""

    def build(device: torch.device) -> Built:
        from kbench.catalog import parse_point
        from kbench.kernels.triton_paged import TritonPagedDecode
        from kbench.ops.attention import AttentionSpec
        from kbench.ops.base import InputSettings
        from kbench.ops.inputs import build_sets

        spec = AttentionSpec(32, 8, 128)
        settings = InputSettings(16, "NHD", torch.bfloat16, device, 1)
        implementation = TritonPagedDecode()

        def sets(count: int) -> list[Call]:
            made = build_sets(parse_point(f"{batch}*1@{context}"), spec, settings, count)
            return [_decode_call(implementation, inputs) for inputs in made]

        return Built(sets, 2 * batch * context * spec.kv_heads * spec.head_dim * 2)

    return build


def _decode_call(implementation: object, inputs: object) -> Call:
    plan = implementation.plan(inputs.batch, inputs.spec, inputs.kv)  # type: ignore[attr-defined]
    out = torch.empty_like(inputs.q)  # type: ignore[attr-defined]
    return lambda: implementation.run(inputs.q, inputs.kv, plan, out)  # type: ignore[attr-defined]


CALIBRATORS: dict[str, Builder] = {"hot": negate(4_096), "cold": negate(1 << 20), "flush": negate(1 << 20)}
"""What shows how much of a reading is not the kernel, in each cache state: the gap to the next node of a graph, or what
an event pair reads of itself."""

CASES: dict[str, Builder] = {
    "add-1": add(1),
    "add-1M": add(1 << 20),
    "rmsnorm-32x4096": rms_norm(32, 4_096),
    "rmsnorm-8192x4096": rms_norm(8_192, 4_096),
    "silu-mul-32x14336": silu_mul(32, 14_336),
    "softmax-32x128256": softmax(32, 128_256),
    "copy-4MiB": copy(4 * MIB),
    "decode-1x127": paged_decode(1, 127),
    "decode-1x4096": paged_decode(1, 4_096),
    "decode-32x127": paged_decode(32, 127),
    "gemm-32x4096x4096": gemm(32, 4_096, 4_096),
    "decode-32x4096": paged_decode(32, 4_096),
    "silu-mul-8192x14336": silu_mul(8_192, 14_336),
    "gemm-4000": gemm(4_000, 4_000, 4_000),
    "gemm-4096": gemm(4_096, 4_096, 4_096),
    "gemm-8192": gemm(8_192, 8_192, 8_192),
    "prefill-4096": prefill(4_096),
    "copy-1GiB": copy(1_024 * MIB),
    "copy-16GiB": copy(16 * 1_024 * MIB),
    "top-p-32x128256": top_p(32, 128_256),
}
