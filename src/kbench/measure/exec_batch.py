"""One engine step of exactly a given batch, repeatable from the same state.

Owns the requests, the scattered pages, the KV contents and the scheduler state behind a point, and puts them back
after each step. The step itself is the engine's own: the same `Scheduler.schedule`, `Runner.execute` and commit. It
takes no time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kbench.catalog import PLAIN, ModelShape, Point, StepAttributes
from kbench.catalog.lengths import shared_tokens
from kbench.engine.arms import arm_shape, load_weights, open_device
from kbench.engine.core import EngineConfig, Request, RequestStatus
from kbench.engine.kv import Slots, Snapshot
from kbench.engine.model import Decoder, Weights
from kbench.engine.phases import Phases
from kbench.engine.requests import GREEDY, Sampling, TokenContent
from kbench.engine.runner import Runner, give_tokens, take_step
from kbench.engine.scheduler import Scheduler
from kbench.engine.stepping import Ticket
from kbench.errors import MeasurementError, UsageError
from kbench.suite.schema import Arm

_SPARE_SHARE = 8
"""One page in eight is nobody's, so that a batch's pages have holes between them."""
_GRAMMAR_SHARE = 8
"""A grammar allows one token in eight."""


@dataclass(frozen=True, slots=True)
class _Start:
    """What a step changes of a request, before the step."""

    request: Request
    content: TokenContent
    computed_tokens: int
    kv_tokens: int
    """After the step."""
    cached_pages: int


class BatchState:
    """A scheduler whose next step is exactly the point, and the way back to it."""

    def __init__(
        self,
        runner: Runner,
        point: Point,
        seed: int,
        *,
        first_id: int = 0,
        keeps_kv: bool = True,
        attributes: StepAttributes = PLAIN,
    ) -> None:
        """`keeps_kv`: put back the K and V that a step overwrites; they cost memory for each token that it computes.

        `attributes`: how pages are scattered and shared and how tokens are sampled; the rest of them is the runner's.
        """
        config = runner.config
        self._runner = runner
        self._scheduler = Scheduler(config)
        self._page_size = config.page_size
        tables = scattered_tables(self._scheduler, point, config.page_size, seed, attributes.scatter)
        self._shared = shared_tokens(point, attributes.prefix_share, config.page_size)
        share_pages(tables, self._shared // config.page_size)
        draw = random.Random(seed)
        vocab = runner.shape.vocab
        self._starts = []
        for index, ((query, kv), chunk, pages) in enumerate(zip(point.sequences, point.chunks, tables, strict=True)):
            prompt = [draw.randrange(vocab) for _ in range(kv + chunk)]  # one more token to come makes it a chunk
            content = TokenContent(prompt, config.page_size, _sampling(attributes, vocab, index))
            # More output than any run of steps takes: the step never finishes a request.
            request = Request(first_id + index, len(prompt), 2**40, content)
            request.pages = pages
            self._starts.append(_Start(request, content, kv - query, kv, (kv - query) // config.page_size))
        self._expected = [
            (query, kv, not chunk) for (query, kv), chunk in zip(point.sequences, point.chunks, strict=True)
        ]
        self._snapshot: Snapshot | None = runner.pool.snapshot(self._slots(written=True)) if keeps_kv else None
        self.restore()

    @property
    def requests(self) -> list[Request]:
        return [start.request for start in self._starts]

    def _slots(self, *, written: bool) -> Slots:
        """Slots of the tokens that the step writes, or of all tokens before it, in sequence order."""
        pages: list[int] = []
        offsets: list[int] = []
        for place, start in enumerate(self._starts):
            shared = self._shared if place else 0  # filled once, with the first sequence
            first, stop = (start.computed_tokens, start.kv_tokens) if written else (shared, start.computed_tokens)
            span = range(first, stop)
            pages += [start.request.pages[position // self._page_size] for position in span]
            offsets += [position % self._page_size for position in span]
        device = self._runner.device
        page = torch.tensor(pages, dtype=torch.int64, device=device)
        offset = torch.tensor(offsets, dtype=torch.int64, device=device)
        return Slots(page * self._page_size + offset, page, offset)

    def fill(self, seed: int) -> None:
        """Random K and V for all tokens before the step; every other slot keeps what it has (NaN where poisoned)."""
        generator = torch.Generator(self._runner.device).manual_seed(seed)
        self._runner.pool.fill_random(self._slots(written=False), generator)

    def restore(self) -> None:
        """Back to the state before the step: requests, queue, and the slots that it wrote."""
        self.rewind()
        if self._snapshot is not None:
            self._runner.pool.restore(self._snapshot)

    def rewind(self) -> None:
        """Requests and queue only: the next step overwrites the slots with the same K and V."""
        for start in self._starts:
            request = start.request
            request.status = RequestStatus.RUNNING
            request.computed_tokens = start.computed_tokens
            request.output_tokens = 0
            request.cached_pages = start.cached_pages
            start.content.truncate(request.prompt_tokens, start.cached_pages)
        self._scheduler.running = [start.request for start in self._starts]

    def step(self, phases: Phases) -> list[int]:
        """schedule → execute → commit, as the engine does it; the sampled tokens."""
        scheduler = self._scheduler
        with phases("schedule"):
            plan = scheduler.schedule()
        return take_step(self._runner, scheduler, plan, phases)[0]

    def step_overlapped(self, before: Ticket | None, phases: Phases) -> Ticket:
        """Begin the step, then end the one before: what `Engine.step_overlapped` does. `rewind` comes in between."""
        plan = self._scheduler.schedule()
        ticket = self._runner.begin(plan, phases, before)
        if before is not None:
            give_tokens(before.plan, self._runner.end(before, phases))
        self._scheduler.commit(plan)
        return ticket

    def check_plan(self) -> None:
        """Raise MeasurementError unless the scheduler plans the point. Leaves the state to be restored."""
        planned = [(item.query_tokens, item.kv_tokens, item.samples) for item in self._scheduler.schedule().scheduled]
        if planned != self._expected:
            raise MeasurementError(
                f"the scheduler plans {planned[:4]}… for {self._expected[:4]}…", remedy="report this point as a bug"
            )


def scattered_tables(
    scheduler: Scheduler, point: Point, page_size: int, seed: int, scatter: float = 1.0
) -> list[list[int]]:
    """Pages for every sequence from the whole pool; a share `scatter` of them in random order, the rest in the pool's.

    They are taken from the scheduler's pool, which then has none to give: a step of the point needs no more.
    """
    pages = list(scheduler.pool.allocate(scheduler.config.pages))
    draw = random.Random(seed)
    if scatter >= 1.0:
        draw.shuffle(pages)
    else:
        places = sorted(draw.sample(range(len(pages)), round(scatter * len(pages))))
        moved = [pages[place] for place in places]
        draw.shuffle(moved)
        for place, page in zip(places, moved, strict=True):
            pages[place] = page
    tables = []
    for _, kv in point.sequences:
        needed = -(-kv // page_size)
        tables.append(pages[:needed])
        del pages[:needed]
    return tables


def share_pages(tables: list[list[int]], pages: int) -> None:
    """Let all sequences begin with the first `pages` pages of the first one."""
    for table in tables[1:]:
        table[:pages] = tables[0][:pages]


def _sampling(attributes: StepAttributes, vocab: int, index: int) -> Sampling:
    """How the `index`-th sequence's token is chosen."""
    if attributes.sampling == "topkp":
        return Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=index)
    if attributes.sampling == "grammar":
        return Sampling(allowed=frozenset(range(index % _GRAMMAR_SHARE, vocab, _GRAMMAR_SHARE)))
    return GREEDY


