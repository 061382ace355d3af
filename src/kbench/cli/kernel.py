"""`kbench kernel`: level 1 of a suite, or of an operation and two implementations named on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import common, measure
from kbench.errors import UsageError

if TYPE_CHECKING:
    from kbench.decide.expected import Expectation
    from kbench.plan import Plan

SuiteOrNone = Annotated[
    Path | None, typer.Argument(metavar="[SUITE]", help="Suite file (TOML); or leave it out and give --op and --impl.")
]
OpOption = Annotated[str, typer.Option("--op", metavar="OP", help="Operation to measure; see kbench list ops.")]
ImplOption = Annotated[
    str,
    typer.Option("--impl", metavar="REF", help="Candidate: a name, FILE.py:NAME, FILE.py:NAME@GITREF, MODULE:NAME."),
]
BaselineOption = Annotated[str, typer.Option("--baseline", metavar="REF", help="What it is compared with.")]
PointsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--points", metavar="SHAPES", help="Shapes, space-separated or repeated: '1*1@127 32*1@4096,window=64'."
    ),
]
ShapesOption = Annotated[
    str, typer.Option("--shapes", metavar="FILE", help="Shapes from CSV or TOML: point, axes, weight (with --op).")
]
RecordedOption = Annotated[
    str,
    typer.Option("--recorded", metavar="FILE#VARIANT", help="Shapes and weights of a run's steps.parquet (with --op)."),
]
DefinitionOption = Annotated[
    str, typer.Option("--definition", metavar="FILE", help="FlashInfer-Trace definition (JSON) instead of --op.")
]
WorkloadOption = Annotated[
    str, typer.Option("--workload", metavar="FILE", help="Its workloads (JSON or JSONL): shapes and how often.")
]


@common.one_line_errors
def kernel(
    suite: SuiteOrNone = None,
    op: OpOption = "",
    implementation: ImplOption = "",
    baseline: BaselineOption = "",
    points: PointsOption = None,
    shapes: ShapesOption = "",
    recorded: RecordedOption = "",
    definition: DefinitionOption = "",
    workload: WorkloadOption = "",
    model: Annotated[str, typer.Option("--model", help="Model preset that fills in axes (with --op).")] = "small",
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32 (default), float16, bfloat16; a definition has its own (with --op).")
    ] = "",
    page_size: Annotated[
        int | None, typer.Option("--page-size", help="Tokens a KV page, 16 unless a definition says so (with --op).")
    ] = None,
    layout: Annotated[str, typer.Option("--layout", help="NHD or HND (with --op).")] = "NHD",
    cache: Annotated[str, typer.Option("--cache", help="serving, cold, hot or flush (with --op).")] = "serving",
    timer: Annotated[str, typer.Option("--timer", help="auto, graph, event, profiler or wall (with --op).")] = "auto",
    sessions: Annotated[
        int | None,
        typer.Option(
            "--sessions", min=1, max=100, help="Pairs of processes, 3 by default; 1 has no interval (with --op)."
        ),
    ] = None,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    device: common.Device = "auto",
    seed: common.Seed = None,
    resume: common.Resume = False,
    budget: common.Budget = None,
    only: common.Only = "",
    dry_run: common.DryRun = False,
    exploratory: common.Exploratory = False,
    gate: measure.GateOption = False,
    quick: measure.QuickOption = False,
    traces: common.TraceFiles = None,
    costs: common.CostFiles = None,
    without: common.Without = None,
    expect: common.Expect = None,
    debug: common.Debug = False,
) -> None:
    """Level 1: is the operation right, and faster, on the shapes that matter?"""
    given = {"shapes": shapes, "recorded": recorded, "definition": definition, "workload": workload}
    files = {key: name for key, name in given.items() if name}
    if suite is not None:
        if op or implementation or baseline or points or files:
            what = "--op, --impl, --baseline, --points and files of shapes"
            raise UsageError("a suite says what is compared", remedy=f"leave {what} out")
        return measure.suite_kernel(
            suite,
            as_json=as_json,
            out=out,
            device=device,
            seed=seed,
            resume=resume,
            budget=budget,
            only=only,
            dry_run=dry_run,
            exploratory=exploratory,
            gate=gate,
            quick=quick,
            traces=traces,
            costs=costs,
            without=without,
            expect=expect,
            debug=debug,
        )
    if definition:
        from kbench.suite.flashinfer import read_definition

        defined = read_definition(Path(definition))
        op, dtype, page_size = op or defined.op, dtype or defined.dtype, page_size or defined.page_size
    if not (op and implementation):
        raise UsageError("nothing to measure", remedy="name a suite, or give --op and --impl; see kbench list ops")
    if without:
        raise UsageError("--without is about the fallbacks of a suite", remedy="name the suite, or leave it out")
    settings = {"cache": cache, "timer": timer}
    layer = {"model": model, "dtype": dtype or "float32", "page_size": page_size or 16, "layout": layout}
    plan = plan_of(op, implementation, baseline, points or [], files, layer, settings, seed or 1)
    for note in plan.loaded.warnings:
        typer.echo(f"kbench: note: {note}", err=True)
    expected = common.expectations(plan, expect)
    if dry_run:
        return measure.show_plan(plan, out, as_json)
    _measure(plan, as_json, out, device, budget, only, sessions, expected)


def plan_of(
    op: str,
    implementation: str,
    baseline: str,
    points: list[str],
    files: dict[str, str],
    layer: dict[str, Any],
    settings: dict[str, Any],
    seed: int,
) -> Plan:
    from kbench import catalog
    from kbench.plan import make_plan
    from kbench.suite.adhoc import adhoc_suite

    known = [found.name for found in catalog.implementations(catalog.operation(op).name)]
    if not baseline and not known:
        raise UsageError(f"nobody computes {op} yet", remedy="name a --baseline of your own: FILE.py:NAME")
    shapes = [shape for text in points for shape in text.split()]
    loaded = adhoc_suite(
        op,
        implementation,
        baseline or known[0],
        shapes,
        files=files,
        measure=settings,
        seed=seed,
        **layer,
    )
    return make_plan(loaded)


def _measure(
    plan: Plan,
    as_json: bool,
    out: Path,
    device: str,
    budget: float | None,
    only: str,
    sessions: int | None,
    expected: Sequence[Expectation],
) -> None:
    from kbench.report import tables, views
    from kbench.suite import adhoc

    records = measure.measured(plan, ("kernel",), out, device, False, budget, True, only, sessions or adhoc.SESSIONS)
    view = views.kernel_view(plan.loaded.suite, records, plan.loaded.recorded)
    measure.show(view, as_json, tables.kernel_table)
    measure.require_selected(plan, records, expected)
