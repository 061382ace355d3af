"""`kbench trace`: bring traces in, make them, look at them, cut and mix them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.cli import common

if TYPE_CHECKING:
    from kbench.traces.mix import Part
    from kbench.traces.schema import Trace

app = typer.Typer(help="Import, synthesise, describe, cut and mix traces.", no_args_is_help=True)
Output = Annotated[Path, typer.Option("-o", metavar="FILE", help="Trace to write (Parquet).")]
TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="Trace (Parquet).")]
Drawn = Annotated[int, typer.Option("--seed", help="Seed of what is drawn.")]
_KINDS = "azure, mooncake, qwen-bailian, burstgpt, servegen, tracelab, otel or jsonl"


@app.command("import")
@common.one_line_errors
def import_(
    kind: Annotated[str, typer.Argument(help=f"Format: {_KINDS}.")],
    source: Annotated[Path, typer.Argument(metavar="SRC", help="File to read, packed with gzip or not.")],
    output: Output,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out and count them.")] = False,
    dejitter: Annotated[
        bool,
        typer.Option("--dejitter", help="Spread arrivals inside the grid that timestamps were rounded to; seeded."),
    ] = False,
    block_tokens: Annotated[
        int | None, typer.Option("--block-tokens", help="Tokens a block, where the format does not fix it.")
    ] = None,
    chars_per_token: Annotated[
        float | None, typer.Option("--chars-per-token", help="otel: lengths from the text where no usage is there.")
    ] = None,
    from_s: Annotated[float, typer.Option("--from-s", help="servegen: draw requests from here on.")] = 0.0,
    seconds: Annotated[float, typer.Option("--seconds", help="servegen: for so long.")] = 3_600.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of --dejitter, and of what servegen draws.")] = 0,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Read a published trace and write it in kbench's format."""
    from kbench.traces.importers import ImportOptions, import_trace

    options = ImportOptions(
        skip_bad_rows=skip_bad,
        dejitter=dejitter,
        seed=seed,
        block_tokens=block_tokens,
        chars_per_token=chars_per_token,
        from_s=from_s,
        seconds=seconds,
    )
    _write(import_trace(kind, source, options), output, as_json)


@app.command()
@common.one_line_errors
def synth(
    preset: Annotated[str, typer.Argument(help="Kind of traffic; see kbench list presets.")],
    output: Output,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Number of requests.")] = 400,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same trace.")] = 1,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests a second, later turns included.")] = None,
    arrivals: Annotated[str | None, typer.Option("--arrivals", help="poisson, gamma, weibull or bursty.")] = None,
    cv: Annotated[float | None, typer.Option("--cv", help="Coefficient of variation of the arrivals.")] = None,
    max_context: Annotated[
        int | None, typer.Option("--max-context", help="Longest prompt and output, in tokens.")
    ] = None,
    scale: Annotated[float, typer.Option("--scale", help="Multiply all lengths by this.")] = 1.0,
    think_scale: Annotated[float, typer.Option("--think-scale", help="Multiply think times by this.")] = 1.0,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Make a trace from a named, seeded preset."""
    from kbench.traces.synth import synthesise

    trace = synthesise(
        preset,
        requests,
        seed,
        rate_per_s=rate,
        arrivals=arrivals,
        cv=cv,
        scale=scale,
        max_context=max_context,
        think_scale=think_scale,
    )
    _write(trace, output, as_json)


@app.command()
@common.one_line_errors
def info(
    trace: TraceFile,
    page: Annotated[list[int] | None, typer.Option("--page", min=1, help="Tokens a page; repeatable.")] = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Describe a trace: lengths, arrivals, hit ratio by page size, misses by cache size."""
    from kbench.traces.schema import read_trace
    from kbench.traces.statistics import trace_info

    document = trace_info(read_trace(trace), page or None)
    if as_json:
        common.print_json(document)
        return
    from rich.console import Console

    from kbench.cli.trace_view import info_tables

    Console(highlight=False).print(info_tables(document))


@app.command("slice")
@common.one_line_errors
def slice_(
    trace: TraceFile,
    output: Output,
    from_s: Annotated[float, typer.Option("--from-s", help="Sessions that start from here on.")] = 0.0,
    to_s: Annotated[float | None, typer.Option("--to-s", help="And before this.")] = None,
    sessions: Annotated[int | None, typer.Option("--sessions", help="The first so many of them.")] = None,
    sample: Annotated[
        float, typer.Option("--sample", help="Of these, a share of the requests: whole sessions or prefix trees.")
    ] = 1.0,
    seed: Drawn = 0,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Cut out whole sessions, by time, by number, or by a seeded draw."""
    from kbench.traces.schema import read_trace
    from kbench.traces.transform import slice_trace

    cut = slice_trace(read_trace(trace), from_s=from_s, to_s=to_s, sessions=sessions, sample=sample, seed=seed)
    _write(cut, output, as_json)


@app.command()
@common.one_line_errors
def scale(
    trace: TraceFile,
    output: Output,
    factor: Annotated[float | None, typer.Option("--factor", help="Sessions arrive so many times as often.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Or: so many requests a second.")] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Make think times and recorded durations faster too.")
    ] = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Make sessions arrive faster or slower; inside a session times stay."""
    from kbench.traces.schema import read_trace
    from kbench.traces.transform import scale_trace

    _write(scale_trace(read_trace(trace), factor=factor, rate=rate, everything=everything), output, as_json)


@app.command()
@common.one_line_errors
def mix(
    parts: Annotated[list[str], typer.Argument(metavar="TRACE=SHARE…", help="Traces, and shares of the requests.")],
    output: Output,
    seed: Drawn = 0,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Mix traces in the given shares; sessions, streams and blocks of different traces stay different."""
    from kbench.traces.mix import mix_traces

    _write(mix_traces([_part(part) for part in parts], seed=seed), output, as_json)


def _part(text: str) -> Part:
    from kbench.errors import UsageError
    from kbench.traces.mix import Part
    from kbench.traces.schema import read_trace

    name, _, told = text.rpartition("=")
    try:
        share = float(told)
    except ValueError:
        name = ""
    if not name:
        raise UsageError(f"{text!r} is not TRACE=SHARE", where="trace mix", remedy="e.g. chat.parquet=0.7")
    return Part(name, read_trace(Path(name)), share)


def _write(trace: Trace, output: Path, as_json: bool) -> None:
    from kbench.traces.schema import write_trace

    write_trace(trace, output)
    dropped = dict(trace.meta.dropped)
    if as_json:
        document = {"trace": str(output), "requests": len(trace), "sha256": trace.sha256, "dropped": dropped}
        common.print_json(document)
        return
    typer.echo(f"{output}: {len(trace)} requests, sha256 {trace.sha256[:16]}", err=True)
    if dropped:
        said = ", ".join(f"{why}: {count}" for why, count in dropped.items())
        typer.echo(f"left out {sum(dropped.values())} bad rows ({said})", err=True)
