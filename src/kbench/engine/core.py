"""The nouns of the embedded engine that every replay shares: configuration, request, and the plan of one step.

Owns what the scheduler, the torch runner and the replays hand to each other. It knows neither torch nor how a page
is found, and holds no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableSequence, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kbench.engine.sizes import captured_sequences
from kbench.errors import UsageError
from kbench.suite.schema import Arm

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NULL_PAGE = 0
"""Never allocated; unused block table entries point at it."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the scheduler needs to know of an arm. `pages` are usable pages, the null page excluded."""

    page_size: int
    pages: int
    max_batched_tokens: int
    max_seqs: int
    prefix_caching: bool = True
    chunked_prefill: bool = True
    watermark: float = 0.0
    captured: tuple[int, ...] = ()
    """Batch sizes that decodes are padded to, because graphs are captured for them; empty: none are padded."""

    def __post_init__(self) -> None:
        for name in ("page_size", "pages", "max_batched_tokens", "max_seqs"):
            if getattr(self, name) < 1:
                raise UsageError(f"engine.{name} is {getattr(self, name)}", remedy="use 1 or more")
        if not 0.0 <= self.watermark < 1.0:
            raise UsageError(f"engine.watermark is {self.watermark}", remedy="use a share from 0 to below 1")

    @classmethod
    def from_arm(cls, arm: Arm) -> EngineConfig:
        """The engine of a resolved variant; a pool smaller than one page is a UsageError."""
        engine = arm.engine
        pages = engine.kv_tokens // arm.page_size
        if pages < 1:
            raise UsageError(
                f"variant {arm.name}: a pool of {engine.kv_tokens} tokens holds no page of {arm.page_size}",
                remedy="raise engine.kv_tokens or lower page_size",
            )
        return cls(
            page_size=arm.page_size,
            pages=pages,
            max_batched_tokens=engine.max_batched_tokens,
            max_seqs=engine.max_seqs,
            prefix_caching=engine.prefix_caching,
            chunked_prefill=engine.chunked_prefill,
            watermark=engine.watermark,
            captured=captured_sequences(engine.max_seqs) if engine.graph == "graph" else (),
        )


class Content(Protocol):
    """What a request's tokens are, as far as the prefix cache must know."""

    def page_key(self, index: int) -> Hashable:
        """Key of full page `index` of prompt + output so far, chained: it identifies the whole prefix up to there.

        Asked only for pages whose tokens are all known.
        """
        ...

    def page_proof(self, index: int) -> object:
        """What must be equal on a hit, else the hit is refused: the tokens, or the key itself where it is exact."""
        ...

    def page_keys(self, start: int, stop: int) -> Sequence[Hashable]:
        """`page_key` of pages `start` to `stop` - 1 at once. Inherit this one unless there is a faster way."""
        return [self.page_key(index) for index in range(start, stop)]


class ExactContent:
    """Content whose keys cannot be equal by chance, listed when first asked for: a key is its own proof.

    What a trace says about its requests is of this kind. The pool does not compare proofs of such content.
    """

    __slots__ = ("_keys", "_source")

    def __init__(self, source: Callable[[], Sequence[Hashable]]) -> None:
        self._source = source
        self._keys: Sequence[Hashable] | None = None

    @property
    def keys(self) -> Sequence[Hashable]:
        """Keys of all full pages of prompt and output, the first page first."""
        if self._keys is None:
            self._keys = self._source()
        return self._keys

    def page_key(self, index: int) -> Hashable:
        return self.keys[index]

    def page_proof(self, index: int) -> object:
        return self.keys[index]

    def page_keys(self, start: int, stop: int) -> Sequence[Hashable]:
        return self.keys[start:stop]


class NumberedContent(ExactContent):
    """Exact content whose keys are small whole numbers, in an array: what `engine.number_pool` works with.

    `own_output` says that the pages which end in the request's output have keys that no request uses beside it: only
    itself, and those that begin after it ended.
    """

    __slots__ = ("_count", "numbers", "own_output")

    numbers: NDArray[np.int64]
    """Keys of all full pages of prompt and output, the first page first; counted when first asked for."""

    def __init__(self, count: Callable[[], NDArray[np.int64]], *, own_output: bool) -> None:
        super().__init__(self._listed)
        self._count = count
        self.own_output = own_output

    def __getattr__(self, name: str) -> NDArray[np.int64]:
        # Called for a slot that is empty: later reads cost no call, and there are millions.
        if name != "numbers":
            raise AttributeError(name)
        self.numbers = self._count()
        return self.numbers

    def _listed(self) -> Sequence[Hashable]:
        listed: list[int] = self.numbers.tolist()
        return listed


class RequestStatus(StrEnum):
    """Where a request is in the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"


class Request:
    """One model call and its state in the engine. Compared by identity.

    `computed_tokens` counts tokens whose KV is in `pages`; `output_tokens` counts generated tokens, the last of which
    has no KV yet. `hit_tokens` are those of the first admission only. `recomputed_tokens` are tokens that had been
    computed, were lost to preemption and were computed again; they are no hits. `recompute_until` is how far the
    request had got when it was last preempted. `cached_pages` counts leading pages offered to the prefix cache.
    """

    __slots__ = (
        "cached_pages",
        "computed_tokens",
        "content",
        "exact_keys",
        "hit_tokens",
        "max_output_tokens",
        "output_tokens",
        "pages",
        "preemptions",
        "prompt_tokens",
        "recompute_until",
        "recomputed_tokens",
        "rehit_tokens",
        "request_id",
        "status",
    )

    def __init__(self, request_id: int, prompt_tokens: int, max_output_tokens: int, content: Content) -> None:
        if prompt_tokens < 1 or max_output_tokens < 1:
            raise UsageError(
                f"request {request_id}: {prompt_tokens} prompt and {max_output_tokens} output tokens",
                remedy="both must be 1 or more",
            )
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.content = content
        self.exact_keys = isinstance(content, ExactContent)
        self.status = RequestStatus.WAITING
        self.computed_tokens = 0
        self.output_tokens = 0
        self.pages: MutableSequence[int] = []
        self.cached_pages = 0
        self.hit_tokens = 0
        self.rehit_tokens = 0
        self.recompute_until = 0
        self.recomputed_tokens = 0
        self.preemptions = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, {self.computed_tokens}/{self.total_tokens} computed, "
            f"{len(self.pages)} pages)"
        )


class Scheduled(NamedTuple):
    """One request's share of a step: `query_tokens` are computed, `kv_tokens` is the KV length afterwards.

    A tuple and not a dataclass: a replay makes one a request and step, millions of them.
    """

    request: Request
    query_tokens: int
    kv_tokens: int
    samples: bool
    """True when this step yields a token for the request."""

    @property
    def is_decode(self) -> bool:
        """One query token: computed like a decode, also where it is the short end of a prompt."""
        return self.query_tokens == 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step does. Pages are allocated already; `preempted` and `rejected` need no computing."""

    scheduled: tuple[Scheduled, ...]
    preempted: tuple[Request, ...] = ()
    rejected: tuple[Request, ...] = ()

    @property
    def query_tokens(self) -> int:
        return sum(item.query_tokens for item in self.scheduled)

    @property
    def sampling(self) -> tuple[Scheduled, ...]:
        """The entries that yield a token, in order: sampled tokens are listed in this order."""
        return tuple(item for item in self.scheduled if item.samples)
