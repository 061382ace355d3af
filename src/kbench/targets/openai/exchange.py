"""One request to a server: what is sent, what comes back when, and the one way in which it ends.

Owns the body of a request, the reading of a stream, and the causes of failure. Tokens are counted by the server's
usage, by token ids, or by a finish for length; chunks are never counted: one may carry several tokens. An answer must
have the length that the trace forces: less is other work, and more than was asked for is a miscount. Nothing is ever
sent twice. It does not know when a request is due, nor what is good.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Literal

import aiohttp

from kbench.targets.base import RequestStatus

Api = Literal["completions", "chat"]
ROUTES: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REFUSED_AS_TOO_LONG = (400, 413, 422)
"""HTTP statuses with which a server says that it will never serve a request."""
LONGEST_LINE = 1 << 20
_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how requests are sent. `extra` is merged into every body, e.g. {"ignore_eos": true}."""

    url: str
    model: str
    api: Api = "completions"
    extra: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True, "return_token_ids": True})
    timeout_s: float = 120.0
    """From sent to last byte; a request that takes longer has failed."""

    @property
    def route(self) -> str:
        return self.url.rstrip("/") + ROUTES[self.api]


@dataclass(slots=True)
class Exchange:
    """One request's life, in nanoseconds of the replay's clock; 0 where it never came to that."""

    request: int
    scheduled_ns: int
    slot_ns: int = 0
    """When nothing but the client itself kept it from being sent: scheduled, or a place became free under a cap."""
    sent_ns: int = 0
    """When its body had been handed to the network."""
    first_ns: int = 0
    """When the first token came."""
    last_ns: int = 0
    status: RequestStatus = "unfinished"
    cause: str = ""
    """Why it is not `finished`, in a few words that can be counted."""
    output_tokens: int = 0
    counted_by: str = ""
    """`usage`, `token ids` or `finish for length`."""
    prompt_tokens: int | None = None
    """As the server counts them."""
    cached_tokens: int | None = None
    """Prompt tokens that the server found in its cache; None where it does not say."""
    token_ids: list[int] = field(default_factory=list)
    chunk_ns: list[int] = field(default_factory=list)

    def end(self, status: RequestStatus, cause: str, now_ns: int) -> None:
        self.status, self.cause, self.last_ns = status, cause, now_ns


def body_of(endpoint: Endpoint, prompt: Sequence[int], output_tokens: int, text: str | None = None) -> bytes:
    """The request as JSON. Chat has no token ids: it takes `text`, or the ids written out."""
    document: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra,
    }
    if endpoint.api == "completions":
        document["prompt"] = list(prompt)
    else:
        words = text if text is not None else " ".join(str(token) for token in prompt)
        document["messages"] = [{"role": "user", "content": words}]
    return json.dumps(document, separators=(",", ":")).encode()


async def exchange(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    body: bytes,
    output_tokens: int,
    own: Exchange,
    now_ns: Callable[[], int] = perf_counter_ns,
) -> None:
    """Send one request and read its answer to the end; `own` says how it went. Only cancellation passes through."""
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            async with session.post(endpoint.route, data=body, headers=_HEADERS, trace_request_ctx=own) as response:
                if response.status == 200:
                    await _stream(response, output_tokens, own, now_ns)
                else:
                    status: RequestStatus = "rejected" if response.status in REFUSED_AS_TOO_LONG else "failed"
                    own.end(status, f"HTTP {response.status}", now_ns())
    except TimeoutError:
        own.end("failed", f"no end within {endpoint.timeout_s:g} s", now_ns())
    except aiohttp.ClientConnectorError:
        own.end("failed", "cannot connect", now_ns())
    except aiohttp.ClientError as error:
        own.end("failed", _lost(own, error), now_ns())
    except OSError as error:
        own.end("failed", f"connection: {error.strerror or type(error).__name__}", now_ns())


def _lost(own: Exchange, error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | aiohttp.ClientOSError):
        return "closed in the middle of the stream" if own.first_ns else "closed before the first token"
    return f"broken HTTP: {type(error).__name__}"


