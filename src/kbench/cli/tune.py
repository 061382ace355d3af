"""`kbench tune`: fill a cache of configurations from shapes, or say what it is worth on a later part of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import common
from kbench.cli import kernel as options
from kbench.errors import UsageError

if TYPE_CHECKING:
    from kbench.plan import Plan
    from kbench.run.session import Host

CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", metavar="DIR", help="Folder of the entries; default: the suite's, or ./tuning."),
]
DriftOption = Annotated[
    str,
    typer.Option(
        "--drift",
        metavar="FILE#VARIANT",
        help="Tune on the first half of these steps (a run, its steps.parquet, or a trace), replay the other half.",
    ),
]


@common.one_line_errors
def tune(
    suite: options.SuiteOrNone = None,
    op: options.OpOption = "",
    implementation: Annotated[
        str, typer.Option("--impl", metavar="REF", help="What is tuned: a name, FILE.py:NAME, MODULE:NAME.")
    ] = "",
    points: options.PointsOption = None,
    shapes: options.ShapesOption = "",
    recorded: options.RecordedOption = "",
    model: Annotated[str, typer.Option("--model", help="Model preset that fills in axes (with --op).")] = "small",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float16 or bfloat16 (with --op).")] = "float32",
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens a KV page (with --op).")] = 16,
    layout: Annotated[str, typer.Option("--layout", help="NHD or HND (with --op).")] = "NHD",
    cache: CacheOption = None,
    again: Annotated[bool, typer.Option("--again", help="Tune what has an entry already, too.")] = False,
    drift: DriftOption = "",
    costs: Annotated[
        str, typer.Option("--costs", metavar="GRID#VARIANT", help="Cost grid that a trace's steps are modelled from.")
    ] = "",
    as_json: common.Json = False,
    device: common.Device = "auto",
    debug: common.Debug = False,
) -> None:
    """Tune implementations from recorded shapes, and keep what was found."""
    from kbench.run.session import Host

    host = Host(device=common.resolve_device(device))
    if suite is not None:
        if op or implementation:
            raise UsageError("a suite says what is tuned", remedy="leave --op and --impl out")
        plan = common.load_plan(suite)
        document = _tune_suite(plan, host, _cache(plan, cache), again)
        return _show(document, as_json)
    if not (op and implementation):
        raise UsageError("nothing to tune", remedy="name a suite, or give --op and --impl; see kbench list kernels")
    layer = {"model": model, "dtype": dtype, "page_size": page_size, "layout": layout}
    files = {key: name for key, name in (("shapes", shapes), ("recorded", recorded)) if name}
    if drift:
        from kbench.cli.drift import study

        return _show(study(op, implementation, drift, costs, layer, host, cache, again), as_json)
    plan = options.plan_of(op, implementation, implementation, points or [], files, layer, {}, 1)
    found = _tune_arm(plan, op, host, _cache(plan, cache), again)
    _show({"cache": str(_cache(plan, cache)), "arms": [found]}, as_json)


def _cache(plan: Plan, given: Path | None) -> Path:
    own = plan.loaded.suite.measure.tuning_cache
    return given or (plan.loaded.root / own if own else Path("tuning"))


def _tune_suite(plan: Plan, host: Host, cache: Path, again: bool) -> dict[str, Any]:
    """Both arms, every operation; one that has nothing to tune is listed with the reason."""
    arms = []
    for arm in plan.both:
        for op in dict.fromkeys(case.op for case in plan.at("kernel")):
            try:
                arms.append(_tune_arm(plan, op, host, cache, again, arm.name))
            except UsageError as error:
                arms.append({"variant": arm.name, "op": op, "rows": [], "note": str(error)})
    if not any(found["rows"] for found in arms):
        raise UsageError(f"nothing to tune: {arms[0]['note'] if arms else 'the suite has no [kernel]'}")
    return {"cache": str(cache), "arms": arms}


def _tune_arm(plan: Plan, op: str, host: Host, cache: Path, again: bool, name: str = "") -> dict[str, Any]:
    from kbench.run.tuning import tune as ask

    arm = next(arm for arm in plan.both if name in ("", arm.name))
    shapes = [case.point for case in plan.at("kernel") if case.op == op]
    return {"variant": arm.name, "op": op, **ask(arm, host, plan.loaded.suite.measure, op, shapes, cache, again=again)}


def _show(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return common.print_json(document)
    from kbench.report.tuning import tuning_tables

    common.console().print(tuning_tables(document))
