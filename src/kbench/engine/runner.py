"""Executes step plans: inputs → metadata → copies → layers → tokens; and the engine that schedules and runs.

Owns one decoder, one KV pool, the attention implementations of both phases and the phase boundaries of a step. A
`Runner` computes the plans it is given; an `Engine` adds the scheduler and real requests. No state is shared between
two of either in one process. Launches are eager; it does not measure anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kbench.engine.arms import arm_shape, load_decoder, open_device, select
from kbench.engine.core import EngineConfig, Request, StepPlan
from kbench.engine.kv import KVPool
from kbench.engine.metadata import MetadataBuilder, StepInputs
from kbench.engine.model import Attend, Decoder, Routing
from kbench.engine.phases import NullClock, Phases
from kbench.engine.requests import GREEDY, Sampling, TokenContent
from kbench.engine.sampler import Ask, sample
from kbench.engine.scheduler import Scheduler
from kbench.errors import UsageError
from kbench.kernels.base import Attention
from kbench.kernels.registry import load
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV
from kbench.suite.schema import Arm


class _Backend:
    """One phase's implementation, and whether it reads the pool as it is. `specs` are the kinds of layers."""

    def __init__(self, implementation: Attention, pool: KVPool, specs: tuple[AttentionSpec, ...]) -> None:
        self.implementation = implementation
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


class Runner:
    """One model on one device with its KV pool. `pages` (default: the configuration's) are usable pages.

    `poison` fills the pool and every attention output with NaN first, so that a read of something unwritten shows
    (outputs: until `poison_outputs` is turned off).
    A `decoder` may be shared between runners of the same model, dtype and device.
    """

    def __init__(
        self,
        arm: Arm,
        device: str,
        config: EngineConfig,
        pages: int | None = None,
        *,
        decoder: Decoder | None = None,
        poison: bool = False,
    ) -> None:
        if arm.engine.graph != "eager":
            raise UsageError(f"variant {arm.name}: the engine launches eagerly only", remedy='set graph = "eager"')
        self.config = config
        self.device = open_device(device)
        self.pages = config.pages if pages is None else pages
        self.shape = decoder.shape if decoder is not None else arm_shape(arm)
        self.selection = {phase: select(arm, self.shape, phase, device) for phase in ("decode", "prefill")}
        capacity = self.pages * config.page_size
        self.decoder = decoder or load_decoder(arm, self.device, max_positions=min(capacity, self.shape.max_context))
        self.pool = KVPool(
            self.shape,
            pages=self.pages,
            page_size=config.page_size,
            layout=arm.layout,
            dtype=self.decoder.dtype,
            device=self.device,
            poison=poison,
        )
        kinds = self.shape.kinds
        self._kind_of = tuple(kinds.index(self.shape.kind_of(layer)) for layer in range(self.shape.layers))
        # Plans are made for a kind of layers, sinks differ by layer: each layer's are put here before it attends.
        self._sinks = torch.zeros(self.shape.q_heads, dtype=torch.float32, device=self.device)
        self.poison_outputs = poison
        """Fill attention outputs with NaN before every call; costs time, so off while steps are timed."""
        self._poison = poison
        self.use(
            load(arm.decode, "attention.decode", Path(arm.root)),
            load(arm.prefill, "attention.prefill", Path(arm.root)),
        )
        size = (max(config.max_batched_tokens, config.max_seqs), self.shape.q_heads, self.shape.head_dim)
        self._out = torch.zeros(size, dtype=self.decoder.dtype, device=self.device)
        self._builder = MetadataBuilder(
            page_size=config.page_size, max_tokens=size[0], max_seqs=config.max_seqs, device=self.device
        )
        self.routing: Routing | None = None
        """What overrules the routers of layers with experts, or looks on."""
        self.last_logits = torch.zeros(0, self.shape.vocab, device=self.device)
        """Logits of the last step's sampling rows, float32, in the order of `StepPlan.sampling`."""

    def use(self, decode: Attention, prefill: Attention) -> None:
        """Compute attention with these from now on."""
        heads = (self.shape.q_heads, self.shape.kv_heads, self.shape.head_dim)
        specs = tuple(
            AttentionSpec(*heads, kind.window, kind.softcap, self._sinks if kind.sinks else None)
            for kind in self.shape.kinds
        )
        self._decode = _Backend(decode, self.pool, specs)
        self._prefill = _Backend(prefill, self.pool, specs)

    @property
    def attention(self) -> tuple[Attention, Attention]:
        """Decode and prefill implementation in use."""
        return self._decode.implementation, self._prefill.implementation

    def execute(self, plan: StepPlan, phases: Phases) -> list[int]:
        """Compute a step; one token for each entry of `plan.sampling`, in that order."""
        builder = self._builder
        with phases("prepare"):
            for request in plan.preempted:
                builder.forget(request.request_id)
            if not plan.scheduled:
                return []
            step = builder.prepare(plan)
        with phases("metadata"):
            staged = builder.stage(step)
        with phases("h2d"):
            inputs = builder.upload(staged)
        with phases("metadata"):
            attend = self._attend(inputs, phases)
        with phases("forward"), torch.inference_mode():
            self.last_logits = self.decoder.forward(inputs, self.pool, attend, phases, self.routing)
        with phases("sample"), torch.inference_mode():
            tokens = sample(self.last_logits, _asks(plan))
        with phases("logits_copy"):
            answer: list[int] = tokens.tolist()
        with phases("bookkeeping"):
            # Freed here, so that it is somebody's time; at the return it would be nobody's.
            del step, staged, inputs, attend, tokens
        return answer

    def _attend(self, inputs: StepInputs, phases: Phases) -> Attend:
        """Plan both phases once; the returned callable computes attention of one layer."""
        split = inputs.decode_tokens
        total = inputs.tokens.shape[0]
        out = self._out[:total]
        parts = []
        if inputs.decode is not None:
            parts.append((self._decode, self._decode.plan(inputs.decode), slice(0, split)))
        if inputs.prefill is not None:
            parts.append((self._prefill, self._prefill.plan(inputs.prefill), slice(split, total)))
        attention, convert = phases("attention"), phases("convert")
        layers = self.decoder.weights.layers

        def part(backend: _Backend, plan: object, q: Tensor, kv: PagedKV, out: Tensor) -> Tensor:
            if backend.converts:
                with convert:
                    kv = backend.implementation.convert(kv)
            if self.poison_outputs:
                out.fill_(float("nan"))
            return backend.run(q, kv, plan, out)

        def attend(layer: int, q: Tensor) -> Tensor:
            with attention:
                kv, kind, sinks = self.pool.layers[layer], self._kind_of[layer], layers[layer].sinks
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

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop what is kept about requests that left the engine."""
        for request in requests:
            self._builder.forget(request.request_id)

    def reset(self) -> None:
        """Forget all requests and what the pool holds."""
        self._builder.reset()
        if self._poison:
            self.pool.poison()
        else:
            self.pool.clear()

    def idle(self) -> None:
        """Wait until the device has nothing in flight."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _asks(plan: StepPlan) -> list[Ask]:
    asks = []
    for item in plan.scheduled:
        content = item.request.content
        if item.samples and isinstance(content, TokenContent):
            asks.append(Ask(content.sampling, len(content.tokens), content.tokens, content.prompt_tokens))
    return asks


