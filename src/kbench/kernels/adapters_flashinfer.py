"""Paged attention of FlashInfer, where it is installed.

Owns the translation of a batch into lists of pages, in `plan`, where FlashInfer plans as well.
"""

# mypy: disable-error-code="import-not-found"
# The package is installed where it is measured, not where types are checked.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.adapters_attention import Answer, Paged, empty_rows, window_left
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for the partial results of split KV."""
TENSOR_CORE_GROUP = 4
"""FlashInfer's tensor-core decode is the faster one from so many query heads a KV head on."""
LN_2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class PageLists:
    """FlashInfer's form of a block table: the pages of all sequences in a row."""

    starts: Tensor
    pages: Tensor
    last: Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, page_size: int) -> PageLists:
        counts = [-(-length // page_size) for length in batch.kv_lens]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        device, width = batch.block_table.device, batch.block_table.shape[1]
        used = torch.arange(width)[None] < torch.tensor(counts, dtype=torch.int64)[:, None]
        last = torch.tensor([(length - 1) % page_size + 1 if length else 0 for length in batch.kv_lens])
        return cls(starts.to(device), batch.block_table[used.to(device)], last.to(torch.int32).to(device))


@dataclass(frozen=True, slots=True)
class WrapperPlan:
    wrapper: Any
    lse: bool
    empty: Tensor | None


class FlashInfer(Paged):
    """Base of both phases: `plan` makes a wrapper and plans it, `run` runs it."""

    def __init__(self) -> None:
        import flashinfer

        self._package: Any = flashinfer
        self._workspace: Tensor | None = None

    def workspace(self, device: torch.device) -> Tensor:
        """Shared by all plans of an instance: one call runs at a time."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Answer:
        assert isinstance(plan, WrapperPlan)
        if plan.lse:
            _, lse = plan.wrapper.run(q, (kv.k, kv.v), out=out, return_lse=True)
            lse = lse * LN_2  # FlashInfer counts in base 2
        else:
            plan.wrapper.run(q, (kv.k, kv.v), out=out)
        if plan.empty is not None:
            out.masked_fill_(plan.empty, 0.0)
        return (out, lse) if plan.lse else out


class FlashInferDecode(FlashInfer):
    """BatchDecodeWithPagedKVCacheWrapper."""

    name = "flashinfer-decode"

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> WrapperPlan:
        device, lists = kv.k.device, PageLists.of(batch, kv.page_size)
        wrapper = self._package.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace(device), kv.layout, use_tensor_cores=spec.group >= TENSOR_CORE_GROUP
        )
        wrapper.plan(
            lists.starts,
            lists.pages,
            lists.last,
            spec.q_heads,
            spec.kv_heads,
            spec.head_dim,
            kv.page_size,
            window_left=window_left(spec),
            logits_soft_cap=spec.softcap or None,
            q_data_type=kv.k.dtype,
            kv_data_type=kv.k.dtype,
            sm_scale=spec.scale,
        )
        return WrapperPlan(wrapper, spec.lse, empty_rows(batch))


class FlashInferPrefill(FlashInfer):
    """BatchPrefillWithPagedKVCacheWrapper, causal."""

    name = "flashinfer-prefill"

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> WrapperPlan:
        device, lists = kv.k.device, PageLists.of(batch, kv.page_size)
        wrapper = self._package.BatchPrefillWithPagedKVCacheWrapper(self.workspace(device), kv.layout)
        wrapper.plan(
            batch.query_start,
            lists.starts,
            lists.pages,
            lists.last,
            spec.q_heads,
            spec.kv_heads,
            spec.head_dim,
            kv.page_size,
            causal=True,
            window_left=window_left(spec),
            logits_soft_cap=spec.softcap or None,
            q_data_type=kv.k.dtype,
            kv_data_type=kv.k.dtype,
            sm_scale=spec.scale,
        )
        return WrapperPlan(wrapper, spec.lse, empty_rows(batch))
