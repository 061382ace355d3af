"""One engine step of exactly a given batch, repeatable from the same state.

Owns the requests, the scattered pages, the KV contents and the scheduler state behind a point, and puts them back
after each step. The step itself is the engine's own: the same `Scheduler.schedule`, `Runner.execute` and commit. It
takes no time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kbench.catalog import ModelShape, Point
from kbench.engine.arms import arm_shape, load_weights, open_device
from kbench.engine.core import EngineConfig, Request, RequestStatus
from kbench.engine.kv import Slots, Snapshot
from kbench.engine.model import Decoder, Weights
from kbench.engine.phases import Phases
from kbench.engine.requests import TokenContent
from kbench.engine.runner import Runner, give_tokens, take_step
from kbench.engine.scheduler import Scheduler
from kbench.engine.stepping import Ticket
from kbench.errors import MeasurementError, UsageError
from kbench.suite.schema import Arm

_SPARE_SHARE = 8
"""One page in eight is nobody's, so that a batch's pages have holes between them."""


@dataclass(frozen=True, slots=True)
class _Start:
    """What a step changes of a request, before the step."""

    request: Request
    content: TokenContent
    computed_tokens: int
    cached_pages: int


class BatchState:
    """A scheduler whose next step is exactly the point, and the way back to it."""

    def __init__(self, runner: Runner, point: Point, seed: int, *, first_id: int = 0, keeps_kv: bool = True) -> None:
        """`keeps_kv`: put back the K and V that a step overwrites; they cost memory for each token that it computes."""
        config = runner.config
        self._runner = runner
        self._scheduler = Scheduler(config)
        self._page_size = config.page_size
        tables = scattered_tables(self._scheduler, point, config.page_size, seed)
        draw = random.Random(seed)
        vocab = runner.shape.vocab
        self._starts = []
        for index, ((query, kv), pages) in enumerate(zip(point.sequences, tables, strict=True)):
            content = TokenContent([draw.randrange(vocab) for _ in range(kv)], config.page_size)
            # More output than any run of steps takes: the step never finishes a request.
            request = Request(first_id + index, kv, 2**40, content)
            request.pages = pages
            self._starts.append(_Start(request, content, kv - query, (kv - query) // config.page_size))
        self._expected = [(query, kv, True) for query, kv in point.sequences]
        self._snapshot: Snapshot | None = runner.pool.snapshot(self._slots(written=True)) if keeps_kv else None
        self.restore()

    @property
    def requests(self) -> list[Request]:
        return [start.request for start in self._starts]

    def _slots(self, *, written: bool) -> Slots:
        """Slots of the tokens that the step writes, or of all tokens before it, in sequence order."""
        pages: list[int] = []
        offsets: list[int] = []
        for start in self._starts:
            stop = start.request.prompt_tokens
            span = range(start.computed_tokens, stop) if written else range(start.computed_tokens)
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


def scattered_tables(scheduler: Scheduler, point: Point, page_size: int, seed: int) -> list[list[int]]:
    """Pages for every sequence, drawn without order from the whole pool, so that no two neighbours are adjacent.

    They are taken from the scheduler's pool, which then has none to give: a step of the point needs no more.
    """
    pages = list(scheduler.pool.allocate(scheduler.config.pages))
    random.Random(seed).shuffle(pages)
    tables = []
    for _, kv in point.sequences:
        needed = -(-kv // page_size)
        tables.append(pages[:needed])
        del pages[:needed]
    return tables


def config_of_points(arm: Arm, points: list[Point]) -> EngineConfig:
    """The arm's engine with room for each of the points: its own pool, not the one that workloads share."""
    needed = max(pages_of(point, arm.page_size) for point in points)
    return EngineConfig(
        page_size=arm.page_size,
        pages=needed + max(4, needed // _SPARE_SHARE),
        max_batched_tokens=max(arm.engine.max_batched_tokens, *(point.query_tokens for point in points)),
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