def config_of_points(arm: Arm, points: list[Point]) -> EngineConfig:
    """The arm's engine with room for each of the points: its own pool, not the one that workloads share."""
    needed = max(pages_of(point, arm.page_size) for point in points)
    budgets = [arm.engine.max_batched_tokens, *(point.query_tokens for point in points)]
    if any(any(point.chunks) for point in points):
        budgets = budgets[1:]  # a chunk ends where the budget does
    return EngineConfig(
        page_size=arm.page_size,
        pages=needed + max(4, needed // _SPARE_SHARE),
        max_batched_tokens=max(budgets),
        max_seqs=max(arm.engine.max_seqs, *(point.batch for point in points)),
        prefix_caching=arm.engine.prefix_caching,
        chunked_prefill=arm.engine.chunked_prefill,
        watermark=arm.engine.watermark,
    )


def pages_of(point: Point, page_size: int) -> int:
    return sum(-(-kv // page_size) for _, kv in point.sequences)


class KeptWeights:
    """The weights of one arm on one device: loaded when a case first needs them, kept for those after it."""

    def __init__(self) -> None:
        self._weights: Weights | None = None

    def of(self, arm: Arm, device: str) -> Weights:
        if self._weights is None:
            self._weights = load_weights(arm, open_device(device))
        return self._weights


def open_runner(arm: Arm, device: str, points: list[Point], kept: KeptWeights | None = None) -> Runner:
    """A poisoned runner with a pool for the largest of the points. A pool beyond the device's memory is UsageError."""
    config = config_of_points(arm, points)
    shape = arm_shape(arm)
    longest = max(point.context for point in points)
    if longest > shape.max_context:
        raise UsageError(
            f"a context of {longest} tokens", remedy=f"{shape.name} takes up to {shape.max_context}; shorten the point"
        )
    _check_memory(arm, device, shape, config)
    capacity = min(config.pages * config.page_size, shape.max_context)
    decoder = Decoder(shape, kept.of(arm, device), max_positions=capacity) if kept is not None else None
    runner = Runner(arm, device, config, decoder=decoder, poison=True)
    runner.poison_outputs = False
    return runner


def _check_memory(arm: Arm, device: str, shape: ModelShape, config: EngineConfig) -> None:
    itemsize = 4 if arm.model.dtype == "float32" else 2
    wanted = (config.pages + 2) * config.page_size * shape.kv_bytes_per_token(itemsize)
    if open_device(device).type == "cuda":
        torch.cuda.empty_cache()  # what earlier cases left behind is free, for this process and for the one beside it
        free = torch.cuda.mem_get_info()[0]
        place = "free on the device"
    else:
        import psutil

        free = int(psutil.virtual_memory().available)
        place = "free in memory"
    if wanted > free:
        raise UsageError(
            f"the KV pool needs {wanted / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are {place}",
            remedy="take a smaller point, fewer layers or a narrower dtype",
        )
