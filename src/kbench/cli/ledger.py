"""`kbench ledger`: look at the history of a suite's runs, check its chain, and amend a declaration in the open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.cli import common
from kbench.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from kbench.ledger import Ledger

app = typer.Typer(help="Show, check, anchor or amend the history of a suite's runs.", no_args_is_help=True)
Place = Annotated[Path, typer.Argument(metavar="SUITE|LEDGER", help="Suite (TOML), a ledger.jsonl, or its folder.")]


@app.command()
@common.one_line_errors
def show(
    place: Place, as_json: common.Json = False, out: common.Out = common.RESULTS, debug: common.Debug = False
) -> None:
    """Print every entry, oldest first."""
    from dataclasses import asdict

    entries = [asdict(entry) for entry in _ledger(place, out).read()]
    if as_json:
        common.print_json({"entries": entries})
        return
    for entry in entries:
        body = entry["body"]
        about = body.get("run") or body.get("verdicts") or body.get("reason") or body.get("plan_hash", "")[:12]
        typer.echo(f"{entry['n']:>4}  {entry['time']}  {entry['kind']:<9}  {about}")


@app.command()
@common.one_line_errors
def verify(
    place: Place,
    anchor: Annotated[
        str | None, typer.Option("--anchor", help="A head hash kept elsewhere: finds a cut-off end.")
    ] = None,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    debug: common.Debug = False,
) -> None:
    """Check the chain; exit 5 on any damage. Only an anchor can show that lines are missing at the end."""
    from kbench.run.history import unannounced

    ledger = _ledger(place, out)
    scan = ledger.scan()
    problems = [str(problem) for problem in (*ledger.verify(anchor), *unannounced(ledger.path.parent, scan.entries))]
    if as_json:
        found = {"intact": not problems, "problems": problems, "anchored": anchor is not None}
        common.print_json({**found, "entries": len(scan.entries), "torn_bytes": len(scan.torn)})
    elif problems:
        for line in problems:
            typer.echo(f"kbench: {line}", err=True)
    else:
        torn = f"; {len(scan.torn)} bytes of a torn last line are passed over" if scan.torn else ""
        typer.echo(f"intact: {len(scan.entries)} entries{torn}")
    raise typer.Exit(int(ExitCode.INTEGRITY if problems else ExitCode.DONE))


@app.command()
@common.one_line_errors
def anchor(
    place: Place, as_json: common.Json = False, out: common.Out = common.RESULTS, debug: common.Debug = False
) -> None:
    """Print the head hash, to be kept where the ledger's owner cannot change it."""
    head = _ledger(place, out).head
    common.print_json({"head": head}) if as_json else typer.echo(head)


@app.command()
@common.one_line_errors
def amend(
    suite: common.SuitePath,
    reason: Annotated[str, typer.Option("--reason", help="Why; it stays in the ledger.")],
    seed: common.Seed = None,
    traces: common.TraceFiles = None,
    costs: common.CostFiles = None,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    debug: common.Debug = False,
) -> None:
    """Turn all evidence so far into a pilot, so that an edited declaration can start anew."""
    from kbench.ledger import Kind

    if not reason.strip():
        raise UsageError("an amendment needs a reason", remedy="--reason TEXT")
    plan = common.load_plan(suite, seed, traces, costs)
    entry = _ledger(suite, out).append(Kind.AMEND, {"reason": reason, "lock_hash": plan.lock_hash})
    if as_json:
        common.print_json({"amended": entry.n, "hash": entry.hash})
    else:
        typer.echo("amended: what was measured before is a pilot now, and counts for no verdict", err=True)


def _ledger(place: Path, out: Path) -> Ledger:
    from kbench.ledger import Ledger

    if place.is_dir() and (place / "ledger.jsonl").is_file():
        return Ledger(place / "ledger.jsonl")
    if place.suffix == ".jsonl":
        if not place.is_file():
            raise UsageError("no such ledger", where=str(place), remedy="name a suite, or a ledger.jsonl")
        return Ledger(place)
    from kbench.suite import load_suite

    return Ledger(out / load_suite(place).suite.claim.name / "ledger.jsonl")
