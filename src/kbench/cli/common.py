"""What all commands share: options that mean the same everywhere, one way to print, one way to fail."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer

from kbench.errors import ExitCode, KbenchError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kbench.decide.expected import Expectation
    from kbench.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")

SuitePath = Annotated[Path, typer.Argument(metavar="SUITE", help="Suite file (TOML).")]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Results root, for writing and reading.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Use this seed instead of the suite's.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto: cuda where there is one.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run that was interrupted.")]
Budget = Annotated[float | None, typer.Option("--budget", metavar="SECONDS", help="Start no session beyond this time.")]
Only = Annotated[str, typer.Option("-k", metavar="TEXT", help="Only cases whose id contains TEXT; exploratory.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and measure nothing.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Exploratory = Annotated[bool, typer.Option("--exploratory", help="Lock nothing; such a run is never evidence.")]
TraceFiles = Annotated[
    list[str] | None, typer.Option("--trace", metavar="NAME=FILE", help="Use FILE as trace class NAME; repeatable.")
]
CostFiles = Annotated[
    list[str] | None,
    typer.Option("--costs", metavar="NAME=FILE", help="Use FILE as cost grid of variant NAME; repeatable."),
]

Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without", metavar="BACKEND", help="Treat BACKEND as gone: measures who stands in for it; repeatable."
    ),
]
Expect = Annotated[
    list[str] | None,
    typer.Option(
        "--expect",
        metavar="NAME=BACKEND",
        help="Exit 5 where another ran, 4 where nobody was seen. NAME is an operation or phase of the candidate, or "
        "VARIANT:NAME; repeatable.",
    ),
]

RESULTS = Path("results")


def one_line_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a KbenchError or Ctrl-C into one line a problem on stderr and the exit code that it stands for."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json, debug = bool(kwargs.get("as_json")), bool(kwargs.get("debug"))
        if debug:
            os.environ["KBENCH_DEBUG"] = "1"
        try:
            return function(*args, **kwargs)
        except KbenchError as error:
            if debug:
                raise
            fail(str(error).splitlines(), error.exit_code, as_json)
        except KeyboardInterrupt:
            # Once is enough: an impatient second Ctrl-C must not cut off the line that says where things stand.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            line = "interrupted; what was measured is kept, and --resume goes on from there"
            fail([line], ExitCode.MEASUREMENT, as_json)
        except BrokenPipeError:
            # The reader of our output has gone (head, less): that is no failure of ours.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(int(ExitCode.DONE)) from None
        except OSError as error:
            if debug:
                raise
            what = f"cannot read or write: {error.strerror or error}"
            fail([f"{error.filename}: {what}" if error.filename else what], ExitCode.MEASUREMENT, as_json)

    return guarded


def fail(lines: list[str], code: ExitCode, as_json: bool) -> NoReturn:
    from kbench.report.text import clean

    # The place where we write may be what failed: the exit code is told in any case.
    with contextlib.suppress(OSError):
        for line in lines:
            typer.echo(f"kbench: {clean(line)}", err=True)
        if as_json:
            print_json({"exit_code": int(code), "errors": lines})
    raise typer.Exit(int(code))


def print_json(document: dict[str, Any]) -> None:
    """One document on stdout. NaN has no place in JSON: a document that holds one is a bug and raises ValueError."""
    typer.echo(json.dumps(document, indent=1, allow_nan=False))


def console() -> Console:
    """Where people read: stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def pairs(given: list[str] | None, option: str) -> dict[str, str]:
    found = {}
    for item in given or []:
        name, equals, value = item.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{option} {item!r} is not NAME=FILE", remedy=f"e.g. {option} long=mine.parquet")
        if not Path(value).is_file():
            raise UsageError("no such file", where=value, remedy=f"check the path of {option} {name}")
        found[name] = value
    return found


def expectations(plan: Plan, given: list[str] | None) -> list[Expectation]:
    """`[VARIANT:]NAME=BACKEND`, checked against what the plan has before anything is measured."""
    from kbench.decide.expected import Expectation

    claim = plan.loaded.suite.claim
    arms = {"baseline": claim.baseline, "candidate": claim.candidate, **{arm.name: arm.name for arm in plan.both}}
    found = []
    for item in given or []:
        place, equals, backend = item.partition("=")
        variant, colon, name = place.rpartition(":")
        if not (equals and name and backend) or (colon and not variant):
            raise UsageError(f"--expect {item!r} is not NAME=BACKEND", remedy="e.g. --expect decode=triton-paged")
        if variant and variant not in arms:
            raise UsageError(f"--expect {item}: no variant {variant!r}", remedy=f"one of {', '.join(arms)}")
        one = Expectation(arms[variant or "candidate"], name, backend)
        ops = ["attention.decode", "attention.prefill", *(op for arm in plan.both for op in arm.kernels)]
        ops += [case.op for case in plan.cases]
        if not any(one.speaks_of(op) for op in ops):
            known = ", ".join(dict.fromkeys(op for op in ops if op not in ("step", "replay")))
            raise UsageError(f"--expect {item}: the suite has no {name!r}", remedy=f"one of {known}")
        found.append(one)
    return found


def load_plan(
    suite: Path,
    seed: int | None = None,
    traces: list[str] | None = None,
    costs: list[str] | None = None,
    without: list[str] | None = None,
) -> Plan:
    """Suite and plan, with the suite's warnings on stderr."""
    from kbench.plan import make_plan
    from kbench.report.text import clean
    from kbench.suite import load_suite

    loaded = load_suite(
        suite, seed=seed, traces=pairs(traces, "--trace"), costs=pairs(costs, "--costs"), without=without or ()
    )
    for warning in loaded.warnings:
        typer.echo(f"kbench: warning: {clean(warning)}", err=True)
    return make_plan(loaded)


def resolve_device(device: str) -> str:
    """`auto` asks the driver, not torch: the parent holds no GPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"no device {device!r}", remedy="cpu, cuda or auto")
    from kbench.env import gpus

    if device == "auto":
        return "cuda" if gpus() else "cpu"
    if device == "cuda" and not gpus():
        raise UsageError("no CUDA device on this machine", remedy="--device cpu")
    return device