@dataclass(frozen=True, slots=True)
class StepDone:
    """What one engine step did. `tokens` belong to `plan.sampling`."""

    plan: StepPlan
    tokens: tuple[int, ...]
    finished: tuple[Request, ...]


class Engine:
    """Scheduler and runner over real requests: the same classes as virtual replay, with real tokens."""

    def __init__(
        self,
        arm: Arm,
        device: str,
        config: EngineConfig | None = None,
        *,
        decoder: Decoder | None = None,
        poison: bool = False,
    ) -> None:
        self.config = config or EngineConfig.from_arm(arm)
        self.runner = Runner(arm, device, self.config, decoder=decoder, poison=poison)
        self.scheduler = Scheduler(self.config)
        self._next_id = 0
        self._null = NullClock()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, prompt: Sequence[int], max_output_tokens: int, sampling: Sampling = GREEDY) -> Request:
        """Queue a request. Token ids beyond the vocabulary and contexts beyond the model's are UsageErrors."""
        vocab, longest = self.runner.shape.vocab, self.runner.shape.max_context
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
            raise UsageError("a prompt needs token ids", remedy=f"one or more, from 0 to {vocab - 1}")
        if len(prompt) + max_output_tokens > longest:
            raise UsageError(
                f"{len(prompt)} prompt and {max_output_tokens} output tokens", remedy=f"the model's limit is {longest}"
            )
        content = TokenContent(prompt, self.config.page_size, sampling)
        request = Request(self._next_id, len(content.tokens), max_output_tokens, content)
        self._next_id += 1
        self.scheduler.add(request)
        return request

    def step(self, phases: Phases | None = None) -> StepDone:
        """Schedule, compute and account for one step."""
        clock = self._null if phases is None else phases
        with clock("schedule"):
            plan = self.scheduler.schedule()
        tokens = self.runner.execute(plan, clock)
        with clock("bookkeeping"):
            finished = finish_step(self.scheduler, plan, tokens)
            self.runner.forget(finished)
        return StepDone(plan, tuple(tokens), finished)

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        self.runner.forget((request,))

    def reset(self) -> None:
        """Drop all requests, the prefix cache and the counters; keep the weights."""
        self.scheduler = Scheduler(self.config)
        self.runner.reset()

    def generate(
        self, prompts: Sequence[Sequence[int]], max_output_tokens: int, sampling: Sequence[Sampling] | None = None
    ) -> list[tuple[int, ...]]:
        """Outputs of all prompts, run together until none is left."""
        asked = sampling or [GREEDY] * len(prompts)
        requests = [self.add(prompt, max_output_tokens, how) for prompt, how in zip(prompts, asked, strict=True)]
        while self.has_work:
            self.step()
        return [output_of(request) for request in requests]


def finish_step(scheduler: Scheduler, plan: StepPlan, tokens: Sequence[int]) -> tuple[Request, ...]:
    """Give each request its token, then commit: page keys over new tokens must be known by then."""
    for item, token in zip(plan.sampling, tokens, strict=True):
        content = item.request.content
        if isinstance(content, TokenContent):
            content.append(token)
    return scheduler.commit(plan)


def output_of(request: Request) -> tuple[int, ...]:
    return request.content.output if isinstance(request.content, TokenContent) else ()
