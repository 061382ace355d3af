"""`kbench selftest`: is every known cheat caught, and is every honest implementation left alone?"""

from __future__ import annotations

from typing import Annotated

import typer

from kbench.cli import common
from kbench.errors import ExitCode

Kinds = Annotated[str, typer.Option("-k", metavar="TEXT", help="Only those whose name or operation contains TEXT.")]


@common.one_line_errors
def selftest(
    only: Kinds = "", device: common.Device = "auto", as_json: common.Json = False, debug: common.Debug = False
) -> None:
    """Try every cheat and bug of the zoo, with and without the defence that catches it, and every honest kernel."""
    from kbench.run.selftest import selftest as tried

    report = tried(common.resolve_device(device), only, lambda line: typer.echo(line, err=True))
    document = report.document
    if as_json:
        common.print_json(document)
    else:
        counts = f"{document['caught']} of {document['total']} kinds caught, {document['passing_without']} of them pass"
        typer.echo(f"{counts} without their defence; {document['false_accusations']} honest implementations accused")
    if not report.passed:
        raise typer.Exit(int(ExitCode.DISABLE))