async def _stream(
    response: aiohttp.ClientResponse, output_tokens: int, own: Exchange, now_ns: Callable[[], int]
) -> None:
    reader = _Reader(own, output_tokens)
    rest = b""
    async for data in response.content.iter_any():
        now = now_ns()
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            own.end("failed", "a line of the stream is too long", now)
            return
        for line in lines:
            if not reader.line(line.strip(), now):
                return
    if rest.strip() and not reader.line(rest.strip(), now_ns()):  # the last line need not end in one
        return
    if reader.done:
        reader.finish(now_ns())
    else:
        cause = "the stream ended without [DONE]" if own.first_ns else "an answer without a token"
        own.end("failed", cause, now_ns())


class _Reader:
    """Reads the lines of a stream of server-sent events."""

    def __init__(self, own: Exchange, output_tokens: int) -> None:
        self._own = own
        self._wanted = output_tokens
        self._usage: int | None = None
        self._length = False
        self.done = False

    def line(self, line: bytes, now: int) -> bool:
        """False: the stream is beyond use, and its exchange has ended."""
        if not line.startswith(b"data:"):
            return True  # a comment, an event's name, or the empty line between events
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return True
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):  # nested as no server means it
            event = None
        if not isinstance(event, dict):
            self._own.end("failed", "garbage in the stream", now)
            return False
        if event.get("error") is not None and not event.get("choices"):
            self._own.end("failed", "an error in the stream", now)
            return False
        self._event(event, now)
        return True

    def _event(self, event: Mapping[str, Any], now: int) -> None:
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            self._count(usage)
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                continue
            ids = choice.get("token_ids")
            delta = choice.get("delta")
            text = choice.get("text") or (delta.get("content") if isinstance(delta, Mapping) else None)
            self._length = self._length or choice.get("finish_reason") == "length"
            if ids or text:
                self._own.first_ns = self._own.first_ns or now
                self._own.chunk_ns.append(now)
                if isinstance(ids, list):
                    self._own.token_ids += [token for token in ids if _count(token) is not None]

    def _count(self, usage: Mapping[str, Any]) -> None:
        own = self._own
        said, prompt = _count(usage.get("completion_tokens")), _count(usage.get("prompt_tokens"))
        self._usage = self._usage if said is None else said
        own.prompt_tokens = own.prompt_tokens if prompt is None else prompt
        details = usage.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
        if cached is not None and cached <= (own.prompt_tokens or 0):
            own.cached_tokens = cached

    def finish(self, now: int) -> None:
        """The stream is complete: its last token came with its last chunk."""
        own = self._own
        if self._usage is not None:
            own.output_tokens, own.counted_by = self._usage, "usage"
        elif own.token_ids:
            own.output_tokens, own.counted_by = len(own.token_ids), "token ids"
        elif self._length:
            own.output_tokens, own.counted_by = self._wanted, "finish for length"
        if not own.first_ns or not own.output_tokens:
            cause = "an answer without a token" if not own.first_ns else "nothing says how many tokens came"
            own.end("failed", cause, now)
        elif own.output_tokens != self._wanted:
            how = "fewer" if own.output_tokens < self._wanted else "more"
            own.output_tokens = 0
            own.end("failed", f"{how} tokens than were asked for", now)
        else:
            own.end("finished", "", own.chunk_ns[-1])


def _count(said: object) -> int | None:
    """A whole number from 0 on, or nothing: JSON's true is no 1."""
    return said if isinstance(said, int) and not isinstance(said, bool) and said >= 0 else None


def sent_stamps(now_ns: Callable[[], int]) -> aiohttp.TraceConfig:
    """Stamps `Exchange.sent_ns` when the last part of a body was handed to the network."""
    config = aiohttp.TraceConfig()

    async def chunk_sent(session: Any, context: Any, params: Any) -> None:
        own = context.trace_request_ctx
        if isinstance(own, Exchange):
            own.sent_ns = now_ns()

    config.on_request_chunk_sent.append(chunk_sent)
    return config
