"""FlexAttention, compiled, on contiguous keys and values: window, soft cap, sinks and the log-sum-exp.

Block masks are made in `plan`. Sinks are applied to the output by the log-sum-exp that FlexAttention returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.contiguous import ContiguousKV, Group, OnContiguousKV, put, queries
from kbench.ops.attention import AttentionBatch, AttentionSpec

RECOMPILE_LIMIT = 64
"""Forms of a batch that one process may see. Beyond the limit torch would run the unfused algorithm and only warn: that
is another implementation, so it is an error here."""


@dataclass(frozen=True, slots=True)
class FlexPlan:
    spec: AttentionSpec
    masks: tuple[Any, ...]
    """A group's block mask; None where every key is seen."""
    capped: Callable[..., Tensor] | None
    lse: Tensor


class FlexAttention(OnContiguousKV):
    """Prefill and decode, on CUDA; compiled for each form of a batch (torch 2.11 refuses varying sizes)."""

    name = "flex"

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while torch._dynamo is imported
            from torch.nn.attention import flex_attention

            self._make_mask: Any = flex_attention.create_block_mask
            self._attend: Any = torch.compile(flex_attention.flex_attention, dynamic=False)

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: Any) -> FlexPlan:
        device = batch.block_table.device
        room = (batch.tokens, spec.q_heads) if spec.lse else (1, 1)
        lse = torch.empty(room, dtype=torch.float32, device=device)
        return FlexPlan(spec, tuple(self._mask(group, spec) for group in kv.groups), _softcap(spec.softcap), lse)

    def _mask(self, group: Group, spec: AttentionSpec) -> Any:
        behind, window = group.kv_len - group.query_len, spec.window
        if not group.kv_len or (group.query_len == 1 and not 0 < window < group.kv_len):
            return None

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            position = query + behind
            seen = key <= position
            return seen & (key > position - window) if window else seen

        return self._make_mask(visible, None, None, group.query_len, group.kv_len, device=group.k.device)

    def run(self, q: Tensor, kv: Any, plan: object, out: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        import torch._dynamo

        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True):
            return self._run(q, kv, plan, out)

    def _run(self, q: Tensor, kv: Any, plan: object, out: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        assert isinstance(plan, FlexPlan) and isinstance(kv, ContiguousKV)
        spec = plan.spec
        sinks = spec.sinks[None, :, None] if spec.sinks is not None else None
        for group, mask in zip(kv.groups, plan.masks, strict=True):
            shape = (group.count, spec.q_heads, group.query_len)
            if group.kv_len:
                attended, lse = self._attend(
                    queries(q, group).contiguous(),
                    group.k,
                    group.v,
                    score_mod=plan.capped,
                    block_mask=mask,
                    scale=spec.scale,
                    enable_gqa=spec.group > 1,
                    return_lse=True,
                )
            else:
                attended = out.new_zeros((*shape, spec.head_dim))
                lse = plan.lse.new_full(shape, float("-inf"))
            if sinks is not None:
                with_sink = torch.logaddexp(lse, sinks.expand(shape))
                attended = attended * torch.exp(lse - with_sink)[..., None].to(attended.dtype)
                lse = with_sink
            put(out, group, attended)
            if spec.lse:
                put(plan.lse, group, lse)
        return (out, plan.lse) if spec.lse else out


def _softcap(cap: float) -> Callable[..., Tensor] | None:
    if not cap:
        return None

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped
