"""Streams as no honest server sends them: nothing is counted that was not said, and every request ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from kbench.targets.base import RequestResult
from kbench.targets.openai.exchange import Endpoint
from kbench.targets.openai.replay import Driver, ReplayPlan
from targets.serving import singles

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
ABSENT = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"
WANTED = 5


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def said(count: int = WANTED, ids: bool = True) -> bytes:
    return event({"choices": [{"text": " x" * count, **({"token_ids": [1] * count} if ids else {})}]})


def usage(completion: Any, cached: Any = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": {"completion_tokens": completion, "prompt_tokens": 40, **details}})


def answered(parts: Sequence[bytes]) -> tuple[RequestResult, str]:
    """What became of one request to a server that writes exactly these parts, and the cause."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(HEAD)
            for part in parts:
                writer.write(part)
                await writer.drain()
        else:
            writer.write(ABSENT)
        writer.close()

    async def main() -> tuple[RequestResult, str]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            driver = Driver(singles(1, output=WANTED), Endpoint(url, "it", timeout_s=5.0), ReplayPlan(vocab=100))
            found = await driver.run()
        return found.result.requests[0], found.exchanges[0].cause

    return asyncio.run(main())


@pytest.mark.parametrize(
    "parts",
    [
        [said().replace(b"\n", b"\r\n"), usage(WANTED).replace(b"\n", b"\r\n"), DONE],
        [bytes([byte]) for byte in said() + usage(WANTED) + DONE],
        [said(), usage(WANTED), DONE.rstrip()],
        [said(), usage(WANTED), DONE, DONE],
        [usage(WANTED), said(), DONE],
        [said(2), said(3), usage(WANTED), DONE],
        [event({"choices": [1, None, {"text": "x"}], "usage": None}), usage(WANTED), DONE],
    ],
    ids=["crlf", "byte by byte", "no last newline", "done twice", "usage first", "two chunks", "odd choices"],
)
def test_odd_but_whole_streams_are_read(parts: Sequence[bytes]) -> None:
    request, cause = answered(parts)
    assert (request.status, cause, request.output_tokens) == ("finished", "", WANTED)
    assert type(request.output_tokens) is int


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ([said(ids=False), usage(True), DONE], "nothing says how many tokens came"),
        ([said(ids=False), usage(5.0), DONE], "nothing says how many tokens came"),
        ([said(ids=False), usage(-5), DONE], "nothing says how many tokens came"),
        ([event({"choices": [{"text": "x", "token_ids": [True] * 5}]}), DONE], "nothing says how many tokens came"),
        ([said(), usage(10**9), DONE], "more tokens than were asked for"),
        ([said(2), usage(2), DONE], "fewer tokens than were asked for"),
        ([event({"choices": 3}), DONE], "an answer without a token"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], "garbage in the stream"),
        ([b'{"error": "no"}'], "an answer without a token"),
        ([said(), usage(WANTED)], "the stream ended without [DONE]"),
    ],
)
def test_what_does_not_add_up_has_failed_and_counts_no_token(parts: Sequence[bytes], cause: str) -> None:
    request, why = answered(parts)
    assert (request.status, why, request.output_tokens) == ("failed", cause, 0)


@pytest.mark.parametrize("cached", [999, True, -1, "all"])
def test_a_hit_beyond_the_prompt_is_unknown(cached: Any) -> None:
    assert answered([said(), usage(WANTED, cached), DONE])[0].hit_tokens is None
    assert answered([said(), usage(WANTED, 32), DONE])[0].hit_tokens == 32
