"""Attention of a step: both phases' implementations, planned once a step and asked layer by layer.

Owns the implementations, what is true of their plans (kinds of layers, sinks, conversion) and the buffer of answers. It
knows neither the model nor how a step is launched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kbench.catalog import ModelShape
from kbench.catalog.capability import GraphSupport
from kbench.engine.arms import Selected
from kbench.engine.inputs import StepInputs
from kbench.engine.kv import KVPool
from kbench.engine.model import Attend, Decoder
from kbench.engine.phases import Phases
from kbench.kernels.base import Attention
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV


class _Backend:
    """One phase's implementation, and whether it reads the pool as it is. `specs` are the kinds of layers."""

    def __init__(
        self, implementation: Attention, pool: KVPool, specs: tuple[AttentionSpec, ...], graph: GraphSupport
    ) -> None:
        self.implementation = implementation
        self.graph = graph
        self._specs = specs
        self._pool = pool
        # Asked once: what is converted keeps its shape and layout, so one layer's answer serves every plan.
        self._shape = implementation.convert(pool.layers[0])
        self.converts = self._shape is not pool.layers[0]

    def plan(self, batch: AttentionBatch) -> tuple[object, ...]:
        """One plan a kind of layers."""
        return tuple(self.implementation.plan(batch, spec, self._shape) for spec in self._specs)

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        return self.implementation.run(q, kv, plan, out)


class Attending:
    """Who attends in one runner. `chosen`: of decode and prefill. `most_tokens`: rows of the largest step."""

    def __init__(
        self,
        chosen: tuple[Selected, Selected],
        shape: ModelShape,
        decoder: Decoder,
        pool: KVPool,
        *,
        most_tokens: int,
        poison: bool,
    ) -> None:
        self.poison = poison
        """Fill outputs with NaN before every call."""
        self._shape = shape
        self._pool = pool
        self._layers = decoder.weights.layers
        self._kind_of = tuple(shape.kinds.index(shape.kind_of(layer)) for layer in range(shape.layers))
        # Plans are made for a kind of layers, sinks differ by layer: each layer's are put here before it attends.
        self._sinks = torch.zeros(shape.q_heads, dtype=torch.float32, device=decoder.device)
        size = (most_tokens, shape.q_heads, shape.head_dim)
        self._out = torch.zeros(size, dtype=decoder.dtype, device=decoder.device)
        self._declared = tuple((one.implementation, one.graph) for one in chosen)
        self.use(chosen[0].implementation, chosen[1].implementation)

    def use(self, decode: Attention, prefill: Attention) -> None:
        """Compute attention with these from now on."""
        heads = (self._shape.q_heads, self._shape.kv_heads, self._shape.head_dim)
        specs = tuple(
            AttentionSpec(*heads, kind.window, kind.softcap, self._sinks if kind.sinks else None)
            for kind in self._shape.kinds
        )
        self._decode = _Backend(decode, self._pool, specs, self._support_of(decode))
        self._prefill = _Backend(prefill, self._pool, specs, self._support_of(prefill))

    def _support_of(self, given: Attention) -> GraphSupport:
        """What the arm's own implementations declare; of others nothing is known, and nothing is captured."""
        return next((support for known, support in self._declared if known is given), GraphSupport.NEVER)

    @property
    def implementations(self) -> tuple[Attention, Attention]:
        """Decode and prefill."""
        return self._decode.implementation, self._prefill.implementation

    @property
    def converts(self) -> bool:
        return self._decode.converts or self._prefill.converts

    @property
    def graph_support(self) -> tuple[GraphSupport, GraphSupport]:
        """Of decode and prefill."""
        return self._decode.graph, self._prefill.graph

    def plan(self, inputs: StepInputs, phases: Phases) -> Attend:
        """Plan both phases once; the returned callable computes attention of one layer."""
        split, total = inputs.decode_tokens, inputs.tokens.shape[0]
        out = self._out[:total]
        parts = []
        if inputs.decode is not None:
            parts.append((self._decode, self._decode.plan(inputs.decode), slice(0, split)))
        if inputs.prefill is not None:
            parts.append((self._prefill, self._prefill.plan(inputs.prefill), slice(split, total)))
        attention, convert = phases("attention"), phases("convert")

        def part(backend: _Backend, plan: object, q: Tensor, kv: PagedKV, out: Tensor) -> Tensor:
            if backend.converts:
                with convert:
                    kv = backend.implementation.convert(kv)
            if self.poison:
                out.fill_(float("nan"))
            return backend.run(q, kv, plan, out)

        def attend(layer: int, q: Tensor) -> Tensor:
            with attention:
                kv, kind, sinks = self._pool.layers[layer], self._kind_of[layer], self._layers[layer].sinks
                if sinks is not None:
                    self._sinks.copy_(sinks)
                if len(parts) == 1:
                    backend, plans, _ = parts[0]
                    return part(backend, plans[kind], q, kv, out)
                for backend, plans, rows in parts:
                    own = out[rows]
                    result = part(backend, plans[kind], q[rows], kv, own)
                    if result.data_ptr() != own.data_ptr():
                        own.copy_(result)
                return out

        return attend
