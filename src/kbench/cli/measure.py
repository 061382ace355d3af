"""The commands that measure: `run` and one for each level. They differ in what they filter and what they print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import common, outputs
from kbench.errors import ExitCode, MeasurementError, UsageError

if TYPE_CHECKING:
    from kbench.decide.expected import Expectation
    from kbench.plan import Plan
    from kbench.record import RunRecord
    from kbench.run.loop import Options


@common.one_line_errors
def run(
    suite: common.SuitePath,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    device: common.Device = "auto",
    seed: common.Seed = None,
    resume: common.Resume = False,
    budget: common.Budget = None,
    dry_run: common.DryRun = False,
    exploratory: common.Exploratory = False,
    traces: common.TraceFiles = None,
    costs: common.CostFiles = None,
    without: common.Without = None,
    expect: common.Expect = None,
    junit: outputs.Junit = None,
    github: outputs.GitHub = False,
    fail_on: outputs.FailOn = None,
    debug: common.Debug = False,
) -> None:
    """Measure everything that is due, then decide and report."""
    from kbench.cli.decide import decide_and_show

    told = outputs.Outputs.of(suite, as_json, junit, github, fail_on, evidence=not (exploratory or dry_run))
    with told.whatever_happens():
        plan = common.load_plan(suite, seed, traces, costs, without)
        expected = common.expectations(plan, expect)
        if dry_run:
            return show_plan(plan, out, as_json)
        suite_ = plan.loaded.suite
        stepping = suite_.step is not None or suite_.workload is not None  # else no engine is measured, nor looked into
        levels = ("kernel", "step", *(("timeline",) if stepping else ()), "workload")
        record = _execute(plan, levels, out, device, resume, budget, exploratory, "")
        code = decide_and_show(plan, out, as_json, told, exploratory=record if exploratory else None, expected=expected)
    raise typer.Exit(int(code))


@common.one_line_errors
def timeline(
    source: Annotated[Path, typer.Argument(metavar="SUITE|TRACE", help="Suite, or a Chrome trace (.json, .json.gz).")],
    as_json: common.Json = False,
    min_share: Annotated[
        float | None, typer.Option("--min-share", help="Exit 1 where the class's share of the step is below this.")
    ] = None,
    work_class: Annotated[
        str, typer.Option("--class", help="The class of work that --min-share and --expected-saving are about.")
    ] = "attention",
    expected_saving: Annotated[
        float | None, typer.Option("--expected-saving", help="Share of the class's time that is hoped for.")
    ] = None,
    classes: Annotated[
        Path | None, typer.Option("--classes", help="TOML file with a table [classes] of NAME = PATTERN, tried first.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", help="Write the trace with kbench's tracks, for ui.perfetto.dev.")
    ] = None,
    out: common.Out = common.RESULTS,
    device: common.Device = "auto",
    seed: common.Seed = None,
    resume: common.Resume = False,
    dry_run: common.DryRun = False,
    exploratory: common.Exploratory = False,
    traces: common.TraceFiles = None,
    costs: common.CostFiles = None,
    without: common.Without = None,
    debug: common.Debug = False,
) -> None:
    """Say where a step's time goes: is the kernel worth the work at all?"""
    from kbench.report import tables, views
    from kbench.timeline import describe, export, read_patterns, study

    if min_share is not None and not 0 <= min_share <= 1:
        raise UsageError(f"--min-share is {min_share}, not a share", remedy="from 0 to 1")
    own = read_patterns(classes) if classes is not None else None
    trace: Path | None = source
    if not source.name.endswith((".json", ".json.gz")):
        plan = common.load_plan(source, seed, traces, costs, without)
        if dry_run:
            return show_plan(plan, out, as_json)
        records = measured(plan, ("timeline",), out, device, resume, None, exploratory, "")
        trace = _recorded_trace(records)
        if expected_saving is None:
            expected_saving = plan.loaded.suite.claim.expected_saving
    if trace is None:  # nothing was recorded: the view says why
        document = views.timeline_view(plan.loaded.suite, records)
    else:
        found = study(trace, own)
        document = describe(found, own, expected_saving=expected_saving, saved_class=work_class)
        if output is not None:
            export(found, output)
    show(document, as_json, tables.timeline_table)
    if trace is None and output is not None:
        raise MeasurementError("no trace was recorded that could be written", where=str(output))
    share = float(document["classes"].get(work_class, {}).get("share", 0.0))
    if min_share is not None and share < min_share:
        typer.echo(f"kbench: {work_class} takes {share:.1%} of the step, less than {min_share:.1%}", err=True)
        raise typer.Exit(int(ExitCode.DISABLE))


