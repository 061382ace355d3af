"""Executes step plans: inputs → metadata → copies → layers → tokens; and the engine that schedules and runs.

Owns one decoder, one KV pool, the attention implementations of both phases and the phase boundaries of a step. A
`Runner` computes the plans it is given; an `Engine` adds the scheduler and real requests. No state is shared between
two of either in one process. A step is launched kernel by kernel or replayed from a captured graph; each says which,
and why. It does not measure anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kbench.catalog import Implementation
from kbench.engine.arms import arm_shape, load_decoder, open_device, select_phases
from kbench.engine.attending import Attending
from kbench.engine.core import EngineConfig, Request, StepPlan
from kbench.engine.graphs import StepGraphs
from kbench.engine.kv import KVPool
from kbench.engine.ladder import Ladder, StepRecord
from kbench.engine.metadata import MetadataBuilder
from kbench.engine.model import Decoder, Routing
from kbench.engine.phases import NullClock, Phases
from kbench.engine.requests import GREEDY, Sampling, TokenContent
from kbench.engine.scheduler import Scheduler
from kbench.engine.stepping import Stepper, Ticket
from kbench.errors import UsageError
from kbench.kernels.base import Attention
from kbench.selection import Mutation, SelectionRecord
from kbench.suite.schema import Arm


class Runner:
    """One model on one device with its KV pool. `pages` (default: the configuration's) are usable pages.

    `poison` fills the pool and every attention output with NaN first, so that a read of something unwritten shows
    (outputs: until `poison_outputs` is turned off).
    A `decoder` may be shared between runners of the same model, dtype and device. `role`: a runner of a draft model
    attends with what the arm names for drafts.
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
        role: str = "target",
    ) -> None:
        self.config = config
        self.device = open_device(device)
        self.pages = config.pages if pages is None else pages
        self.shape = decoder.shape if decoder is not None else arm_shape(arm)
        chosen = select_phases(arm, self.shape, device, role)
        self._chosen = {"decode": chosen[0], "prefill": chosen[1]}
        self._asked = (arm.page_size, arm.layout, arm.model.dtype)
        capacity = self.pages * config.page_size
        self._most_pages = min(self.pages, -(-self.shape.max_context // config.page_size))
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
        self._poison = poison
        most = max(config.max_batched_tokens, config.max_seqs)
        self._attending = Attending(chosen, self.shape, self.decoder, self.pool, most_tokens=most, poison=poison)
        self.use(*self._attending.implementations)
        builder = MetadataBuilder(
            page_size=config.page_size,
            max_tokens=most,
            max_seqs=config.max_seqs,
            device=self.device,
            dummy_page=self.pool.dummy_page,
            most_pages=self._most_pages,
        )
        self.graphs = StepGraphs(self.device) if arm.engine.graph == "graph" else None
        """None where the arm wants eager launches."""
        self._stepper = Stepper(self.decoder, self.pool, self._attending, builder, self.graphs)

    def use(self, decode: Attention, prefill: Attention) -> None:
        """Compute attention with these from now on."""
        self._attending.use(decode, prefill)
        self.ladder = Ladder(
            self.config.page_size,
            self._most_pages,
            self.config.max_seqs,
            max(self.config.max_batched_tokens, self.config.max_seqs),
            *self._attending.graph_support,
        )

    @property
    def selection(self) -> dict[str, SelectionRecord]:
        """Who was chosen for each phase and why, and whatever of it is no longer as it was chosen."""
        kv = self.pool.layers[0]
        have = (kv.page_size, kv.layout, str(kv.k.dtype).removeprefix("torch."))
        named = zip(("page_size", "layout", "dtype"), self._asked, have, strict=True)
        changed = tuple(Mutation(name, str(asked), str(has)) for name, asked, has in named if asked != has)
        found = {}
        for phase, chosen in self._chosen.items():
            record = chosen.checked()
            found[phase] = replace(record, mutations=(*record.mutations, *changed))
        return found

    def facts(self, phase: str) -> Implementation | None:
        """What is known of who was chosen for a phase; None of code that declares nothing."""
        return self._chosen[phase].facts

    @property
    def attention(self) -> tuple[Attention, Attention]:
        """Decode and prefill implementation in use."""
        return self._attending.implementations

    @property
    def converts(self) -> bool:
        """Whether either of them reads the cache in another layout than the pool's."""
        return self._attending.converts

    @property
    def poison_outputs(self) -> bool:
        """Fill attention outputs with NaN before every call; costs time, so off while steps are timed."""
        return self._attending.poison

    @poison_outputs.setter
    def poison_outputs(self, on: bool) -> None:
        self._attending.poison = on

    @property
    def routing(self) -> Routing | None:
        """What overrules the routers of layers with experts, or looks on."""
        return self._stepper.routing

    @routing.setter
    def routing(self, routing: Routing | None) -> None:
        self._stepper.routing = routing

    @property
    def last_logits(self) -> Tensor:
        """Logits of the last step's sampling rows, in the order of `StepPlan.sampling`; the next step may overwrite
        them."""
        return self._stepper.logits

    # ------------------------------------------------------------------------------------------ launches

    @property
    def last_step(self) -> StepRecord:
        """How the last step was computed, and why not from a graph."""
        return self._stepper.last

    @property
    def steps(self) -> Counter[tuple[str, str]]:
        """Steps so far by mode and reason."""
        return self._stepper.seen

    def force(self, *, eager: str = "", exact: bool = False) -> None:
        """From now on launch eagerly for this reason, or replay graphs without padding. Without arguments: as ever."""
        self._stepper.eager, self._stepper.exact = eager, exact

    def capture_ahead(self) -> None:
        """Capture all sizes of decodes alone, and nothing afterwards: no step of a replay pays for a capture."""
        if self.graphs is not None:
            self._stepper.capture_ahead(self.ladder)
            self.graphs.frozen = True

    # ------------------------------------------------------------------------------------------ steps

    def begin(self, plan: StepPlan, phases: Phases, before: Ticket | None = None) -> Ticket:
        """Launch a step that computes something. `before`: the step before it, where that has not ended; tokens that it
        sampled are taken on the device."""
        return self._stepper.begin(plan, phases, self.ladder, before.places() if before is not None else None)

    def end(self, ticket: Ticket, phases: Phases) -> list[int]:
        """Wait for a step's tokens. Steps end in the order in which they began, at most two are between."""
        return self._stepper.end(ticket, phases)

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop what is kept about requests that left the engine."""
        for request in requests:
            self._stepper.builder.forget(request.request_id)

    def reset(self) -> None:
        """Forget all requests and what the pool holds."""
        self._stepper.builder.reset()
        if self._poison:
            self.pool.poison()
        else:
            self.pool.clear()

    def idle(self) -> None:
        """Wait until the device has nothing in flight."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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
        role: str = "target",
    ) -> None:
        self.config = config or EngineConfig.from_arm(arm)
        self.runner = Runner(arm, device, self.config, decoder=decoder, poison=poison, role=role)
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
        tokens, finished = take_step(self.runner, self.scheduler, plan, clock)
        return StepDone(plan, tuple(tokens), finished)

    def step_overlapped(self, before: Ticket | None, phases: Phases | None = None) -> tuple[Ticket | None, StepDone]:
        """Begin the next step before the one `before` it ends: the host schedules while the device computes.

        What the ended step did is returned, its `finished` excepted: they are those of the step that began, whose
        number of tokens is known though its tokens are not. Where a request needs its last token on the host
        (penalties), the step before ends first. Begin with None; None comes back when nothing is left to begin.
        """
        clock = self._null if phases is None else phases
        with clock("schedule"):
            plan = self.scheduler.schedule()
        ended, tokens = before is None, list[int]()
        if before is not None and _needs_tokens(plan):
            ended, tokens = True, self._end(before, clock)
        ticket = self.runner.begin(plan, clock, None if ended else before) if plan.scheduled else None
        if before is not None and not ended:
            tokens = self._end(before, clock)
        with clock("bookkeeping"):
            finished = self.scheduler.commit(plan) if plan.scheduled else ()
            self.runner.forget((*finished, *plan.preempted))
        done = before.plan if before is not None else plan
        return ticket, StepDone(done, tuple(tokens), finished)

    def _end(self, ticket: Ticket, clock: Phases) -> list[int]:
        tokens = self.runner.end(ticket, clock)
        with clock("bookkeeping"):
            give_tokens(ticket.plan, tokens)
        return tokens

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


def take_step(
    runner: Runner, scheduler: Scheduler, plan: StepPlan, phases: Phases
) -> tuple[list[int], tuple[Request, ...]]:
    """Compute a planned step and commit it; its tokens, given to their requests, and who finished.

    It is committed while the device computes: that needs to know how many tokens there will be, and not which.
    """
    if not plan.scheduled:
        with phases("bookkeeping"):
            runner.forget(plan.preempted)
            return [], scheduler.commit(plan)
    ticket = runner.begin(plan, phases)
    if ticket.ready is None:  # nothing is in flight
        with phases("bookkeeping"):
            give_tokens(plan, ticket.answer)
            finished = scheduler.commit(plan)
            runner.forget(finished)
        return ticket.answer, finished
    with phases("bookkeeping"):
        finished = scheduler.commit(plan)
        runner.forget(finished)
    tokens = runner.end(ticket, phases)
    with phases("bookkeeping"):
        give_tokens(plan, tokens)
    return tokens, finished


def _needs_tokens(plan: StepPlan) -> bool:
    """Whether some request of a step is sampled by what it has so far."""
    contents = [item.request.content for item in plan.scheduled]
    return any(isinstance(content, TokenContent) and content.sampling.penalised for content in contents)


def give_tokens(plan: StepPlan, tokens: Sequence[int]) -> None:
    """Give each sampling request its token."""
    for item, token in zip(plan.sampling, tokens, strict=True):
        content = item.request.content
        if isinstance(content, TokenContent):
            content.append(token)


def output_of(request: Request) -> tuple[int, ...]:
    return request.content.output if isinstance(request.content, TokenContent) else ()
