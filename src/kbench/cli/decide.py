"""`kbench decide` and `kbench report`: the rule over all evidence, and what to send to a colleague."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.cli import common, outputs
from kbench.errors import ExitCode, MeasurementError

if TYPE_CHECKING:
    from kbench.decide import Decision
    from kbench.decide.expected import Expectation
    from kbench.plan import Plan
    from kbench.record import RunRecord


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision and what it rests on."""

    decision: Decision
    records: list[RunRecord]


@common.one_line_errors
def decide(
    suite: common.SuitePath,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    seed: common.Seed = None,
    traces: common.TraceFiles = None,
    costs: common.CostFiles = None,
    without: common.Without = None,
    expect: common.Expect = None,
    junit: outputs.Junit = None,
    github: outputs.GitHub = False,
    fail_on: outputs.FailOn = None,
    debug: common.Debug = False,
) -> None:
    """Evaluate the predeclared rule over all evidence of this plan."""
    told = outputs.Outputs.of(suite, as_json, junit, github, fail_on)
    with told.whatever_happens():
        plan = common.load_plan(suite, seed, traces, costs, without)
        code = decide_and_show(plan, out, as_json, told, expected=common.expectations(plan, expect))
    raise typer.Exit(int(code))


@common.one_line_errors
def report(
    suite: common.SuitePath,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    output: Annotated[Path | None, typer.Option("-o", metavar="FILE", help="Write the report here (Markdown).")] = None,
    seed: common.Seed = None,
    traces: common.TraceFiles = None,
    costs: common.CostFiles = None,
    without: common.Without = None,
    debug: common.Debug = False,
) -> None:
    """Write the report of a suite's evidence."""
    plan = common.load_plan(suite, seed, traces, costs, without)
    decided = _decide(plan, out)
    path = write_report(plan, decided, output or out / plan.name / "report.md")
    if as_json:
        common.print_json({"suite": plan.name, "plan_hash": plan.plan_hash, "report": str(path)})
    else:
        typer.echo(str(path))


def decide_and_show(
    plan: Plan,
    out: Path,
    as_json: bool,
    told: outputs.Outputs,
    exploratory: RunRecord | None = None,
    expected: Sequence[Expectation] = (),
) -> ExitCode:
    """Decide, keep the decision (ledger, report, selector), tell CI, print. An exploratory run leaves no trace."""
    from kbench.cli.measure import keep_metrics, selection_code
    from kbench.report.tables import verdict_table

    decided = _decide(plan, out) if exploratory is None else _explore(plan, exploratory)
    document = decided.decision.to_json()
    document["exploratory"] = exploratory is not None
    codes = [told.exit_code(decided.decision)]
    if expected:
        codes.append(selection_code(plan, decided.records, expected))
    document["exit_code"] = int(ExitCode.worst(codes))
    if exploratory is None:
        told.tell(decided.decision, _keep(plan, decided, out))
        keep_metrics(plan, decided.records, out)
    if as_json:
        common.print_json(document)
    else:
        common.console().print(verdict_table(decided.decision))
        if plan.loaded.without:
            gone = ", ".join(plan.loaded.without)
            typer.echo(f"without {gone}: a plan of its own, {plan.plan_hash}; no selector is written", err=True)
        elif exploratory is None:
            typer.echo(f"report: {out / plan.name / 'report.md'}", err=True)
        else:
            typer.echo("exploratory: this is no evidence, and no verdict rests on it", err=True)
    return ExitCode(document["exit_code"])


def write_report(plan: Plan, decided: Decided, path: Path) -> Path:
    from kbench.report.markdown import report_markdown

    text = report_markdown(decided.decision, decided.records, plan.loaded.suite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MeasurementError(
            f"cannot write the report: {error.strerror or error}", where=str(path), remedy="choose another -o"
        ) from error
    return path


def _decide(plan: Plan, out: Path) -> Decided:
    from kbench.decide import Evidence, decide, explain
    from kbench.run.benchmarked import benchmarked
    from kbench.run.history import History

    history = History.read(out, plan.name)
    history.require_unchanged(plan)
    records, aborted, void = history.evidence(plan)
    suite = plan.loaded.suite
    evidence = Evidence.of(
        records,
        aborted=aborted,
        void=void,
        total=len(records) + aborted,
        void_codes=suite.rule.void_codes,
        aa_floors=history.floors_of(plan, records),
        benchmarked=benchmarked(plan, out),
    )
    decision = explain(decide(suite, evidence, plan_hash=plan.plan_hash), suite, evidence)
    return Decided(replace(decision, earlier_plans=tuple(history.earlier_plans(plan))), records)


def _explore(plan: Plan, record: RunRecord) -> Decided:
    from kbench.decide import Evidence, decide, explain

    suite = plan.loaded.suite
    evidence = Evidence.of([record], aborted=0, void=0, void_codes=suite.rule.void_codes)
    return Decided(explain(decide(suite, evidence, plan_hash=plan.plan_hash), suite, evidence), [record])


def _keep(plan: Plan, decided: Decided, out: Path) -> str:
    """The verdict in the ledger, selector and report on disk; a folder that cannot be written costs only these.

    Returns the ledger's head. Without evidence nothing is written, but a selector of another plan is taken back. A
    decision that repeats the last one leaves ledger and files as they are: looking again is no event.
    """
    from kbench.ledger import Kind
    from kbench.report.selector_file import FILE, selector_document, write_selector
    from kbench.run.history import History

    history = History.read(out, plan.name)
    ledger, selector, page = history.ledger, out / plan.name / FILE, out / plan.name / "report.md"
    verdicts = {regime["regime"]: regime["verdict"] for regime in decided.decision.to_json()["regimes"]}
    body = {"plan_hash": plan.plan_hash, "verdicts": verdicts, "runs": [r.run_id for r in decided.records]}
    beside = bool(plan.loaded.without)  # evidence on a stand-in: what is in use is not its business
    if history.last_decision == body and (beside or (selector.exists() and page.exists())):
        return ledger.head
    try:
        head = ledger.append(Kind.DECIDE, body).hash if decided.records else ledger.head
        if beside:
            return head
        if decided.records or selector.exists():
            write_selector(selector_document(plan, decided.decision, decided.records, head), selector)
        if decided.records:
            write_report(plan, decided, page)
    except MeasurementError as error:
        typer.echo(f"kbench: warning: {error}", err=True)
        return ledger.head
    return head
