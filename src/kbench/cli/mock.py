"""`kbench mock-server`: an OpenAI-compatible server without a model, to try a replay on."""

from __future__ import annotations

from typing import Annotated

import typer

from kbench.cli.common import Debug, Json, one_line_errors, print_json
from kbench.errors import UsageError


@one_line_errors
def mock_server(
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="0 takes a free one, and prints it.")] = 8_000,
    host: Annotated[str, typer.Option("--host", help="A loopback address.")] = "127.0.0.1",
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens a KV page.")] = 16,
    kv_tokens: Annotated[int, typer.Option("--kv-tokens", min=16, help="Size of the KV pool, in tokens.")] = 65_536,
    max_seqs: Annotated[int, typer.Option("--max-seqs", min=1, help="Sequences that run at once.")] = 64,
    max_batched_tokens: Annotated[int, typer.Option("--max-batched-tokens", min=1, help="Tokens a step.")] = 2_048,
    step_us: Annotated[float, typer.Option("--step-us", min=0, help="What a step costs.")] = 4_000.0,
    prefill_us: Annotated[float, typer.Option("--prefill-us", min=0, help="What a computed prompt token adds.")] = 20.0,
    decode_us: Annotated[float, typer.Option("--decode-us", min=0, help="What a decoding sequence adds.")] = 50.0,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens a chunk of the stream.")] = 1,
    dialect: Annotated[str, typer.Option("--dialect", help="Whose metric names: vllm or sglang.")] = "vllm",
    metrics: Annotated[bool, typer.Option("--metrics/--no-metrics", help="Serve /metrics.")] = True,
    usage: Annotated[bool, typer.Option("--usage/--no-usage", help="Say how many tokens an answer had.")] = True,
    token_ids: Annotated[bool, typer.Option("--token-ids/--no-token-ids", help="Send token ids.")] = True,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            "--fault",
            metavar="NAME=SHARE",
            help="429, 500, 503, refuse, stall, cut, garbage or silent, to this share of requests; repeatable.",
        ),
    ] = None,
    restart_after: Annotated[int, typer.Option("--restart-after", min=0, help="Go down after so many requests.")] = 0,
    model: Annotated[str, typer.Option("--model", help="The name that it serves.")] = "mock",
    seed: Annotated[int, typer.Option("--seed", help="Of tokens and faults.")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve made-up tokens through the engine's real scheduler: queues, prefix hits, preemption, and faults.

    It runs until Ctrl-C.
    """
    import asyncio

    from kbench.engine.core import EngineConfig
    from kbench.targets.mock.app import serve
    from kbench.targets.mock.settings import MockSettings

    if dialect not in ("vllm", "sglang"):
        raise UsageError(f"no dialect {dialect!r}", remedy="use vllm or sglang")
    pages = kv_tokens // page_size
    if not pages:
        raise UsageError(f"a pool of {kv_tokens} tokens holds no page of {page_size}", remedy="raise --kv-tokens")
    settings = MockSettings(
        config=EngineConfig(page_size, pages, max_batched_tokens, max_seqs),
        step_us=step_us,
        prefill_us=prefill_us,
        decode_us=decode_us,
        chunk_tokens=chunk_tokens,
        dialect="vllm" if dialect == "vllm" else "sglang",
        metrics=metrics,
        usage=usage,
        token_ids=token_ids,
        faults=_shares(fault or []),
        restart_after=restart_after,
        model=model,
        seed=seed,
    )

    def told(url: str) -> None:
        if as_json:
            print_json({"model": model, "url": url})
        else:
            typer.echo(f"serving {model} on {url}")

    async def main() -> None:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda found: told(f"http://{host}:{found.result()}"))
        await serve(settings, host, port, ready)

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)


def _shares(texts: list[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for text in texts:
        name, _, share = text.partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            raise UsageError(f"--fault {text}: {share!r} is no share", remedy="write NAME=0.05") from None
    return shares
