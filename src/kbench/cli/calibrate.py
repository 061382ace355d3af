"""`kbench calibrate`: the A/A noise card of this host, for the quick tier of gates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import common

if TYPE_CHECKING:
    from kbench.run.calibrate import Calibrated


@common.one_line_errors
def calibrate(
    suite: common.SuitePath,
    sessions: Annotated[int, typer.Option("--sessions", help="A/A sessions, at least 16.")] = 16,
    days: Annotated[int, typer.Option("--days", help="How long the card is valid.")] = 14,
    as_json: common.Json = False,
    out: common.Out = common.RESULTS,
    device: common.Device = "auto",
    seed: common.Seed = None,
    resume: common.Resume = False,
    only: Annotated[str, typer.Option("-k", metavar="TEXT", help="Only cases whose id contains TEXT.")] = "",
    debug: common.Debug = False,
) -> None:
    """Measure the baseline against itself: how much two equal variants differ on this host.

    The card lets a gate judge by one to three sessions. It is never evidence for the rule.
    """
    from kbench.report import tables
    from kbench.report.plain import progress
    from kbench.run import calibrate as aa
    from kbench.run.loop import Options
    from kbench.run.session import Host

    plan = common.load_plan(suite, seed)
    options = Options(
        levels=(),
        root=out,
        host=Host(device=common.resolve_device(device)),
        resume=resume,
        only=only,
        observe=progress(plan),
    )
    document = describe(aa.calibrate(plan, options, sessions=sessions, days=days), out)
    if as_json:
        common.print_json(document)
    else:
        common.console().print(tables.card_table(document))


def describe(found: Calibrated, out: Path) -> dict[str, Any]:
    """The card in one JSON document: what is judged of each case; the file holds every session."""
    from kbench.catalog import Case
    from kbench.decide.quick import TOTAL

    card = found.card
    cases = []
    for case, noise in card.cases.items():
        scatter = noise.metrics[TOTAL[Case.parse(case).level]]
        cases.append(
            {
                "case": case,
                "metric": TOTAL[Case.parse(case).level],
                "sessions": len(scatter.estimates),
                "sd": scatter.sd,
                "within_sd": scatter.within_variance**0.5,
                "components": sorted(set(noise.metrics) - {TOTAL[Case.parse(case).level]}),
            }
        )
    return {
        "schema": card.schema_,
        "file": str(found.path.relative_to(out)),
        "host": card.key.host,
        "key": card.key.model_dump(mode="json"),
        "run": card.run,
        "created": card.created.isoformat(),
        "expires": card.expires.isoformat(),
        "cases": cases,
        "left_out": dict(found.left_out),
    }
