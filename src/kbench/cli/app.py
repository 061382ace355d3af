"""The commands, in the order of use."""

from __future__ import annotations

import signal

import typer

from kbench.cli import (
    backends,
    calibrate,
    decide,
    explain,
    info,
    kernel,
    ledger,
    measure,
    mock,
    plan,
    selftest,
    traces,
    tune,
)

app = typer.Typer(
    name="kbench",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("plan")(plan.plan)
app.command("run")(measure.run)
app.command("timeline")(measure.timeline)
app.command("kernel")(kernel.kernel)
app.command("step")(measure.step)
app.command("workload")(measure.workload)
app.command("decide")(decide.decide)
app.command("report")(decide.report)
app.command("explain")(explain.explain)
app.command("repro")(explain.repro)
app.command("tune")(tune.tune)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(traces.app, name="trace")
app.add_typer(ledger.app, name="ledger")
app.command("list")(info.list_)
app.command("backends")(backends.backends)
app.command("env")(info.env)
app.command("mock-server")(mock.mock_server)
app.command("selftest")(selftest.selftest)


def _version(shown: bool) -> None:
    if shown:
        from kbench import __version__

        typer.echo(f"kbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Decide whether a GPU kernel goes into production.

    Kernel, step and workload evidence under a rule that was written first.
    """


def main() -> None:
    signal.signal(signal.SIGTERM, _interrupted)
    app()


def _interrupted(signum: int, frame: object) -> None:
    """A scheduler that ends us asks as Ctrl-C does: workers are closed, and what was measured is kept."""
    raise KeyboardInterrupt
