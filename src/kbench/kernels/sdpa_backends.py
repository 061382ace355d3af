"""torch's scaled_dot_product_attention with one backend named, on contiguous keys and values.

A backend that cannot do a case raises; none falls back to another. Sequences of equal lengths share a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kbench.kernels.contiguous import ContiguousKV, Group, OnContiguousKV, put, queries
from kbench.ops.attention import AttentionBatch, AttentionSpec


@dataclass(frozen=True, slots=True)
class BackendPlan:
    spec: AttentionSpec
    masks: tuple[Any, ...]
    """A group: None where no key is hidden or the query covers all keys (plain causal), else what hides the future."""


class SdpaBackend(OnContiguousKV):
    """Decode and prefill; causal, aligned to the end."""

    backend: ClassVar[str] = ""
    lower_right: ClassVar[bool] = False
    """Whether the kernel aligns a causal mask to the end by itself; the others get a boolean mask."""
    single_key: ClassVar[bool] = True
    """Whether the kernel takes a sequence of one key."""

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: Any) -> BackendPlan:
        return BackendPlan(spec, tuple(self._mask(group) for group in kv.groups))

    def _mask(self, group: Group) -> Any:
        query_len, kv_len = group.query_len, group.kv_len
        if query_len == 1 or query_len == kv_len:
            return None
        if self.lower_right:
            # Imported here: it brings in the whole of torch._dynamo, three seconds that others need not spend.
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(query_len, kv_len)
        return torch.ones(query_len, kv_len, dtype=torch.bool, device=group.k.device).tril_(kv_len - query_len)

    def run(self, q: Tensor, kv: Any, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, BackendPlan) and isinstance(kv, ContiguousKV)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            for group, mask in zip(kv.groups, plan.masks, strict=True):
                if not group.kv_len:
                    put(out, group, out.new_zeros((group.count, plan.spec.q_heads, group.query_len, q.shape[2])))
                    continue
                if group.kv_len == 1 and not self.single_key:
                    put(out, group, group.v.repeat_interleave(plan.spec.group, 1))  # the only key has all the weight
                    continue
                attended = F.scaled_dot_product_attention(
                    queries(q, group),
                    group.k,
                    group.v,
                    attn_mask=mask,
                    is_causal=mask is None and group.query_len > 1,
                    scale=plan.spec.scale,
                    enable_gqa=plan.spec.group > 1,
                )
                if len(kv.groups) == 1 and group.query_len == 1:
                    return attended.reshape(q.shape)
                put(out, group, attended)
        return out


class SdpaFlash(SdpaBackend):
    name = "sdpa-flash"
    backend = "FLASH_ATTENTION"
    lower_right = True


class SdpaCudnn(SdpaBackend):
    name = "sdpa-cudnn"
    backend = "CUDNN_ATTENTION"
    single_key = False


class SdpaMath(SdpaBackend):
    name = "sdpa-math"
    backend = "MATH"