def _recorded_trace(records: list[RunRecord]) -> Path | None:
    """The newest trace that a run of the suite kept."""
    from kbench.run.traced import TRACE_FILE

    found = [record.path / TRACE_FILE for record in records if (record.path / TRACE_FILE).exists()]
    return found[-1] if found else None


GateOption = Annotated[
    bool, typer.Option("--gate", help="Judge every cell and exit 1 on a regression; [gate] in the suite sets how.")
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="With --gate: inconclusive (3) at once where the host has no noise card.")
]


def _windowed(level: str, question: str) -> Callable[..., None]:
    """The command of a level whose cases are measured in windows; they differ in the level alone."""

    @common.one_line_errors
    def command(
        suite: common.SuitePath,
        as_json: common.Json = False,
        out: common.Out = common.RESULTS,
        device: common.Device = "auto",
        seed: common.Seed = None,
        resume: common.Resume = False,
        budget: common.Budget = None,
        only: common.Only = "",
        dry_run: common.DryRun = False,
        exploratory: common.Exploratory = False,
        gate: GateOption = False,
        quick: QuickOption = False,
        traces: common.TraceFiles = None,
        costs: common.CostFiles = None,
        without: common.Without = None,
        expect: common.Expect = None,
        debug: common.Debug = False,
    ) -> None:
        from kbench.report import tables, views

        if gate and exploratory:
            raise UsageError("--gate and --exploratory exclude each other", remedy="a gate locks nothing anyway")
        if quick and not gate:
            raise UsageError("--quick is an option of --gate", remedy="add --gate")
        plan = common.load_plan(suite, seed, traces, costs, without)
        expected = common.expectations(plan, expect)
        if dry_run:
            return show_plan(plan, out, as_json)
        if gate:
            return _gate(plan, level, out, device, resume, budget, only, as_json, quick, expected)
        records = measured(plan, (level,), out, device, resume, budget, exploratory, only)
        if level == "step":
            show(views.step_view(plan.loaded.suite, records), as_json, tables.step_table)
        else:
            show(views.kernel_view(plan.loaded.suite, records, plan.loaded.recorded), as_json, tables.kernel_table)
        require_selected(plan, records, expected)

    command.__doc__ = question
    return command


suite_kernel = _windowed("kernel", "Level 1: is the operation right, and faster, on the shapes that matter?")
step = _windowed("step", "Level 2: is a whole engine step faster, conversion, metadata and launches included?")


@common.one_line_errors
def workload(
    suite: common.SuitePath,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    device: common.Device = "auto",
    seed: common.Seed = None,
    resume: common.Resume = False,
    budget: common.Budget = None,
    dry_run: common.DryRun = False,
    exploratory: common.Exploratory = False,
    traces: common.TraceFiles = None,
    costs: common.CostFiles = None,
    without: common.Without = None,
    expect: common.Expect = None,
    debug: common.Debug = False,
) -> None:
    """Level 3: do users get more qualifying work, with queueing, cache and preemption?"""
    from kbench.report import tables, views

    plan = common.load_plan(suite, seed, traces, costs, without)
    expected = common.expectations(plan, expect)
    if dry_run:
        return show_plan(plan, out, as_json)
    records = measured(plan, ("workload",), out, device, resume, budget, exploratory, "")
    show(views.workload_view(plan.loaded.suite, records), as_json, tables.workload_table)
    require_selected(plan, records, expected)


def require_selected(plan: Plan, records: list[RunRecord], expected: Sequence[Expectation] = ()) -> None:
    """Exit 5 with a line for everything that ran in the place of something else, undeclared or not expected; 4 where
    what is expected was never seen."""
    code = selection_code(plan, records, expected)
    if code is not ExitCode.DONE:
        raise typer.Exit(int(code))


