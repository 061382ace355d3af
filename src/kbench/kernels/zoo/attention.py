"""Wrong paged attention: answers that were not computed, keys that were left out, keys that must not be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kbench.kernels.zoo.base import HEADS, Attend, Kind
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV, oracle, oracle_lse, sequence_kv

DECODE = "attention.decode"


class Zeros(Attend):
    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        return out.zero_()


class Constant(Attend):
    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        return out.fill_(0.125)


class DropsLastPage(Attend):
    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        return out.copy_(oracle(q, kv, batch, spec, drop_last_page=True))


class MaskShort(Attend):
    shift = -1

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        return out.copy_(oracle(q, kv, batch, spec, shift=self.shift))


class MaskAhead(MaskShort):
    shift = 1


class IgnoresPrefix(Attend):
    """A chunk's queries see the keys of a sequence that begins with it."""

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        fresh = AttentionBatch(
            batch.query_start,
            batch.seq_lens,
            batch.block_table,
            batch.query_lens,
            batch.query_lens,
            batch.max_query,
            batch.max_query,
        )
        return out.copy_(oracle(q, kv, fresh, spec))


class SwapsHeads(Attend):
    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        right = super().attend(q, kv, batch, spec, torch.empty_like(out))
        out.copy_(right)
        out[:, 0], out[:, -1] = right[:, -1], right[:, 0]
        return out


class ReturnsEmpty(Attend):
    """Memory that, with luck, still holds somebody's answer."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, ...], Tensor] = {}

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        return self._memory.setdefault(tuple(q.shape), torch.empty_like(q))


class ReturnsPrevious(Attend):
    """Right for the first inputs of each shape."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        key = (*q.shape, *batch.kv_lens)
        if key not in self._kept:
            self._kept[key] = super().attend(q, kv, batch, spec, out).clone()
        return out.copy_(self._kept[key])


class LeavesPaddingRows(Attend):
    """Rows without any key are never written: 0 wherever somebody put zeros there before."""

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        right = super().attend(q, kv, batch, spec, torch.empty_like(out))
        for row, query_len, kv_len in batch.spans():
            if kv_len:
                out[row : row + query_len] = right[row : row + query_len]
        return out


