"""Which cells a regime's clauses need, and what their trials object to.

Owns the rule that turns points and trace classes into required cells. A required cell that was not measured is missing
evidence, never a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from kbench.catalog import Shape, op_applies, parse_shape
from kbench.decide.evidence import NO_SESSION, Cell, Ended, Evidence
from kbench.decide.results import CellResult, ClauseStatus
from kbench.errors import UsageError
from kbench.protocol import Status
from kbench.suite.rule_schema import Regime
from kbench.suite.schema import Suite

FAILED = frozenset({Status.FAILED, Status.INCORRECT, Status.CRASHED, Status.HUNG, Status.OUT_OF_MEMORY})
"""Ends of a candidate's trial that fail the clause, however fast its other trials were."""
CORRECT = "mend the candidate; that makes it a new plan"
REPLAY, SLICE, CALIBRATE, DIVERGED = "replay", "slice", "calibrate", "divergence"
"""Workload cells: whole replays; the real slice, the model's error on it, and the difference of its outputs."""


def timing_cells(suite: Suite, regime: Regime, level: str) -> tuple[Cell, ...]:
    """The step or kernel cells of a regime: its points, or where it names none the level's points inside `when`.

    Step: one cell a point. Kernel: every point with every operation of the suite that applies to it (decode where every
    query is one token, prefill where none is), which is how the plan expands them.
    """
    shapes = _shapes(suite, regime, level)
    if level == "step":
        return tuple(Cell("step", "step", str(shape)) for shape in shapes if shape.is_batch)
    ops = suite.kernel.ops if suite.kernel else ()
    return tuple(Cell("kernel", op, str(shape)) for shape in shapes for op in ops if op_applies(op, shape))


def workload_cells(suite: Suite, regime: Regime, mode: str) -> tuple[Cell, ...]:
    """One cell for each trace class of the regime; a regime of ranges needs every class of the suite."""
    names = regime.trace_class or tuple(suite.workload.traces if suite.workload else ())
    return tuple(Cell("workload", REPLAY, name, mode) for name in names)


def _shapes(suite: Suite, regime: Regime, level: str) -> tuple[Shape, ...]:
    settings = suite.kernel if level == "kernel" else suite.step
    texts = regime.points or (settings.points if settings else ())
    shapes = tuple(dict.fromkeys(parse_shape(text) for text in texts))
    if regime.points or regime.when is None:
        return shapes
    context, batch = regime.when.context, regime.when.batch
    return tuple(
        shape
        for shape in shapes
        if shape.point is not None
        and (context is None or context[0] <= shape.point.context <= context[1])
        and (batch is None or batch[0] <= shape.point.batch <= batch[1])
    )


@dataclass(frozen=True, slots=True)
class Standing:
    """What a cell's trials say before any number is looked at."""

    objection: CellResult | None
    void_sessions: frozenset[int] = frozenset()
    """Sessions in which the baseline's trial failed: void for this cell, in both arms."""
    voids: str = ""


def standing(suite: Suite, evidence: Evidence, cell: Cell, *, also: tuple[Cell, ...] = ()) -> Standing:
    """Fail where the candidate failed in any session; missing where nothing says that both arms ran and were right.

    `also` names cells whose trials speak for this one too. A baseline that failed voids its session. A case that cannot
    tell right from wrong (non-discriminating), or that the candidate does not support, is missing evidence. So is a
    modelled replay that failed: no code of the candidate runs in it.
    """
    name = str(cell)
    candidate, baseline = (
        [trial for place in (cell, *also) for trial in trials_of(evidence, place, variant)]
        for variant in (suite.claim.candidate, suite.claim.baseline)
    )

    def missing(why: str, action: str = "") -> Standing:
        said = action or "the baseline must run here: correct it, or leave the case out"
        return Standing(CellResult(name, ClauseStatus.MISSING, f"{name}: {why}", action=said))

    failed = [trial for trial in candidate if trial.status in FAILED]
    if failed and not is_modelled(cell):
        text = f"{name}: the candidate's trial {ended(failed[0])}"
        return Standing(CellResult(name, ClauseStatus.FAIL, text, action=CORRECT))
    if baseline and not candidate and all(trial.status in FAILED for trial in baseline):
        return missing(f"void, the baseline's trial {ended(baseline[0])}")
    for arm, trials in (("candidate", candidate), ("baseline", baseline)):
        if not trials:
            who = f" ({arm})" if candidate or baseline else ""
            why = f"not measured{who}{_setup_failure(evidence, cell)}; kbench run measures what is due"
            return missing(why, f"no evidence at {where(cell)}: kbench run SUITE measures it")
        for trial in trials:
            if trial.status == Status.UNSUPPORTED:
                why = f"the {arm} does not support it: {trial.message or 'no reason given'}"
                return missing(why, f"no evidence at {where(cell)}: leave it out of the regime, or support it")
            if trial.status == Status.NON_DISCRIMINATING:
                why = f"the case cannot tell a wrong {arm} from a right one: {trial.message or 'no details'}"
                return missing(why, f"no evidence at {where(cell)}: choose another point")
    for arm, trials in (("candidate", candidate), ("baseline", baseline)):
        if all(trial.status != Status.OK for trial in trials):
            return missing(f"void, the {arm}'s trial {ended(trials[0])}")
    void = [trial for trial in baseline if trial.status != Status.OK]
    if void and "baseline_crash" not in suite.rule.void_codes:
        return missing(f"the baseline's trial {ended(void[0])}, and the rule names no code that makes it void")
    sessions = frozenset(trial.session for trial in void if trial.session != NO_SESSION)
    return Standing(None, sessions, f"; {len(void)} void, the baseline's trial {ended(void[0])}" if void else "")


def where(cell: Cell) -> str:
    """`context 4,096, batch 32`, or the trace class."""
    try:
        point = parse_shape(cell.point).point if cell.level != "workload" else None
    except UsageError:
        point = None
    return str(cell) if point is None else f"context {point.context:,}, batch {point.batch} ({cell.level})"


def is_modelled(cell: Cell) -> bool:
    """Whether the cell's trials run the model or compare files, rather than either arm's code."""
    return cell.level == "workload" and (cell.mode == "virtual" or cell.op in (CALIBRATE, DIVERGED))


def _setup_failure(evidence: Evidence, cell: Cell) -> str:
    """Why a replay could not even start, where the setup says so."""
    if cell.level != "workload":
        return ""
    for name in (cell.point, "all"):
        for trial in evidence.trials(Cell("workload", "setup", name)):
            if trial.status != Status.OK:
                return f": its setup {ended(trial)}"
    return ""


def ended(trial: Ended) -> str:
    """`crashed: segmentation fault`."""
    message = " ".join(trial.message.split())
    head = "ended " + trial.status if trial.status in (Status.INCORRECT, Status.OUT_OF_MEMORY) else trial.status
    return f"{head}: {message}" if message else head


def trials_of(evidence: Evidence, cell: Cell, variant: str) -> tuple[Ended, ...]:
    """The cell's trials; those of a workload whose case names no mode count for every mode."""
    found = evidence.trials(cell, variant)
    if cell.level == "workload" and cell.mode:
        found += evidence.trials(Cell(cell.level, cell.op, cell.point), variant)
    return found
