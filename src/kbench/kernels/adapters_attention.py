"""Paged attention of installed packages that read block tables: FlashAttention, vLLM, SGLang.

Owns the translation of a batch into each package's own metadata, in `plan`, where these packages plan as well. Packages
are imported when an instance is made. None of these kernels is asked for a row without keys: what it leaves there is
overwritten by the contract's 0.
"""

# mypy: disable-error-code="import-not-found"
# The packages are installed where they are measured, not where types are checked.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

VLLM_SEGMENTS = 16
VLLM_PROGRAMS = 128
"""vLLM splits the KV length into 16 segments where a batch has fewer programs than this."""
SGLANG_SPLITS = 16
SGLANG_BLOCK = 32
Answer = Tensor | tuple[Tensor, Tensor]


class Paged:
    """Base: the cache is taken as it is."""

    name = ""

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv


def empty_rows(batch: AttentionBatch) -> Tensor | None:
    """bool `[tokens, 1, 1]`, True where a sequence has no key; None where every sequence has one."""
    if min(batch.kv_lens, default=1):
        return None
    lengths = torch.tensor(batch.query_lens, device=batch.seq_lens.device)
    return (batch.seq_lens == 0).repeat_interleave(lengths)[:, None, None]


def window_left(spec: AttentionSpec) -> int:
    """Keys before the query's own; -1 without a window."""
    return spec.window - 1 if spec.window else -1


@dataclass(frozen=True, slots=True)
class TablePlan:
    """For kernels that read a block table as kbench has it."""

    batch: AttentionBatch
    spec: AttentionSpec
    empty: Tensor | None
    key_start: Tensor
    """int32 `[n + 1]`: lengths added up."""


class OnTables(Paged):
    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> Any:
        added = torch.zeros(batch.sequences + 1, dtype=torch.int32, device=batch.seq_lens.device)
        added[1:] = batch.seq_lens.cumsum(0)
        return TablePlan(batch, spec, empty_rows(batch), added)

    @staticmethod
    def finish(answer: Tensor, empty: Tensor | None) -> Tensor:
        return answer if empty is None else answer.masked_fill_(empty, 0.0)


class VllmFlash(OnTables):
    """flash_attn_varlen_func of vLLM's build of FlashAttention, either version, both phases."""

    version = 0

    def __init__(self) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        self._attend: Any = flash_attn_varlen_func

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, TablePlan)
        batch, spec = plan.batch, plan.spec
        self._attend(
            q=q,
            k=kv.k,
            v=kv.v,
            out=out,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=batch.max_query,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.max_kv,
            softmax_scale=spec.scale,
            causal=True,
            window_size=[window_left(spec), 0] if spec.window else [-1, -1],
            softcap=spec.softcap,
            block_table=batch.block_table,
            fa_version=self.version,
        )
        return self.finish(out, plan.empty)


class VllmFlash2(VllmFlash):
    name = "vllm-fa2"
    version = 2


class VllmFlash3(VllmFlash):
    name = "vllm-fa3"
    version = 3


class Flash2(OnTables):
    """flash_attn_varlen_func of the flash-attn package; its pages hold a multiple of 256 tokens."""

    name = "fa2"

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func

        self._attend: Any = flash_attn_varlen_func

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, TablePlan)
        batch, spec = plan.batch, plan.spec
        answer = self._attend(
            q,
            kv.k,
            kv.v,
            cu_seqlens_q=batch.query_start,
            cu_seqlens_k=plan.key_start,
            max_seqlen_q=batch.max_query,
            max_seqlen_k=batch.max_kv,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(window_left(spec), 0) if spec.window else (-1, -1),
            softcap=spec.softcap,
            block_table=batch.block_table,
        )
        return self.finish(answer, plan.empty)


