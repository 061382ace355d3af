"""`kbench explain` and `kbench repro`: one case in words, and the command that repeats it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import common
from kbench.errors import UsageError

if TYPE_CHECKING:
    from kbench.catalog import Case
    from kbench.plan import Plan

CaseText = Annotated[str, typer.Argument(metavar="CASE", help="A case id, or a part of it that only one case has.")]


@common.one_line_errors
def explain(
    suite: common.SuitePath,
    case: CaseText,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    debug: common.Debug = False,
) -> None:
    """Say in words what a kernel case must do, what limits it, and what was measured."""
    from kbench import catalog
    from kbench.report.explain import explain as in_words
    from kbench.report.views import kernel_view
    from kbench.run.history import History

    plan = common.load_plan(suite)
    found = one_case(plan, case, "kernel")
    records, _, _ = History.read(out, plan.name).evidence(plan)
    preset = plan.loaded.suite.model.preset
    model = catalog.model_shape(preset) if preset else None
    shape = catalog.resolve_shape(found.op, found.shape, model)
    layers = plan.loaded.suite.model.layers or (model.layers if model else 1)
    rows = [row for row in kernel_view(plan.loaded.suite, records)["cases"] if row["case"] == str(found)]
    document = in_words(found, shape, plan.loaded.suite.model.dtype, layers, rows)
    if as_json:
        return common.print_json(document)
    for heading in ("what", "limit", "why", "measured"):
        for line in document[heading]:
            typer.echo(f"{heading:>8}  {line}")


@common.one_line_errors
def repro(
    suite: common.SuitePath,
    case: CaseText,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    debug: common.Debug = False,
) -> None:
    """Print the command that repeats one case, and what it was measured on."""
    from kbench.run.history import History

    plan = common.load_plan(suite)
    found = one_case(plan, case, "kernel", "step")
    records, _, _ = History.read(out, plan.name).evidence(plan)
    newest = records[-1].header if records else {}
    document = describe(plan, found, suite, newest)
    if as_json:
        return common.print_json(document)
    typer.echo(document["command"])
    for line in document["measured_on"]:
        typer.echo(f"# {line}")


def one_case(plan: Plan, text: str, *levels: str) -> Case:
    """The case that `text` names. Raises UsageError where none or several do."""
    cases = [found for found in plan.at(*levels) if str(found) == text]
    cases = cases or [found for found in plan.at(*levels) if text in str(found)]
    if len(cases) == 1:
        return cases[0]
    known = ", ".join(str(found) for found in (cases or plan.at(*levels))[:6])
    what = f"no case contains {text!r}" if not cases else f"{len(cases)} cases contain {text!r}"
    raise UsageError(what, remedy=f"name one of {known or 'none: the suite has no such level'}")


def describe(plan: Plan, case: Case, suite: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The command, and what its numbers depend on besides."""
    device = str(header.get("device") or "auto")
    words = ["kbench", case.level, str(suite), "-k", str(case), "--seed", str(plan.loaded.suite.seed)]
    words += ["--device", device, "--exploratory"]
    environment = header.get("environment") or {}
    where = {
        "kbench": header.get("kbench"),
        "commit": (environment.get("checkout") or {}).get("commit"),
        "processor": (environment.get("cpu") or {}).get("model"),
        "GPUs": ", ".join(str(gpu.get("name")) for gpu in environment.get("gpus") or ()),
    }
    lines = [f"plan {plan.plan_hash}", *(f"{name} {value}" for name, value in where.items() if value)]
    return {"case": str(case), "command": shlex.join(words), "plan_hash": plan.plan_hash, "measured_on": lines}
