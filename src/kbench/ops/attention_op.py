"""Paged attention under the contract of all operations.

Owns the translation only: what attention is lives in `ops.attention`, its inputs in `ops.inputs`, its right answers in
`ops.correctness`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.errors import UsageError
from kbench.ops import correctness
from kbench.ops.attention import AttentionSpec, cost, visible_tokens
from kbench.ops.base import Cost, Edge, InputSettings, Judgement, NullReport, Op, Outputs, Steps
from kbench.ops.correctness import Standard
from kbench.ops.inputs import (
    EdgeCase,
    Inputs,
    Kind,
    build,
    build_sets,
    edge_cases,
    far_bytes,
    far_edge,
    with_sinks,
)

FAR_SHARE = 0.5
"""Of the free device memory, at most so much for the pool whose pages lie far away."""


class PagedAttention(Op[Inputs, Standard]):
    """`attention.decode` and `attention.prefill`; implementations follow `kernels.base.Attention`."""

    kinds = ("random", "needle")
    arguments = ("q", "kv", "batch", "spec")

    def spec(self, shape: Resolved) -> AttentionSpec:
        """The layer, without the values of its sinks."""
        axes = shape.axes
        return AttentionSpec(
            q_heads=shape.integer("q_heads"),
            kv_heads=shape.integer("kv_heads"),
            head_dim=shape.integer("head_dim"),
            window=int(axes.get("window", 0)),
            softcap=float(axes.get("softcap", 0.0)),
            lse=bool(axes.get("lse", 0)),
        )

    def build(
        self, shape: Resolved, settings: InputSettings, kind: str = "random", *, sets: int = 1, **options: Any
    ) -> list[Inputs]:
        if shape.point is None:
            raise UsageError(f"{shape.op} needs a batch", remedy="write e.g. 32*1@4096")
        spec = self.spec(shape)
        if shape.axes.get("sinks"):
            spec = with_sinks(spec, shape.point.context, settings)
        if sets > 1:
            return build_sets(shape.point, spec, settings, sets)
        return [build(shape.point, spec, settings, cast("Kind", kind), **options)]

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        cases = edge_cases(shape.op, settings.page_size, int(shape.axes.get("window", 0)))
        edges = tuple(self._edge(case, shape) for case in cases)
        if settings.device.type != "cuda":
            return edges
        far, wanted = self._edge(far_edge(shape.op), shape), far_bytes(settings)
        free = FAR_SHARE * torch.cuda.mem_get_info(settings.device)[0]
        short = f"needs {wanted >> 30} GiB, {int(free) >> 30} GiB may be taken" if wanted > free else ""
        return (*edges, replace(far, skipped=short))

    @staticmethod
    def _edge(case: EdgeCase, shape: Resolved) -> Edge:
        options = {"aliased": case.aliased, "padding": case.padding, "far": case.far}
        return Edge(case.name, Resolved(shape.op, case.point, {**shape.axes, **case.axes}), case.kind, options)

    def standard(self, inputs: Inputs) -> Standard:
        return correctness.standard(inputs)

    def held_to(self, standard: Standard, limits: Mapping[torch.dtype, float]) -> Standard:
        """The log-sum-exp is no row of an output and keeps its own limit."""
        return replace(standard, limit=min(standard.limit, limits.get(standard.inputs.q.dtype, standard.limit)))

    def judge(self, answer: object, against: Standard) -> Judgement:
        return correctness.judge(answer, against)

    def nulls(self, standards: tuple[Standard, ...]) -> NullReport:
        return correctness.null_report(standards)

    def cost(self, inputs: Inputs) -> Cost:
        return cost(inputs.batch, inputs.spec, inputs.q.element_size())

    def outputs(self, inputs: Inputs) -> Outputs:
        q = inputs.q
        lse = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),) if inputs.spec.lse else ()
        return (torch.empty_like(q), *lse)

    def streamed_bytes(self, inputs: Inputs) -> int:
        spec = inputs.spec
        seen = visible_tokens(inputs.batch, spec)
        return 2 * seen * spec.kv_heads * spec.head_dim * inputs.q.element_size()

    def read_only(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return inputs.tensors()

    def activations(self, inputs: Inputs) -> Outputs:
        return (inputs.q,)

    def sharing(self, inputs: Inputs, first: Inputs) -> Inputs:
        return replace(inputs, q=first.q)

    def bind(self, implementation: Any, inputs: Inputs) -> Steps:
        return Steps(
            convert=lambda: self._convert(implementation, inputs),
            plan=lambda kv: implementation.plan(inputs.batch, inputs.spec, kv),
            run=lambda kv, plan, out: implementation.run(inputs.q, kv, plan, out[0]),
        )

    @staticmethod
    def _convert(implementation: Any, inputs: Inputs) -> Any:
        """An implementation with `convert_batch` wants this batch's keys and values in a form of its own, all of them:
        nothing that an engine can do in a step, and timed apart for that reason."""
        whole = getattr(implementation, "convert_batch", None)
        return implementation.convert(inputs.kv) if whole is None else whole(inputs.kv, inputs.batch, inputs.spec)
