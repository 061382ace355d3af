"""torch's scaled_dot_product_attention over gathered pages.

`SdpaGatherDecode` copies the pages of the whole batch into one padded tensor and attends once; `SdpaPrefill` gathers
and attends one sequence at a time. Padding repeats a token of the same sequence, so that no unused slot is ever read;
a mask, built in `plan`, hides it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV, sequence_kv


@dataclass(frozen=True, slots=True)
class GatherPlan:
    spec: AttentionSpec
    rows: Tensor
    """int64: which row of the flattened cache stands at each place of the padded tensor."""
    mask: Tensor | None
    """bool `[n, 1, 1, max_kv]`, True where a key is real; None where all lengths are equal."""
    empty: Tensor | None
    """bool `[n, 1, 1]`, True where a sequence has no key; None where every sequence has one."""


class SdpaGatherDecode:
    """Decode: gather the batch, then one scaled_dot_product_attention.

    All query heads of a KV head see the same keys, so they stand as query rows of that head: no key is repeated.
    """

    name = "sdpa-gather"

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> GatherPlan:
        device, size = batch.block_table.device, kv.page_size
        position = torch.arange(batch.max_kv, device=device)
        real = position < batch.seq_lens[:, None]
        position = torch.where(real, position, 0)
        page = batch.block_table.long().gather(1, position // size)
        offset = position % size
        if kv.layout == "NHD":
            rows = page * size + offset
        else:
            heads = torch.arange(spec.kv_heads, device=device)
            rows = (page[:, None] * spec.kv_heads + heads[:, None]) * size + offset[:, None]
        ragged = min(batch.kv_lens, default=0) != batch.max_kv
        empty = min(batch.kv_lens, default=1) == 0
        return GatherPlan(
            spec,
            rows,
            real[:, None, None, :] if ragged else None,
            (batch.seq_lens == 0)[:, None, None] if empty else None,
        )

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, GatherPlan)
        spec, rows = plan.spec, plan.rows
        n = rows.shape[0]

        def gather(stored: Tensor) -> Tensor:
            if kv.layout == "NHD":
                flat = stored.view(-1, spec.kv_heads * spec.head_dim)
                picked = flat.index_select(0, rows.view(-1)).view(n, -1, spec.kv_heads, spec.head_dim)
                return picked.transpose(1, 2)
            picked = stored.view(-1, spec.head_dim).index_select(0, rows.view(-1))
            return picked.view(n, spec.kv_heads, -1, spec.head_dim)

        grouped = q.reshape(n, spec.kv_heads, spec.group, spec.head_dim)
        keys, values = gather(kv.k), gather(kv.v)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask, scale=spec.scale)
        result = attended.reshape(n, spec.q_heads, spec.head_dim)
        if plan.empty is not None:
            result = result.masked_fill(plan.empty, 0.0)
        return out.copy_(result)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    batch: AttentionBatch
    spec: AttentionSpec
    masks: tuple[Tensor | None, ...]
    """A sequence: None where its query covers all keys (plain causal), else what hides the future."""


class SdpaPrefill:
    """Prefill: ragged, causal, aligned to the end; one gather and one scaled_dot_product_attention a sequence."""

    name = "sdpa"

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> PrefillPlan:
        masks = tuple(self._mask(query_len, kv_len, kv.k) for _, query_len, kv_len in batch.spans())
        return PrefillPlan(batch, spec, masks)

    @staticmethod
    def _mask(query_len: int, kv_len: int, like: Tensor) -> Tensor | None:
        """The flash kernel aligns to the end by itself, and takes GQA; it exists for half precision on CUDA only."""
        if query_len == kv_len:
            return None
        if like.device.type == "cuda" and like.dtype != torch.float32:
            # Imported here: it brings in the whole of torch._dynamo, three seconds that a CPU worker need not spend.
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(query_len, kv_len)
        return torch.ones(query_len, kv_len, dtype=torch.bool, device=like.device).tril_(kv_len - query_len)

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, PrefillPlan)
        spec = plan.spec
        for index, (row, query_len, kv_len) in enumerate(plan.batch.spans()):
            keys, values = sequence_kv(kv, plan.batch, index, kv_len)
            part = slice(row, row + query_len)
            attended = F.scaled_dot_product_attention(
                q[part].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=plan.masks[index],
                is_causal=plan.masks[index] is None,
                scale=spec.scale,
                enable_gqa=spec.group > 1,
            )
            out[part] = attended[0].transpose(0, 1)
        return out
