"""Paged attention in Triton with a window, a soft cap, sinks and a log-sum-exp: planning and launching.

Owns how a batch becomes programs, and the workspaces, both fixed in `plan`, so that `run` allocates nothing and can be
captured into a CUDA graph. The kernels are in `kernels.paged_features`, imported when the first instance is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.triton_paged import choose_splits
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

DOT_FLOAT32 = 32
"""Elements that one float32 dot product adds up in a row: rounding grows with it."""
BLOCK_BYTES = 16_384
"""K of one block; V is as large."""
PREFILL_ROWS = 128
PREFILL_TILE_BYTES = 16_384
Answer = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """What both phases need of a batch: the layer, the sinks (a stand-in where there are none) and room for the
    log-sum-exp (one element where nobody wants it)."""

    batch: AttentionBatch
    spec: AttentionSpec
    sinks: Tensor
    lse: Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, spec: AttentionSpec) -> Layer:
        device = batch.block_table.device
        room = (batch.tokens, spec.q_heads) if spec.lse else (1, 1)
        lse = torch.empty(room, dtype=torch.float32, device=device)
        return cls(batch, spec, spec.sinks if spec.sinks is not None else lse, lse)

    def switches(self) -> dict[str, bool]:
        spec = self.spec
        return {
            "WINDOW": spec.window > 0,
            "SOFTCAP": spec.softcap > 0,
            "SINKS": spec.sinks is not None,
            "LSE": spec.lse,
        }

    def answer(self, out: Tensor) -> Answer:
        return (out, self.lse) if self.spec.lse else out


@dataclass(frozen=True, slots=True)
class DecodePlan:
    layer: Layer
    splits: int
    block: int
    parts: Tensor
    """float32 `[n, q_heads, splits, head_dim]`; one element where there is one split."""
    part_lse: Tensor
    """float32 `[n, q_heads, splits]`, base 2, -inf where a split has no key."""


class TritonFeaturesDecode:
    """Decode on CUDA: float32, float16, bfloat16; any page size; NHD and HND; GQA; all features."""

    name = "triton-paged-features"

    def __init__(self) -> None:
        from kbench.kernels import paged_features

        self._split: Any = paged_features._decode_split
        self._reduce: Any = paged_features._decode_reduce

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> DecodePlan:
        device, n = batch.block_table.device, batch.sequences
        longest = min(batch.max_kv, spec.window) if spec.window else batch.max_kv
        splits = choose_splits(n * spec.kv_heads, longest, multiprocessors(device))
        shape = (n, spec.q_heads, splits) if splits > 1 else (1, 1, 1)
        return DecodePlan(
            Layer.of(batch, spec),
            splits,
            _power_of_two(BLOCK_BYTES // (spec.head_dim * kv.k.element_size()), 16, 128),
            torch.empty((*shape, spec.head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Answer:
        assert isinstance(plan, DecodePlan)
        layer, spec, batch = plan.layer, plan.layer.spec, plan.layer.batch
        slot_axis, head_axis = (1, 2) if kv.layout == "NHD" else (2, 1)
        self._split[(batch.sequences, spec.kv_heads, plan.splits)](
            q,
            kv.k,
            kv.v,
            batch.block_table,
            batch.seq_lens,
            layer.sinks,
            out,
            layer.lse,
            plan.parts,
            plan.part_lse,
            spec.scale,
            float(spec.softcap),
            spec.window,
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
            DIRECT=plan.splits == 1,
            **layer.switches(),
            num_warps=4,
            num_stages=3,
        )
        if plan.splits > 1:
            self._reduce[(batch.sequences, spec.q_heads)](
                plan.parts,
                plan.part_lse,
                layer.sinks,
                out,
                layer.lse,
                out.stride(0),
                out.stride(1),
                plan.splits,
                SPLITS_PADDED=plan.splits,
                HEAD_DIM=spec.head_dim,
                SINKS=spec.sinks is not None,
                LSE=spec.lse,
                num_warps=4,
            )
        return layer.answer(out)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    layer: Layer
    queries: int
    """Query tokens of one program."""
    rows: int
    sequence_of: Tensor
    """int32 `[blocks]`: the sequence of every program, and below its first query in the sequence."""
    query_of: Tensor


class TritonPrefill:
    """Prefill on CUDA: ragged, causal, aligned to the end; any page size; NHD and HND; GQA; all features."""

    name = "triton-prefill"

    def __init__(self) -> None:
        from kbench.kernels import paged_features

        self._kernel: Any = paged_features._prefill

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> PrefillPlan:
        rows = PREFILL_ROWS if kv.k.element_size() == 2 and spec.head_dim <= 128 else PREFILL_ROWS // 2
        rows = max(rows, 1 << (spec.group - 1).bit_length())
        queries = rows // spec.group
        if batch.bounded:
            return PrefillPlan(Layer.of(batch, spec), queries, rows, *_blocks_on_device(batch, queries))
        # The longest programs first: they end last, and a short one fills what is left.
        blocks = sorted(
            (
                (-(kv_len - query_len + first), index, first)
                for index, (_, query_len, kv_len) in enumerate(batch.spans())
                for first in range(0, query_len, queries)
            )
        )
        device = batch.block_table.device
        sequence_of, query_of = (
            torch.tensor([block[place] for block in blocks], dtype=torch.int32, device=device) for place in (1, 2)
        )
        return PrefillPlan(Layer.of(batch, spec), queries, rows, sequence_of, query_of)

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Answer:
        assert isinstance(plan, PrefillPlan)
        layer, spec, batch = plan.layer, plan.layer.spec, plan.layer.batch
        slot_axis, head_axis = (1, 2) if kv.layout == "NHD" else (2, 1)
        self._kernel[(spec.kv_heads, plan.sequence_of.shape[0])](
            q,
            kv.k,
            kv.v,
            batch.block_table,
            batch.seq_lens,
            batch.query_start,
            plan.sequence_of,
            plan.query_of,
            layer.sinks,
            out,
            layer.lse,
            spec.scale,
            float(spec.softcap),
            spec.window,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            kv.k.stride(0),
            kv.k.stride(slot_axis),
            kv.k.stride(head_axis),
            batch.block_table.stride(0),
            GROUP=spec.group,
            QUERIES=plan.queries,
            ROWS=plan.rows,
            HEAD_DIM=spec.head_dim,
            PAGE_SIZE=kv.page_size,
            BLOCK=_power_of_two(PREFILL_TILE_BYTES // (spec.head_dim * q.element_size()), 16, 64),
            DOT=min(spec.head_dim, DOT_FLOAT32) if q.dtype == torch.float32 else spec.head_dim,
            **layer.switches(),
            num_warps=8 if plan.rows >= 128 else 4,
            num_stages=3 if q.element_size() == 2 else 2,
        )
        return layer.answer(out)


def _blocks_on_device(batch: AttentionBatch, queries: int) -> tuple[Tensor, Tensor]:
    """`sequence_of` and `query_of` from lengths on the device, as many as any batch of this size needs.

    Those that this batch does not need stand behind the last query of the last sequence.
    """
    device, most = batch.block_table.device, batch.max_query // queries + batch.sequences
    starts = batch.query_start.long()
    blocks = (starts[1:] - starts[:-1] + queries - 1) // queries
    ends = blocks.cumsum(0)
    block = torch.arange(most, device=device)
    sequence = torch.searchsorted(ends, block, right=True).clamp_max(batch.sequences - 1)
    first = (block - (ends - blocks)[sequence]) * queries
    return sequence.int(), first.int()


def _power_of_two(wanted: int, least: int, most: int) -> int:
    """The largest power of two that is not above `wanted`, within bounds."""
    return max(least, min(most, 1 << (max(1, wanted).bit_length() - 1)))


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter: one program after another
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