class Flash3(OnTables):
    """flash_attn_with_kvcache of FlashAttention 3, on its own page tables, both phases."""

    name = "fa3"

    def __init__(self) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        self._attend: Any = flash_attn_with_kvcache

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, TablePlan)
        batch, spec = plan.batch, plan.spec
        answer = self._attend(
            q,
            kv.k,
            kv.v,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=batch.max_query,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(window_left(spec), 0) if spec.window else (-1, -1),
            softcap=spec.softcap,
        )
        return self.finish(answer, plan.empty)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    table: TablePlan
    segments: dict[str, Any]
    """Workspaces of the split over the KV length; empty where a batch has programs enough."""


class VllmPaged(OnTables):
    """unified_attention, vLLM's Triton kernel; both phases, window, soft cap and sinks."""

    name = "vllm-paged"

    def __init__(self) -> None:
        try:
            from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        except ImportError:
            from vllm.attention.ops.triton_unified_attention import unified_attention  # before vLLM 0.14
        self._attend: Any = unified_attention

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> SegmentPlan:
        table = super().plan(batch, spec, kv)
        most = VLLM_PROGRAMS // spec.kv_heads
        segments: dict[str, Any] = {}
        if batch.max_query == 1 and batch.sequences <= most:
            room, device = (most, spec.q_heads, VLLM_SEGMENTS), kv.k.device
            padded = 1 << (spec.head_dim - 1).bit_length()
            segments = {
                "seq_threshold_3D": most,
                "num_par_softmax_segments": VLLM_SEGMENTS,
                "softmax_segm_output": torch.empty((*room, padded), dtype=torch.float32, device=device),
                "softmax_segm_max": torch.empty(room, dtype=torch.float32, device=device),
                "softmax_segm_expsum": torch.empty(room, dtype=torch.float32, device=device),
            }
        return SegmentPlan(table, segments)

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, SegmentPlan)
        batch, spec = plan.table.batch, plan.table.spec
        self._attend(
            q=q,
            k=kv.k,
            v=kv.v,
            out=out,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=batch.max_query,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.max_kv,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(window_left(spec), 0) if spec.window else (-1, -1),
            block_table=batch.block_table,
            softcap=spec.softcap,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            sinks=spec.sinks,
            **plan.segments,
        )
        return self.finish(out, plan.table.empty)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    spec: AttentionSpec
    starts: Tensor
    slots: Tensor
    splits: Tensor
    parts: Tensor
    lse: Tensor
    empty: Tensor | None


class SglangDecode(Paged):
    """decode_attention_fwd, SGLang's Triton kernel: split KV over a list of slots, soft cap and sinks."""

    name = "sglang-decode"

    def __init__(self) -> None:
        from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

        self._attend: Any = decode_attention_fwd

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> SlotPlan:
        device, n = kv.k.device, batch.sequences
        starts = torch.zeros(n + 1, dtype=torch.int32, device=device)
        starts[1:] = batch.seq_lens.cumsum(0)
        place = torch.arange(batch.max_kv, device=device)
        page = batch.block_table.long().gather(1, (place // kv.page_size).expand(n, -1))
        slots = (page * kv.page_size + place % kv.page_size)[place < batch.seq_lens[:, None]]
        splits = (batch.seq_lens // SGLANG_BLOCK).clamp(1, SGLANG_SPLITS).to(torch.int32)
        room = (n, spec.q_heads, SGLANG_SPLITS)
        return SlotPlan(
            spec,
            starts,
            slots,
            splits,
            torch.empty((*room, spec.head_dim), dtype=torch.float32, device=device),
            torch.empty(room, dtype=torch.float32, device=device),
            empty_rows(batch),
        )

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, SlotPlan)
        self._attend(
            q,
            kv.k.flatten(0, 1),
            kv.v.flatten(0, 1),
            out,
            plan.starts,
            plan.slots,
            plan.parts,
            plan.lse,
            plan.splits,
            SGLANG_SPLITS,
            plan.spec.scale,
            1.0,
            1.0,
            logit_cap=plan.spec.softcap,
            sinks=plan.spec.sinks,
        )
        return OnTables.finish(out, plan.empty)