def selection_code(plan: Plan, records: list[RunRecord], expected: Sequence[Expectation]) -> ExitCode:
    from kbench.decide import Evidence, selection_drift
    from kbench.decide.expected import judge

    evidence = Evidence.of(records) if records else None
    drift = selection_drift(plan.loaded.suite, evidence) if evidence is not None else ()
    found = judge(expected, evidence if evidence is not None else Evidence.of([], plan_hash=plan.plan_hash))
    for sentence in (*drift, *found.broken, *found.unseen):
        typer.echo(f"kbench: {sentence}", err=True)
    if drift or found.broken:
        return ExitCode.INTEGRITY
    return ExitCode.MISSING if found.unseen else ExitCode.DONE


def show(document: dict[str, Any], as_json: bool, table: Any) -> None:
    if as_json:
        common.print_json(document)
    else:
        common.console().print(table(document))


def show_plan(plan: Plan, out: Path, as_json: bool) -> None:
    from kbench.cli import plan as plans

    plans.show(plan, out, as_json)


def measured(
    plan: Plan,
    levels: tuple[str, ...],
    out: Path,
    device: str,
    resume: bool,
    budget: float | None,
    exploratory: bool,
    only: str,
    sessions: int | None = None,
) -> list[RunRecord]:
    """Measure what is due of one level and return everything there is to show about it."""
    _require_levels(plan, levels)
    record = _execute(plan, levels, out, device, resume, budget, exploratory, only, sessions)
    if record is not None and record.header["exploratory"]:
        return [record]
    from kbench.run.history import History

    records = History.read(out, plan.name).evidence(plan)[0]
    keep_metrics(plan, records, out)
    return records


def keep_metrics(plan: Plan, records: list[RunRecord], out: Path) -> None:
    """Who computed what, for a Prometheus collector. A folder that cannot be written costs the file alone."""
    from kbench.report import prometheus

    if not records or plan.loaded.without:
        return
    try:
        prometheus.write(plan.name, records, out / plan.name / prometheus.FILE)
    except MeasurementError as error:
        typer.echo(f"kbench: warning: {error}", err=True)


def _require_levels(plan: Plan, levels: tuple[str, ...]) -> None:
    missing = [level for level in levels if level != "timeline" and getattr(plan.loaded.suite, level) is None]
    if missing:
        raise UsageError(
            f"the suite has no [{missing[0]}]", where=str(plan.loaded.path), remedy=f"add it, or leave out {missing[0]}"
        )


def _gate(
    plan: Plan,
    level: str,
    out: Path,
    device: str,
    resume: bool,
    budget: float | None,
    only: str,
    as_json: bool,
    quick: bool,
    expected: Sequence[Expectation],
) -> None:
    """Measure a level as a gate, show its verdicts, and end with its exit code."""
    from kbench.report import tables
    from kbench.run.gate import gate

    _require_levels(plan, (level,))
    found = gate(plan, _options(plan, (level,), out, device, resume, budget, False, only), level, quick_only=quick)
    show(found.document, as_json, tables.gate_table)
    code = found.exit_code
    if expected:
        record = found.document["run"]
        from kbench.record import read_run
        from kbench.run.gate import FOLDER

        records = [read_run(out / plan.name / FOLDER / record)] if record else []
        code = ExitCode.worst([code, selection_code(plan, records, expected)])
    raise typer.Exit(int(code))


def _execute(
    plan: Plan,
    levels: tuple[str, ...],
    out: Path,
    device: str,
    resume: bool,
    budget: float | None,
    exploratory: bool,
    only: str,
    sessions: int | None = None,
) -> RunRecord | None:
    from dataclasses import replace

    from kbench.run.execute import execute

    options = _options(plan, levels, out, device, resume, budget, exploratory, only)
    return execute(plan, options if sessions is None else replace(options, sessions=sessions))


def _options(
    plan: Plan,
    levels: tuple[str, ...],
    out: Path,
    device: str,
    resume: bool,
    budget: float | None,
    exploratory: bool,
    only: str,
) -> Options:
    from kbench.report.plain import progress
    from kbench.run.loop import Options
    from kbench.run.session import Host

    return Options(
        levels=levels,
        root=out,
        host=Host(device=common.resolve_device(device)),
        resume=resume,
        exploratory=exploratory,
        budget_s=budget,
        only=only,
        observe=progress(plan),
    )
