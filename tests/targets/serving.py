"""A mock server and a replay against it in one event loop, over a real loopback socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kbench.engine.core import EngineConfig
from kbench.targets.mock.app import serve
from kbench.targets.mock.settings import MockSettings
from kbench.targets.openai.exchange import Endpoint
from kbench.targets.openai.replay import Driver, HttpReplay, ReplayPlan
from kbench.traces.trace import RequestRow, Trace, TraceMeta, trace_from_rows

FREE = {"step_us": 0.0, "prefill_us": 0.0, "decode_us": 0.0}


def mock(**changed: Any) -> MockSettings:
    """A server whose steps cost nothing."""
    settings: dict[str, Any] = {"config": EngineConfig(16, 256, 2_048, 64), **FREE, **changed}
    return MockSettings(**settings)


def trace_of(rows: Sequence[RequestRow]) -> Trace:
    return trace_from_rows(list(rows), TraceMeta("test", "test"))


def singles(count: int, prompt: int = 40, output: int = 5, gap_us: int = 1_000) -> Trace:
    rows = [RequestRow(session, prompt, output, arrival_us=session * gap_us) for session in range(count)]
    return trace_of(rows)


def replay(
    settings: MockSettings,
    trace: Trace,
    *,
    stop_when: Any = None,
    endpoint: dict[str, Any] | None = None,
    **plan: Any,
) -> HttpReplay:
    """Serve, replay, and take the server down. `stop_when(driver)` is awaited beside the replay."""

    async def main() -> HttpReplay:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(settings, "127.0.0.1", 0, ready))
        try:
            url = f"http://127.0.0.1:{await ready}"
            driver = Driver(trace, Endpoint(url, "mock", **(endpoint or {})), ReplayPlan(vocab=1_000, **plan))
            if stop_when is not None:
                watching = asyncio.create_task(stop_when(driver))
            found = await driver.run()
            if stop_when is not None:
                await watching
            return found
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving

    return asyncio.run(main())
