"""One step on the device: staged, copied, launched or replayed, and its tokens on their way back.

Owns a step from its plan to its tokens, in two halves: `begin` launches, `end` waits. Between them the next step may
begin, with tokens that only the device knows. It decides by the ladder whether a step is replayed; it knows no arm and
no scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kbench.catalog.capability import GraphSupport
from kbench.engine.attending import Attending
from kbench.engine.core import StepPlan
from kbench.engine.graphs import StepGraphs
from kbench.engine.inputs import Draw, Draws, StepInputs
from kbench.engine.kv import KVPool
from kbench.engine.ladder import Ladder, StepRecord
from kbench.engine.metadata import MetadataBuilder, Prepared
from kbench.engine.model import Decoder, Routing
from kbench.engine.phases import NullClock, Phases
from kbench.engine.requests import Sampling, TokenContent
from kbench.engine.routing_control import DeclaredRouting
from kbench.engine.sampler import Ask, noise_state, sample
from kbench.engine.sizes import SEQUENCES, PartSize, StepSize
from kbench.errors import MeasurementError


@dataclass(frozen=True, slots=True)
class Ticket:
    """A step that was launched. On CUDA `tokens` are on the host once it is `ready`; on a CPU `answer` is all there is
    to wait for."""

    plan: StepPlan
    replayed: bool
    tokens: Tensor
    ready: torch.cuda.Event | None
    answer: list[int]

    def places(self) -> dict[int, int]:
        """Request → index of its token, from where the step after this one may be fed on the device."""
        return {item.request.request_id: index for index, item in enumerate(self.plan.sampling)}


class Stepper:
    """Steps of one decoder over one pool. `graphs` None: everything is launched kernel by kernel."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, attending: Attending, builder: MetadataBuilder, graphs: StepGraphs | None
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._attending = attending
        self._graphs = graphs
        self._null = NullClock()
        self._generation = 0
        self.builder = builder
        self.routing: Routing | None = None
        self.eager = ""
        self.exact = False
        self.last = StepRecord("eager")
        self.seen: Counter[tuple[str, str]] = Counter()
        device, rows = decoder.device, builder.most_rows
        self._sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logits = torch.zeros(0, decoder.shape.vocab, dtype=decoder.dtype, device=device)
        self._room = self.logits
        on_cuda = device.type == "cuda"
        # Two in turn: while the host reads the tokens of one step, the next one's may arrive.
        self._answers = [torch.zeros(rows, dtype=torch.int64, pin_memory=on_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() if on_cuda else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def begin(self, plan: StepPlan, phases: Phases, ladder: Ladder, pending: Mapping[int, int] | None = None) -> Ticket:
        """Launch a step. `pending`: `places` of the step before, where that has not ended."""
        with phases("prepare"):
            for request in plan.preempted:
                self.builder.forget(request.request_id)
            step = self.builder.prepare(plan, pending)
            size = self._captured_size(step, ladder)
            if isinstance(size, str):
                self._record(StepRecord("eager", size))
        ticket = None if isinstance(size, str) else self._replay(plan, step, size, phases)
        return ticket or self._launch(plan, step, phases)

    def end(self, ticket: Ticket, phases: Phases) -> list[int]:
        """Wait for a step; one token for each entry of `plan.sampling`, in that order."""
        if ticket.ready is None:
            return ticket.answer
        with phases("forward" if ticket.replayed else "logits_copy"):
            ticket.ready.synchronize()
        with phases("logits_copy"):
            answer: list[int] = ticket.tokens.tolist()
        return answer

    def _record(self, record: StepRecord) -> None:
        self.last = record
        self.seen[record.mode, record.reason] += 1

    def _captured_size(self, step: Prepared, ladder: Ladder) -> StepSize | str:
        """What a step is padded to in order to be replayed, or why it is launched eagerly."""
        if self._graphs is None:
            return "the arm wants eager launches"
        if self.eager:
            return self.eager
        if self.routing is not None and (step.prefills or not isinstance(self.routing, DeclaredRouting)):
            # A declared one goes by the row, and only decodes keep theirs when a step is padded.
            return "the experts' routing is overruled"
        queries = [item.query_tokens for item in step.prefills]
        return ladder.pad(self.builder.size_of(step), queries, exact=self.exact)

    # ------------------------------------------------------------------------------------------ eager

    def _launch(self, plan: StepPlan, step: Prepared, phases: Phases) -> Ticket:
        """The step, kernel by kernel, in its own size."""
        builder = self.builder
        with phases("metadata"):
            draws = _draws(plan) if self._decoder.ops.draws else None
            staged = builder.stage(step, draws=draws)
        with phases("h2d"):
            inputs = builder.upload(staged)
        with phases("metadata"):
            attend = self._attending.plan(inputs, phases)
        with phases("forward"), torch.inference_mode():
            self.logits = self._decoder.forward(inputs, self._pool, attend, phases, self.routing, sampled=self._sampled)
        with phases("sample"), torch.inference_mode():
            tokens = self._tokens(plan, self.logits, inputs.draws, phases)
        with phases("logits_copy"):
            ticket = self._to_host(plan, tokens, replayed=False)
            # Freed here, so that it is somebody's time; at the return it would be nobody's.
            del step, staged, inputs, attend, tokens
        return ticket

    # ----------------------------------------------------------------------------------------- replay

    def _replay(self, plan: StepPlan, step: Prepared, size: StepSize, phases: Phases) -> Ticket | None:
        """The step padded to `size`, all of it one replay; None where that turns out to be impossible."""
        graphs, builder = self._graphs, self.builder
        assert graphs is not None
        with phases("metadata"):
            draws = _draws(plan) if self._decoder.ops.draws else None
            staged = builder.stage(step, size, draws)
        with phases("h2d"):
            builder.copy(staged)
        with phases("forward"), torch.inference_mode():
            key = self._key(size, draws is not None)
            if key not in graphs:
                refusal = self._ready(size, draws is not None)
                if refusal:
                    self._record(StepRecord("eager", refusal))
                    return None
            tokens = self._pick(step, size, graphs.run(key))
            chosen = draws is not None or _greedy(plan)
            ticket = self._to_host(plan, tokens, replayed=True) if chosen else None
            self._record(StepRecord(graphs.mode, "", size.tokens - len(step.tokens)))
            del staged, tokens  # here, so that it is somebody's time
        if ticket is None:
            with phases("sample"), torch.inference_mode():
                tokens = self._tokens(plan, self.logits, None, phases)
                ticket = self._to_host(plan, tokens, replayed=True)
        return ticket

    def capture_ahead(self, ladder: Ladder) -> None:
        """Capture all sizes of decodes alone, on rows that stand for nobody; the largest first, to size the pool."""
        nobody = Prepared((), (), [], [])
        if ladder.decode is GraphSupport.NEVER:
            return
        for sequences in reversed(ladder.sequences):
            for width in reversed(ladder.widths):
                size = StepSize(sequences, sequences, decode=PartSize(sequences, width))
                self.builder.copy(self.builder.stage(nobody, size))
                with torch.inference_mode():
                    self._ready(size, False)

    def _key(self, size: StepSize, drawn: bool) -> Hashable:
        """What a captured graph depends on, besides buffers that stay where they are."""
        self._make_room(size.logit_rows)
        return (size, drawn, self._attending.poison, *map(id, self._held()))

    def _ready(self, size: StepSize, drawn: bool) -> str:
        """Have a graph for the inputs that lie on the device; why there is none, or an empty string."""
        assert self._graphs is not None
        body = partial(self._body, self.builder.bounds(size, drawn=drawn))
        return self._graphs.ready(self._key(size, drawn), body, self._held(), self._sampled)

    def _held(self) -> tuple[object, ...]:
        """What a captured graph has inside it, by identity."""
        return (*self._attending.implementations, self.routing)

    def _body(self, inputs: StepInputs) -> Tensor:
        """Everything that a captured step launches."""
        logits = self._room[: inputs.logit_rows.shape[0]]
        attend = self._attending.plan(inputs, self._null)
        self._decoder.forward(inputs, self._pool, attend, self._null, self.routing, sampled=self._sampled, out=logits)
        ops = self._decoder.ops
        if inputs.draws is None:
            return ops.argmax(logits, self._sampled)
        return ops.draw(logits, inputs.draws, self._sampled)

    def _make_room(self, rows: int) -> None:
        """Buffers that captured graphs point at; where one of them moves, the graphs are worthless."""
        assert self._graphs is not None
        if self.builder.arena.generation != self._generation:
            self._graphs.clear()
            self._generation = self.builder.arena.generation
        if self._room.shape[0] < rows:
            self._graphs.clear()
            most = max(rows, min(self.builder.max_seqs, SEQUENCES[-1]))
            self._room = self._room.new_zeros((most, self._room.shape[1]))

    def _pick(self, step: Prepared, size: StepSize, tokens: Tensor) -> Tensor:
        """Tokens of the rows that were asked for, in their order; `logits` are theirs afterwards."""
        rows = step.logit_rows
        if size.prefill.sequences or rows == list(range(len(rows))):
            self.logits = self._room[: len(rows)]
            return tokens[: len(rows)]
        # A graph of decodes alone computes every row.
        wanted = torch.tensor(rows, device=tokens.device)
        self.logits = self._room[wanted]
        self._sampled[: len(rows)] = tokens[wanted]
        return tokens[wanted]

    # ----------------------------------------------------------------------------------------- tokens

    def _tokens(self, plan: StepPlan, logits: Tensor, draws: Draws | None, phases: Phases) -> Tensor:
        """One token a row of logits, left on the device for the next step to be fed."""
        if draws is not None:
            return self._decoder.ops.draw(logits, draws, self._sampled)
        if _greedy(plan):
            return self._decoder.ops.argmax(logits, self._sampled)
        tokens = sample(logits, _asks(plan), phases("logits_copy"))
        self._sampled[: tokens.shape[0]] = tokens
        return tokens

    def _to_host(self, plan: StepPlan, tokens: Tensor, *, replayed: bool) -> Ticket:
        self._turn ^= 1
        event = self._events[self._turn]
        if event is None:
            return Ticket(plan, replayed, tokens, None, tokens.tolist())
        host = self._answers[self._turn][: tokens.shape[0]]
        host.copy_(tokens, non_blocking=True)
        event.record()
        return Ticket(plan, replayed, host, event, [])


def _greedy(plan: StepPlan) -> bool:
    """Whether one argmax of the logits as they are is the answer of every row."""
    return all(sampling.plain for _, sampling in _samplings(plan))


def _draws(plan: StepPlan) -> list[Draw] | None:
    """How a device draws the tokens of a step; None where all are greedy, or penalties or masks come first."""
    samplings = _samplings(plan)
    if all(sampling.plain for _, sampling in samplings) or any(
        sampling.penalised or sampling.masked for _, sampling in samplings
    ):
        return None
    return [
        Draw(each.temperature, each.top_k, each.top_p, noise_state(each.seed, position)) for position, each in samplings
    ]


def _samplings(plan: StepPlan) -> list[tuple[int, Sampling]]:
    """The position of each token that a step yields, and how it is chosen."""
    pairs = [(item.kv_tokens, item.request.content) for item in plan.scheduled if item.samples]
    return [(position, content.sampling) for position, content in pairs if isinstance(content, TokenContent)]


def _asks(plan: StepPlan) -> list[Ask]:
    """What each sampling request of a step wants."""
    asks = []
    for item in plan.scheduled:
        content = item.request.content
        if item.samples and isinstance(content, TokenContent):
            if content.sampling.penalised and len(content.tokens) < item.kv_tokens:
                raise MeasurementError(f"request {item.request.request_id} has penalties and an unknown last token")
            asks.append(Ask(content.sampling, item.kv_tokens, content.tokens, content.prompt_tokens))
    return asks
