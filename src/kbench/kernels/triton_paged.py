"""Split-KV paged decode in Triton: planning and launching.

Owns how many splits a batch gets and the workspaces, both fixed in `plan`, so that `run` allocates nothing and can be
captured into a CUDA graph. The kernels are in `kernels.paged_decode`, imported when the first instance is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

LOG2_E = 1.4426950408889634
PROGRAMS_PER_SM = 4
"""As many as fit on an H200 multiprocessor: about 107 registers a thread, 39 KiB shared memory."""
TOKENS_PER_SPLIT = 128
"""A shorter split would cost more to merge than it saves."""
MAX_SPLITS = 64
DOT_FLOAT32 = 32
"""Elements that one float32 dot product adds up in a row: rounding grows with it, 256 would cost a decimal digit."""
BLOCK_BYTES = 16_384
"""K of one block; V is as large. Four programs keep 128 KiB a multiprocessor in flight, several times what it takes."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    batch: AttentionBatch
    spec: AttentionSpec
    splits: int
    block: int
    parts: Tensor
    """float32 `[n, q_heads, splits, head_dim]`; one element where there is one split."""
    lse: Tensor
    """float32 `[n, q_heads, splits]`, base 2, -inf where a split has no key."""


class TritonPagedDecode:
    """Decode on CUDA: float32, float16, bfloat16; pages of a multiple of 16 tokens; NHD and HND; GQA."""

    name = "triton-paged"

    def __init__(self) -> None:
        from kbench.kernels import paged_decode

        self._split: Any = paged_decode._paged_decode_split
        self._reduce: Any = paged_decode._paged_decode_reduce

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> SplitPlan:
        device, n = batch.block_table.device, batch.sequences
        splits = choose_splits(n * spec.kv_heads, batch.max_kv, _multiprocessors(device))
        shape = (n, spec.q_heads, splits) if splits > 1 else (1, 1, 1)
        block = max(16, min(128, BLOCK_BYTES // (spec.head_dim * kv.k.element_size())))
        return SplitPlan(
            batch=batch,
            spec=spec,
            splits=splits,
            block=1 << (block.bit_length() - 1),
            parts=torch.empty((*shape, spec.head_dim), dtype=torch.float32, device=device),
            lse=torch.empty(shape, dtype=torch.float32, device=device),
        )

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, SplitPlan)
        spec, batch, direct = plan.spec, plan.batch, plan.splits == 1
        slot_axis, head_axis = (1, 2) if kv.layout == "NHD" else (2, 1)
        self._split[(batch.sequences, spec.kv_heads, plan.splits)](
            q,
            kv.k,
            kv.v,
            batch.block_table,
            batch.seq_lens,
            out,
            plan.parts,
            plan.lse,
            spec.scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            kv.k.stride(0),
            kv.k.stride(slot_axis),
            kv.k.stride(head_axis),
            batch.block_table.stride(0),
            plan.splits,
            GROUP=spec.group,
            GROUP_PADDED=max(16, 1 << (spec.group - 1).bit_length()),
            HEAD_DIM=spec.head_dim,
            PAGE_SIZE=kv.page_size,
            BLOCK=plan.block,
            DOT=min(spec.head_dim, DOT_FLOAT32) if q.dtype == torch.float32 else spec.head_dim,
            DIRECT=direct,
            num_warps=4,
            num_stages=3,
        )
        if not direct:
            self._reduce[(batch.sequences, spec.q_heads)](
                plan.parts,
                plan.lse,
                out,
                out.stride(0),
                out.stride(1),
                plan.splits,
                SPLITS_PADDED=plan.splits,
                HEAD_DIM=spec.head_dim,
                num_warps=4,
            )
        return out


def choose_splits(programs: int, max_kv: int, multiprocessors: int) -> int:
    """A power of two: as many programs as fit on the device at once, but no split below `TOKENS_PER_SPLIT`."""
    wanted = PROGRAMS_PER_SM * multiprocessors / max(1, programs)
    most = min(MAX_SPLITS, max_kv // TOKENS_PER_SPLIT)
    splits = 1
    while splits * 2 <= min(wanted, most):
        splits *= 2
    return splits


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter: one program after another
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
