"""`kbench trace`: bring traces in, make them, look at them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.cli import common

if TYPE_CHECKING:
    from kbench.traces.schema import Trace

app = typer.Typer(help="Import, synthesise and describe traces.", no_args_is_help=True)
Output = Annotated[Path, typer.Option("-o", metavar="FILE", help="Trace to write (Parquet).")]


@app.command("import")
@common.one_line_errors
def import_(
    kind: Annotated[str, typer.Argument(help="Format: azure or mooncake.")],
    source: Annotated[Path, typer.Argument(metavar="SRC", help="File to read.")],
    output: Output,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave bad rows out and count them.")] = False,
    dejitter: Annotated[
        bool,
        typer.Option("--dejitter", help="Spread arrivals inside the grid that timestamps were rounded to; seeded."),
    ] = False,
    block_tokens: Annotated[
        int | None, typer.Option("--block-tokens", help="Tokens a block, where the format does not fix it.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of --dejitter.")] = 0,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Read a published trace and write it in kbench's format."""
    from kbench.traces.importers import ImportOptions, import_trace

    options = ImportOptions(skip_bad_rows=skip_bad_rows, dejitter=dejitter, seed=seed, block_tokens=block_tokens)
    _write(import_trace(kind, source, options), output, as_json)


@app.command()
@common.one_line_errors
def synth(
    preset: Annotated[str, typer.Argument(help="Kind of traffic; see kbench list presets.")],
    output: Output,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Number of requests.")] = 400,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same trace.")] = 1,
    rate: Annotated[float | None, typer.Option("--rate", help="Session arrivals a second.")] = None,
    arrivals: Annotated[str | None, typer.Option("--arrivals", help="poisson or gamma.")] = None,
    cv: Annotated[float | None, typer.Option("--cv", help="Coefficient of variation of gamma arrivals.")] = None,
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
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace (Parquet).")],
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
    for name, value in document.items():
        typer.echo(f"{name}: {value}")


def _write(trace: Trace, output: Path, as_json: bool) -> None:
    from kbench.traces.schema import write_trace

    write_trace(trace, output)
    if as_json:
        common.print_json({"trace": str(output), "requests": len(trace), "sha256": trace.sha256})
    else:
        typer.echo(f"{output}: {len(trace)} requests, sha256 {trace.sha256[:16]}", err=True)
