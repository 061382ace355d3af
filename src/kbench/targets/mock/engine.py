"""The engine behind the mock: real requests in the real scheduler, steps that only take their time.

Owns the loop of steps and what it tells each stream. Queueing, chunked prefill, prefix hits, preemption and rejection
are those of the embedded engine. What a token is depends on seed, prompt and position alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kbench.engine.core import Request, RequestStatus
from kbench.engine.requests import TokenContent
from kbench.engine.scheduler import Scheduler
from kbench.targets.mock.settings import MockSettings


@dataclass(slots=True)
class Stream:
    """One request as its handler sees it: tokens as they come, then the end."""

    request: Request
    salt: int
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    """Token ids in order; None ends the stream, also of a request that was rejected."""


class MockEngine:
    """Run `loop` as a task; `submit` and `abort` are called from the same event loop."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings.config)
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self._streams: dict[Request, Stream] = {}
        self._count = 0
        self._work = asyncio.Event()

    def submit(self, prompt: Sequence[int], output_tokens: int) -> Stream:
        content = TokenContent(list(prompt), self.settings.config.page_size)
        request = Request(self._count, len(prompt), output_tokens, content)
        self._count += 1
        digest = blake2b(repr((self.settings.seed, tuple(prompt))).encode(), digest_size=8).digest()
        stream = Stream(request, int.from_bytes(digest, "little"))
        self._streams[request] = stream
        self.prompt_tokens += len(prompt)
        self.scheduler.add(request)
        self._work.set()
        return stream

    def abort(self, stream: Stream) -> None:
        """Its reader has gone."""
        if self._streams.pop(stream.request, None) is not None:
            self.scheduler.abort(stream.request)

    def reset_cache(self) -> bool:
        """Forget all cached prefixes; False while anything runs, as real servers answer."""
        if self.scheduler.running or self.scheduler.waiting:
            return False
        counters = self.scheduler.counters
        self.scheduler = Scheduler(self.settings.config)
        self.scheduler.counters = counters
        return True

    async def loop(self) -> None:
        while True:
            if not self.scheduler.has_work:
                self._work.clear()
                await self._work.wait()
            await self._step()

    async def _step(self) -> None:
        scheduler, began = self.scheduler, time.perf_counter()
        plan = scheduler.schedule()
        for rejected in plan.rejected:
            self._end(rejected)
        if not plan.scheduled:
            await asyncio.sleep(0)
            return
        left = self.settings.duration_us(plan) / 1e6 - (time.perf_counter() - began)
        await asyncio.sleep(max(0.0, left))
        for item in plan.sampling:
            if item.request.status is RequestStatus.RUNNING:
                self._say(item.request)
        for finished in scheduler.commit(plan):
            self._end(finished)

    def _say(self, request: Request) -> None:
        stream = self._streams.get(request)
        if stream is None:
            return
        token = (stream.salt + 0x9E3779B97F4A7C15 * (request.output_tokens + 1)) % self.settings.vocab
        content = request.content
        assert isinstance(content, TokenContent)
        content.append(token)
        self.generated_tokens += 1
        stream.tokens.put_nowait(token)

    def _end(self, request: Request) -> None:
        stream = self._streams.pop(request, None)
        if stream is not None:
            stream.tokens.put_nowait(None)
