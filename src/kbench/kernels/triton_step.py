"""The fused kernels of an engine step in Triton: launching only. The kernels are in `kernels.step_kernels`.

Nothing here reads the device or allocates anything that outlives the call, so every call can be captured into a CUDA
graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kbench.kernels.triton_elementwise import power_of_two
from kbench.kernels.triton_movers import strides
from kbench.ops.attention import PagedKV

ROW_ELEMENTS = 16_384
"""A row of an embedding in registers: the widest published model of the catalogue has as many."""
CHUNK = 4_096
"""Logits of one program of the argmax: 32 programs a row of 128 k, so that a batch of 1 is not one multiprocessor's."""
DRAW_BLOCK = 8_192
"""Logits that the program of a row looks at at once."""


def embed_rms_norm(
    tokens: Tensor, table: Tensor, weight: Tensor, eps: float, *, feed: Tensor | None, sampled: Tensor
) -> tuple[Tensor, Tensor]:
    """Embeddings `[tokens, hidden]` and their norm. Where `feed` (int32) is not negative, the token is
    `sampled[feed]` (int64)."""
    from kbench.kernels import step_kernels

    rows, hidden = tokens.shape[0], table.shape[1]
    if hidden > ROW_ELEMENTS:
        raise NotImplementedError(f"embeddings of {hidden} elements: at most {ROW_ELEMENTS} fit in registers")
    embedded = torch.empty((rows, hidden), dtype=table.dtype, device=table.device)
    normed = torch.empty_like(embedded)
    if rows:
        block = power_of_two(hidden)
        kernel: Any = step_kernels._embed_rms_norm
        kernel[(rows,)](
            tokens,
            feed if feed is not None else tokens,
            sampled,
            table,
            weight,
            embedded,
            normed,
            eps,
            HIDDEN=hidden,
            BLOCK=block,
            FEED=feed is not None,
            num_warps=max(1, min(16, block // 512)),
        )
    return embedded, normed


def rope_kv_write(
    qkv: Tensor,
    kv: PagedKV,
    positions: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Norm (if any) and turn q of `qkv` `[tokens, (q + 2 kv) * head_dim]` in place, and put k and v into their slots.

    `tables`: cos and sin, `[positions, 1, rotary / 2]`; `slots`: int64, a negative one writes nothing.
    """
    from kbench.kernels import step_kernels

    tokens, (q_heads, kv_heads) = qkv.shape[0], heads
    dim, (cos, sin) = kv.k.shape[3], tables
    half = cos.shape[-1]
    q_norm, k_norm = norms if norms is not None else (cos, cos)
    if tokens:
        kernel: Any = step_kernels._rope_kv_write
        kernel[(tokens, q_heads + 2 * kv_heads)](
            qkv,
            kv.k,
            kv.v,
            positions,
            slots,
            cos,
            sin,
            q_norm,
            k_norm,
            eps,
            qkv.stride(0),
            kv.page_size,
            *strides(kv.k, kv.layout),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            HALF=half,
            HALF_PADDED=power_of_two(half),
            REST_PADDED=power_of_two(max(1, dim - 2 * half)),
            NORM=norms is not None,
            num_warps=1,
        )


def argmax(logits: Tensor, sampled: Tensor) -> Tensor:
    """Token of the largest logit of each row, int64 `[rows]`, of equals the first; also put into `sampled[:rows]`.

    Reads logits in their own dtype. A row of NaN yields token 0.
    """
    from kbench.kernels import step_kernels

    (rows, vocab), device = logits.shape, logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    chunk = min(CHUNK, power_of_two(vocab))
    chunks = -(-vocab // chunk)
    values = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    if rows:
        part: Any = step_kernels._argmax_part
        merge: Any = step_kernels._argmax_merge
        part[(rows, chunks)](logits, values, tokens, vocab, logits.stride(0), CHUNK=chunk, num_warps=4)
        merge[(rows,)](values, tokens, out, sampled, chunks, CHUNKS=power_of_two(chunks), num_warps=1)
    return out


def draw(logits: Tensor, heat: Tensor, top_k: Tensor, top_p: Tensor, state: Tensor, sampled: Tensor) -> Tensor:
    """A drawn token a row of `[rows, vocab]` logits, int64 `[rows]`; also put into `sampled[:rows]`.

    `heat`, `top_p` float32 `[rows]`: temperature (0: the largest logit) and mass; `top_k` int32 (0: all); `state` int64
    is `engine.sampler.noise_state` of the row.
    """
    from kbench.kernels import draw_kernels

    (rows, vocab), device = logits.shape, logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    chunk = min(CHUNK, power_of_two(vocab))
    chunks = -(-vocab // chunk)
    values, tops, masses = (torch.empty((rows, chunks), dtype=torch.float32, device=device) for _ in range(3))
    tokens = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    if rows:
        part: Any = draw_kernels._draw_part
        merge: Any = draw_kernels._draw_merge
        parts = (values, tokens, tops, masses)
        part[(rows, chunks)](logits, heat, state, *parts, vocab, logits.stride(0), CHUNK=chunk, num_warps=4)
        merge[(rows,)](
            logits,
            heat,
            top_k,
            top_p,
            state,
            *parts,
            out,
            sampled,
            vocab,
            logits.stride(0),
            chunks,
            CHUNKS=power_of_two(chunks),
            BLOCK=min(DRAW_BLOCK, power_of_two(vocab)),
            num_warps=16,
        )
    return out
