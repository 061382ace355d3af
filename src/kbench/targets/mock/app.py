"""The mock as a web server: completions and chat, streamed or not, and the routes that a benchmark asks.

Owns HTTP: what is accepted, how a stream is written, and the faults that are injected into it. It listens on loopback
only. Tokens are real in number and id; their text is a placeholder.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from aiohttp import web

from kbench.engine.core import RequestStatus
from kbench.errors import MeasurementError, UsageError
from kbench.targets.mock.engine import MockEngine, Stream
from kbench.targets.mock.exposition import exposition
from kbench.targets.mock.settings import MockSettings

ENGINE = web.AppKey("engine", MockEngine)


class Mock:
    """Handlers of one server."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.engine = MockEngine(settings)
        self._requests = 0
        self._down_until = 0.0
        self._open: set[asyncio.Transport] = set()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app[ENGINE] = self.engine
        app.cleanup_ctx.append(self._running)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/v1/models", self.models),
                web.get("/server_info", self.server_info),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.post("/reset_prefix_cache", self.reset),
                web.post("/flush_cache", self.reset),
            ]
        )
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self.engine.loop())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    # ------------------------------------------------------------------------------------------ small

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._down else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        if not self.settings.metrics:
            raise web.HTTPNotFound
        return web.Response(body=exposition(self.engine), content_type="text/plain", charset="utf-8")

    async def models(self, request: web.Request) -> web.Response:
        one = {"id": self.settings.model, "object": "model", "max_model_len": self.settings.max_context}
        return web.json_response({"object": "list", "data": [one]})

    async def server_info(self, request: web.Request) -> web.Response:
        config = self.settings.config
        return web.json_response(
            {"page_size": config.page_size, "max_total_num_tokens": config.pages * config.page_size}
        )

    async def reset(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.reset_cache() else 400)

    @property
    def _down(self) -> bool:
        return time.monotonic() < self._down_until

    # ------------------------------------------------------------------------------------ completions

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            prompt = list(prompt.encode())
        return await self._answer(request, body, prompt, "text_completion")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        said = "".join(str(item.get("content", "")) for item in body.get("messages", ()) if isinstance(item, Mapping))
        return await self._answer(request, body, list(said.encode()), "chat.completion.chunk")

    async def _answer(
        self, request: web.Request, body: Mapping[str, Any], prompt: Any, kind: str
    ) -> web.StreamResponse:
        number, self._requests = self._requests, self._requests + 1
        fault = self.settings.fault_of(number)
        if self.settings.restart_after and number == self.settings.restart_after:
            self._restart()
        if fault == "refuse" or self._down:
            return _hang_up(request)
        if fault in ("429", "500", "503"):
            return web.json_response({"error": {"message": "injected", "code": int(fault)}}, status=int(fault))
        if fault == "silent":
            await asyncio.Event().wait()
        if not (isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt)):
            return _bad("prompt must be a text or a list of token ids, not empty")
        limit = body.get("max_tokens", 16)
        if not isinstance(limit, int) or limit < 1:
            return _bad("max_tokens must be a positive whole number")
        if len(prompt) + limit > self.settings.max_context:
            return _bad(f"maximum context length is {self.settings.max_context}, asked for {len(prompt) + limit}")
        stream = self.engine.submit(prompt, limit)
        if stream.request.status is RequestStatus.REJECTED:
            return _bad(f"the cache can never hold {len(prompt) + limit} tokens")
        try:
            if body.get("stream"):
                return await self._streamed(request, body, stream, fault, kind)
            return await self._whole(stream)
        finally:
            self.engine.abort(stream)

    def _restart(self) -> None:
        self._down_until = time.monotonic() + self.settings.restart_s
        for transport in list(self._open):
            transport.abort()

    async def _whole(self, stream: Stream) -> web.Response:
        tokens = []
        while (token := await stream.tokens.get()) is not None:
            tokens.append(token)
        choice = {"index": 0, "text": _text(tokens), "finish_reason": "length", "token_ids": tokens}
        return web.json_response({"choices": [choice], "usage": self._usage(stream)})

    async def _streamed(
        self, request: web.Request, body: Mapping[str, Any], stream: Stream, fault: str, kind: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        transport = request.transport
        await response.prepare(request)
        if isinstance(transport, asyncio.Transport):
            self._open.add(transport)
        try:
            with suppress(ConnectionResetError):  # the reader has gone
                await self._chunks(response, stream, fault, kind)
                if fault == "cut":
                    return _hang_up(request)
                if self.settings.usage and body.get("stream_options", {}).get("include_usage"):
                    await response.write(_event({"object": kind, "choices": [], "usage": self._usage(stream)}))
                await response.write(b"data: [DONE]\n\n")
                await response.write_eof()
        finally:
            if isinstance(transport, asyncio.Transport):
                self._open.discard(transport)
        return response

    async def _chunks(self, response: web.StreamResponse, stream: Stream, fault: str, kind: str) -> None:
        sent = 0
        while True:
            tokens, ended = await _next(stream, self.settings.chunk_tokens)
            sent += len(tokens)
            if tokens:
                last = sent >= stream.request.max_output_tokens
                await response.write(_event({"object": kind, "choices": [self._choice(tokens, kind, last)]}))
            if fault == "stall":
                await asyncio.Event().wait()
            if fault == "garbage":
                await response.write(b"data: {not json\n\n")
            if ended or fault == "cut":
                return

    def _choice(self, tokens: list[int], kind: str, last: bool) -> dict[str, Any]:
        text = _text(tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
        choice |= {"text": text} if kind == "text_completion" else {"delta": {"content": text}}
        return choice | ({"token_ids": tokens} if self.settings.token_ids else {})

    def _usage(self, stream: Stream) -> dict[str, Any]:
        request = stream.request
        return {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.output_tokens,
            "total_tokens": request.total_tokens,
            "prompt_tokens_details": {"cached_tokens": request.hit_tokens},
        }


async def _next(stream: Stream, most: int) -> tuple[list[int], bool]:
    """The next tokens, at least one unless the stream has ended, and whether it has."""
    tokens: list[int] = []
    while len(tokens) < most:
        token = await stream.tokens.get()
        if token is None:
            return tokens, True
        tokens.append(token)
    return tokens, False


def _text(tokens: list[int]) -> str:
    return "".join(f" t{token}" for token in tokens)


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, Mapping):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return body


def _bad(message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": 400}}, status=400)


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)


async def serve(settings: MockSettings, host: str, port: int, ready: asyncio.Future[int] | None = None) -> None:
    """Serve until cancelled. Port 0 takes a free one; `ready` is told which. Loopback addresses only."""
    if host != "localhost" and not ip_address(host).is_loopback:
        raise UsageError(f"{host} is not a loopback address", remedy="a mock is for this machine: use 127.0.0.1")
    runner = web.AppRunner(Mock(settings).application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=4_096)
        try:
            await site.start()
        except OSError as error:
            where = f"{host}:{port}"
            raise MeasurementError(f"cannot listen: {error.strerror or error}", where=where) from error
        if ready is not None:
            ready.set_result(int(runner.addresses[0][1]))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
