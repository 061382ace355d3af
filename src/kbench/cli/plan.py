"""`kbench plan`: what would run, in which order, how long, and under which hash. Runs nothing, imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbench.cli import common

if TYPE_CHECKING:
    from kbench.decide.evidence import Cell
    from kbench.decide.power import Sight
    from kbench.plan import Plan
    from kbench.record import RunRecord


@common.one_line_errors
def plan(
    suite: common.SuitePath,
    as_json: common.Json = False,
    seed: common.Seed = None,
    traces: common.TraceFiles = None,
    costs: common.CostFiles = None,
    without: common.Without = None,
    out: common.Out = common.RESULTS,
    debug: common.Debug = False,
) -> None:
    """Say what would run, in what order and for how long; run nothing."""
    show(common.load_plan(suite, seed, traces, costs, without), out, as_json)


def show(found: Plan, out: Path, as_json: bool) -> None:
    document = describe(found, out)
    if as_json:
        common.print_json(document)
        return
    from kbench.report.tables import plan_table

    common.console().print(plan_table(document))


def describe(found: Plan, out: Path) -> dict[str, Any]:
    """The plan as one JSON document."""
    from kbench.decide.evidence import Evidence
    from kbench.decide.power import sights
    from kbench.plan import block_orders, estimated_seconds
    from kbench.run.history import History
    from kbench.run.loop import sessions_of
    from kbench.stats import family_error, minimum_detectable_effect

    history = History.read(out, found.name)
    history.require_unchanged(found)
    records, aborted, _ = history.evidence(found)
    rule, measure, workload = found.loaded.suite.rule, found.loaded.suite.measure, found.loaded.suite.workload
    levels = ("kernel", "step")
    codes = rule.void_codes
    have = {level: sessions_of(records, level, codes) for level in levels if found.at(level)}
    plans: dict[str, list[RunRecord]] = {}
    for record in history.scatter(found):
        plans.setdefault(str(record.header.get("plan_hash")), []).append(record)
    floors = history.floors_of(found, records)
    earlier = [Evidence.of(runs, void_codes=codes, aa_floors=floors) for runs in plans.values()]
    seen = sights(found.loaded.suite, earlier, aborted=aborted, noise=_noise(found, out))
    regimes = max(1, len(found.loaded.suite.regime))
    alpha = rule.alpha / regimes / (1 + aborted)
    return {
        "suite": found.name,
        "plan_hash": found.plan_hash,
        "lock_hash": found.lock_hash,
        "arms": found.arms,
        "looks": list(rule.looks),
        "sessions": have,
        "cases": [str(case) for case in found.cases],
        "order": {
            str(case): block_orders(found.plan_hash, "first run/0", case, measure.blocks) for case in found.at(*levels)
        },
        "estimated_s": estimated_seconds(found, rule.looks[-1] - min(have.values(), default=0)),
        "smallest_visible_saving": {
            f"{100 * sd:g}%": minimum_detectable_effect(sd, rule.looks[-1], alpha, 0.95) for sd in (0.001, 0.003, 0.01)
        },
        "family_error": (
            None if workload is None else family_error(regimes, workload.segments, rule.alpha / (1 + aborted))
        ),
        "sees": [sight.to_json() for sight in seen],
        "power_reached": _reached(seen) if rule.power else None,
        "warnings": [str(warning) for warning in found.loaded.warnings],
    }


def _noise(found: Plan, out: Path) -> dict[tuple[Cell, str], float]:
    """How A/A sessions scatter in each cell of the plan, where this host has a valid noise card."""
    from kbench import env
    from kbench.decide.evidence import cell_of
    from kbench.noise import NoCard, key_of, lookup

    if not (out / "noise").is_dir():
        return {}
    key = key_of(env.snapshot(), common.resolve_device("auto"), found.baseline, found.loaded.suite.measure)
    card = lookup(out, key, [])
    if isinstance(card, NoCard):
        return {}
    return {
        (cell_of(case)[0], metric): scatter.sd
        for case, noise in card.cases.items()
        for metric, scatter in noise.metrics.items()
    }


def _reached(seen: tuple[Sight, ...]) -> bool | None:
    """Whether every superiority clause sees what `[rule.power]` wants; None where there is nothing to go by."""
    said = [sight.reaches for sight in seen if sight.test == "superiority"]
    return None if not said or None in said else all(said)
