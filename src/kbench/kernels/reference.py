"""The plain implementation: softmax(q kᵀ) v, one sequence at a time, scores materialised, in the cache's own dtype.

Slow on purpose and readable: what the other implementations are compared with when something is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV, same_dtype_lse


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    batch: AttentionBatch
    spec: AttentionSpec


class ReferenceAttention:
    """Decode and prefill; any dtype, page size, layout and head size."""

    name = "reference"

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> ReferencePlan:
        return ReferencePlan(batch, spec)

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        assert isinstance(plan, ReferencePlan)
        answer = same_dtype_lse(q, kv, plan.batch, plan.spec, out)
        return answer if plan.spec.lse else answer[0]