class Padded(Attend):
    """All sequences as long as `width` says; what lies beyond a sequence gets weight 0, and is read."""

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        for index, (row, _, kv_len) in enumerate(batch.spans()):
            keys, values = sequence_kv(kv, batch, index, self.width(kv, batch, kv_len))
            keys, values = (part.repeat_interleave(spec.group, dim=1) for part in (keys, values))
            scores = torch.einsum("hd,khd->hk", q[row], keys) * spec.scale
            scores[:, kv_len:] = float("-inf")
            weights = scores.softmax(dim=-1) if kv_len else torch.zeros_like(scores)
            out[row] = torch.einsum("hk,khd->hd", weights, values)
        return out

    def width(self, kv: PagedKV, batch: AttentionBatch, kv_len: int) -> int:
        return -(-kv_len // kv.page_size) * kv.page_size


class PaddedByNullPage(Padded):
    def width(self, kv: PagedKV, batch: AttentionBatch, kv_len: int) -> int:
        return batch.block_table.shape[1] * kv.page_size


class ShortOffsets(Attend):
    """Offsets of pages in 16 bits: right as long as the pool is small."""

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        page_elements = kv.k[0].numel()
        offsets = (batch.block_table * page_elements).to(torch.int16).to(torch.int32)
        wrapped = (offsets // page_elements) % kv.pages
        short = AttentionBatch(
            batch.query_start,
            batch.seq_lens,
            wrapped,
            batch.query_lens,
            batch.kv_lens,
            batch.max_query,
            batch.max_kv,
        )
        return super().attend(q, kv, short, spec, out)


class NoRunningMaximum(Attend):
    """Exponentials of the scores as they are: fine until one is large."""

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        for index, (row, _, kv_len) in enumerate(batch.spans()):
            keys, values = sequence_kv(kv, batch, index, kv_len)
            keys, values = (part.repeat_interleave(spec.group, dim=1) for part in (keys, values))
            weights = (torch.einsum("hd,khd->hk", q[row], keys) * spec.scale).exp()
            total = weights.sum(dim=-1, keepdim=True)
            out[row] = torch.einsum("hk,khd->hd", weights, values) / total if kv_len else 0.0
        return out


class OneBadLength(Attend):
    """Garbage for sequences of one length, one key more than a page."""

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        super().attend(q, kv, batch, spec, out)
        for row, query_len, kv_len in batch.spans():
            if kv_len == kv.page_size + 1:
                out[row : row + query_len] *= 1.5
        return out


class BinaryLogSumExp(Attend):
    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Any:
        right, lse = oracle_lse(q, kv, batch, spec)
        out.copy_(right)
        return (out, (lse / 0.6931471805599453).float()) if spec.lse else out


class FlatRows(Attend):
    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        return super().attend(q, kv, batch, spec, out).flatten(1)


class Wide(Attend):
    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        return super().attend(q, kv, batch, spec, out).double()


class ClearsNullPage(Attend):
    """Writes where nobody looks: the null page of the cache."""

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        super().attend(q, kv, batch, spec, out)
        kv.k[0].zero_()
        return out


class ViewOfTheCache(Attend):
    """With one key the answer is its value: why copy it?"""

    def attend(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec, out: Tensor) -> Tensor:
        if batch.kv_lens == (1,) and spec.group == 1:
            return kv.v[int(batch.block_table[0, 0]), :1]
        return super().attend(q, kv, batch, spec, out)


SHORT, RAGGED = f"2*1@61,{HEADS}", f"1*1@16+1*1@61,{HEADS}"
CHUNKS = f"1*5@37+1*4,{HEADS}"
KINDS = (
    Kind("zeros", DECODE, SHORT, Zeros, "values"),
    Kind("constant output", DECODE, SHORT, Constant, "values"),
    Kind("last page dropped", DECODE, SHORT, DropsLastPage, "values"),
    Kind("mask one short", DECODE, SHORT, MaskShort, "values"),
    Kind("mask one ahead", "attention.prefill", CHUNKS, MaskAhead, "values"),
    Kind("prefix ignored", "attention.prefill", CHUNKS, IgnoresPrefix, "values"),
    Kind("heads swapped", DECODE, SHORT, SwapsHeads, "values"),
    Kind("uninitialised memory returned", DECODE, SHORT, ReturnsEmpty, "values"),
    Kind("previous answer returned", DECODE, SHORT, ReturnsPrevious, "values"),
    Kind("log-sum-exp in base 2", DECODE, f"2*1@61,{HEADS},lse=1", BinaryLogSumExp, "values"),
    Kind("padding rows not written", DECODE, SHORT, LeavesPaddingRows, "poison"),
    Kind("slots past the end read", DECODE, SHORT, Padded, "unused_nan"),
    Kind("null page read", DECODE, RAGGED, PaddedByNullPage, "unused_nan"),
    Kind("page offsets in 16 bits", DECODE, SHORT, ShortOffsets, "edges", cache="hot"),
    Kind("no running maximum", DECODE, SHORT, NoRunningMaximum, "edges"),
    Kind("garbage at one length", DECODE, SHORT, OneBadLength, "edges"),
    Kind("wrong shape", DECODE, SHORT, FlatRows, "form"),
    Kind("wrong dtype", DECODE, SHORT, Wide, "form"),
    Kind("cache written", DECODE, SHORT, ClearsNullPage, "unchanged_inputs"),
    Kind("view of the cache returned", DECODE, "1*1@1,head_dim=32,kv_heads=2,q_heads=2", ViewOfTheCache, "own_memory"),
)
