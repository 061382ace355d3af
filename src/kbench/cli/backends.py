"""`kbench backends`: who serves which query, every reason why not, and what was seen to run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import common
from kbench.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from kbench.plan import Plan
    from kbench.record import RunRecord
    from kbench.suite.demands import Demand
    from kbench.suite.schema import Arm

SuiteOrNone = Annotated[
    Path | None, typer.Argument(metavar="[SUITE]", help="Suite file (TOML); without one, attention of a --model.")
]


@common.one_line_errors
def backends(
    suite: SuiteOrNone = None,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    device: common.Device = "auto",
    capability: Annotated[
        str, typer.Option("--capability", metavar="X.Y", help="Ask about a CUDA device of this compute capability.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Model preset (without a suite).")] = "small",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float16, bfloat16 (without a suite).")] = "float32",
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens a KV page (without a suite).")] = 16,
    layout: Annotated[str, typer.Option("--layout", help="NHD or HND (without a suite).")] = "NHD",
    without: common.Without = None,
    prom: Annotated[
        Path | None,
        typer.Option("--prom", metavar="FILE", help="Write what was measured as Prometheus text, kbench_backend_info."),
    ] = None,
    debug: common.Debug = False,
) -> None:
    """Say who can compute what, who was chosen, and every reason why others were not.

    Exit 2 where a variant asks for what nobody may serve here, 5 where something undeclared was seen to run.
    """
    from kbench.report import backends_view, prometheus
    from kbench.report.tables import backends_table

    where, own = _device(device, capability)
    plan: Plan | None = None
    runs: list[RunRecord] = []
    if suite is not None:
        plan = common.load_plan(suite, without=without)
        arms = _of_suite(plan, where, own)
        runs = _measured(plan, out)
    else:
        arms = _of_model(model, dtype, page_size, layout, where, own)
    document = backends_view.matrix(arms, where, own)
    document["measured"] = backends_view.selections(runs)
    if prom is not None:
        if plan is None:
            raise UsageError("--prom tells what a suite measured", remedy="name the suite")
        prometheus.write(plan.name, runs, prom)
    if as_json:
        common.print_json(document)
    else:
        common.console().print(backends_table(document))
    refused = [ExitCode.USAGE for query in document["queries"] if query["refusal"]]
    drifted = [ExitCode.INTEGRITY for row in document["measured"] if row["drift"]]
    code = ExitCode.worst([*drifted, *refused] if plan is not None else [])
    if code is not ExitCode.DONE:
        raise typer.Exit(int(code))


def _device(device: str, capability: str) -> tuple[str, tuple[int, int] | None]:
    """The device that is asked about, which need not be here where its capability is given."""
    from kbench.env.gpu import capability as known

    if not capability:
        where = common.resolve_device(device)
        return where, known(where)
    if device == "cpu":
        raise UsageError("--capability is a CUDA device's", remedy="--device cuda")
    found = re.fullmatch(r"(\d+)\.(\d)", capability)
    if found is None:
        raise UsageError(f"--capability {capability!r} is none", remedy="e.g. 9.0")
    return "cuda", (int(found[1]), int(found[2]))


def _of_suite(plan: Plan, device: str, capability: Any) -> list[tuple[Arm, tuple[Demand, ...]]]:
    from kbench.suite.checks import model_of
    from kbench.suite.demands import demands

    suite = plan.loaded.suite
    model = model_of(suite.model, plan.loaded.root)
    levels = [level for level in ("kernel", "step", "workload") if getattr(suite, level) is not None]
    return [(arm, demands(arm, model, plan.cases, levels, device, capability)) for arm in plan.both]


def _of_model(
    model: str, dtype: str, page_size: int, layout: str, device: str, capability: Any
) -> list[tuple[Arm, tuple[Demand, ...]]]:
    from kbench import catalog
    from kbench.suite.demands import demands
    from kbench.suite.schema import Arm

    settings = {"preset": model, "dtype": dtype}
    attention = {"prefill": catalog.AUTO, "decode": catalog.AUTO}
    try:
        arm = Arm.model_validate(
            {"name": "auto", "model": settings, "engine": {}, **attention, "page_size": page_size, "layout": layout,
             "seed": 1, "root": str(Path.cwd())},
        )  # fmt: skip
    except ValueError as error:
        what = " ".join(str(error).split())[:200]
        raise UsageError(f"these options make no variant: {what}", remedy="see kbench backends --help") from error
    return [(arm, demands(arm, catalog.model_shape(model), (), ("step",), device, capability))]


def _measured(plan: Plan, out: Path) -> list[RunRecord]:
    from kbench.run.history import History

    if not (out / plan.name / "ledger.jsonl").is_file():
        return []
    return History.read(out, plan.name).evidence(plan)[0]
