"""Signs that a cell's numbers are about the machine rather than the candidate: order, drift, and controls that moved.

Owns three estimates a cell, each by t over sessions, and one word: a step cell is `contaminated` where the phases that
the candidate cannot touch differ between the arms. Nothing here lets a clause pass or fail; whether a contaminated cell
may be enabled is `[rule.diagnostics]` of the suite.

    carry_over  how much the arm before a window changes it, in favour of one arm: in ABBA the second window is the
                candidate's after the baseline's and the third the candidate's after its own, in BAAB the same of the
                baseline. A drift adds the same to both, so that their difference is free of it.
    order       what standing second in a pair (AB against BA) costs; ABBA and BAAB hold as many of each, so it cancels
    drift       change of both arms' times from the first to the last block of a session
    control     relative difference (candidate over baseline) of the time of the control phases
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbench.decide.estimate import means_by
from kbench.decide.evidence import Cell, Evidence, Series
from kbench.decide.results import number, percent
from kbench.stats import session_interval, t_cdf
from kbench.suite.schema import Suite, Variant

Floats = NDArray[np.float64]
ALWAYS_CONTROL = ("sample",)
"""It begins when the forward pass is over and reads its logits only, whose shape is the same. (Copying them waits for
whatever is still queued, and is no control.)"""
UNPAGED_CONTROL = ("schedule", "bookkeeping")
"""The engine's own book-keeping: the candidate's business only where it changes pages, layout or the engine."""
CONTROL_ALPHA = 0.01
"""Two-sided error of one cell's control."""
LEAST_SHIFT = 0.02
"""A smaller relative shift of the controls is no contamination, however certain it is: it moves no verdict."""


@dataclass(frozen=True, slots=True)
class Shift:
    """One estimate over sessions with its 95 % interval; NaN where there are fewer than two."""

    point: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    """Two-sided, of no shift at all."""
    sessions: int = 0

    @classmethod
    def of(cls, values: Floats) -> Shift:
        kept = values[np.isfinite(values)]
        if len(kept) < 2:
            return cls(sessions=len(kept))
        found = session_interval(kept)
        error = float(kept.std(ddof=1)) / math.sqrt(len(kept))
        if error <= 0.0:
            p = 1.0 if found.point == 0.0 else 0.0
        else:
            p = 2.0 * (1.0 - t_cdf(abs(found.point) / error, len(kept) - 1))
        return cls(found.point, found.low, found.high, p, len(kept))

    @property
    def relative(self) -> Shift:
        """Of log ratios: the same as shares, 0.1 for 10 % more."""
        point, low, high = (math.expm1(min(side, 700.0)) for side in (self.point, self.low, self.high))
        return Shift(point, low, high, self.p, self.sessions)

    def to_json(self) -> dict[str, Any]:
        return {
            "point": number(self.point), "low": number(self.low), "high": number(self.high), "p": number(self.p),
            "sessions": self.sessions,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """What one kernel or step cell shows beside its estimate."""

    cell: Cell
    carry_over: Shift
    order: Shift
    drift: Shift
    control: Shift
    controls: tuple[str, ...] = ()
    """The control phases that were measured; none at level 1."""

    @property
    def contaminated(self) -> bool:
        return self.control.p < CONTROL_ALPHA and abs(self.control.point) > LEAST_SHIFT

    @property
    def sentence(self) -> str:
        """Why the cell is contaminated."""
        shift = self.control
        return (
            f"{self.cell}: {', '.join(self.controls)} run none of the candidate's code, and moved by "
            f"{percent(shift.point, signed=True)} (95 % interval {percent(shift.low, signed=True)} to "
            f"{percent(shift.high, signed=True)}, p = {shift.p:.2g}): the arms were not measured alike, or the "
            "candidate leaves caches or clocks behind as the baseline does not"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.cell.level,
            "cell": str(self.cell),
            "carry_over": self.carry_over.to_json(),
            "order": self.order.to_json(),
            "drift": self.drift.to_json(),
            "control": self.control.to_json(),
            "controls": list(self.controls),
            "contaminated": self.contaminated,
        }


def diagnose(suite: Suite, evidence: Evidence, cell: Cell) -> Diagnostics:
    """The diagnostics of one kernel or step cell, over its complete sessions."""
    metric = "latency" if cell.level == "kernel" else "step_time"
    baseline, candidate = (
        evidence.series(cell, metric, variant) for variant in (suite.claim.baseline, suite.claim.candidate)
    )
    names = _controls_of(suite) if cell.level == "step" else ()
    control, measured = _control(suite, evidence, cell, names)
    carry_over, order, drift = _windows(baseline, candidate)
    return Diagnostics(cell, carry_over, order, drift, control, measured)


def diagnostics(suite: Suite, evidence: Evidence) -> tuple[Diagnostics, ...]:
    """Every kernel and step cell on record in which both arms were measured in windows."""
    found = []
    for cell in evidence.cells():
        if cell.level in ("kernel", "step") and cell.op != "costs":
            one = diagnose(suite, evidence, cell)
            if one.drift.sessions:
                found.append(one)
    return tuple(found)


def _windows(baseline: Series, candidate: Series) -> tuple[Shift, Shift, Shift]:
    """Carry-over, order and drift, from blocks of exactly two windows an arm."""
    session, slot, place, log, arm = _joined(baseline, candidate)
    if not len(log):
        return Shift(), Shift(), Shift()
    width = int(slot.max()) + 1
    key = session * width + slot
    order = np.lexsort((place, key))
    blocks, starts, counts = np.unique(key[order], return_index=True, return_counts=True)
    four = np.flatnonzero(counts == 4)
    rows = order[starts[four][:, None] + np.arange(4)[None, :]]
    who, logs = arm[rows], log[rows]
    abba = np.all(who == (0, 1, 1, 0), axis=1)
    baab = np.all(who == (1, 0, 0, 1), axis=1)
    known = abba | baab
    owner = blocks[four] // width
    # Candidate after baseline against candidate after itself, and the same with the arms exchanged.
    after = logs[:, 1] - logs[:, 2]
    # Second place in a pair: the first pair's second window against its first, and the last pair's likewise.
    second = (logs[:, 1] - logs[:, 0] + logs[:, 3] - logs[:, 2]) / 2.0
    sessions = np.unique(owner[known])
    carried = np.array([_mean(after[abba & (owner == one)]) - _mean(after[baab & (owner == one)]) for one in sessions])
    seconds = np.array([_mean(second[known & (owner == one)]) for one in sessions])
    drift = _drift(owner, blocks[four] % width, logs.mean(axis=1))
    return Shift.of(carried / 2.0).relative, Shift.of(seconds).relative, drift.relative


def _joined(baseline: Series, candidate: Series) -> tuple[Any, ...]:
    """Rows of both arms (arm 0 is the baseline) that are times at all and whose position is known."""
    columns = []
    for code, series in enumerate((baseline, candidate)):
        good = np.isfinite(series.value) & (series.value > 0.0)
        if len(series.position) != len(series.value):
            good = np.zeros(len(series.value), dtype=bool)
        place = series.position[good] if good.any() else np.empty(0, np.int64)
        arm = np.full(int(good.sum()), code)
        columns.append((series.session[good], series.slot[good], place, np.log(series.value[good]), arm))
    return tuple(np.concatenate(pair) for pair in zip(*columns, strict=True))


def _drift(session: NDArray[np.int64], block: NDArray[np.int64], log: Floats) -> Shift:
    """Least-squares slope of a session's blocks times their number: what changed from the first to the last."""
    found = []
    for one in np.unique(session):
        here = session == one
        x, y = block[here].astype(float), log[here]
        spread = float(((x - x.mean()) ** 2).sum())
        if spread > 0.0:
            slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
            found.append(slope * float(x.max() - x.min()))
    return Shift.of(np.array(found))


def _control(suite: Suite, evidence: Evidence, cell: Cell, names: tuple[str, ...]) -> tuple[Shift, tuple[str, ...]]:
    """Candidate over baseline minus 1 of the summed control phases of each session, and the phases that were there.

    On a device its own time of a phase: the host's holds the wait for everything that was queued before.
    """
    arms = (suite.claim.baseline, suite.claim.candidate)
    totals: list[dict[int, float]] = [{}, {}]
    measured = []
    for name in names:
        device = [evidence.series(cell, f"phase_device.{name}", arm, "session") for arm in arms]
        host = [evidence.series(cell, f"phase.{name}", arm, "session") for arm in arms]
        series = device if any(len(one) for one in device) else host
        if not all(len(one) and np.all(np.isfinite(one.value)) for one in series):
            continue
        measured.append(name)
        for total, one in zip(totals, series, strict=True):
            for session, value in zip(*means_by(one.session, one.value), strict=True):
                total[int(session)] = total.get(int(session), 0.0) + float(value)
    both = [session for session in totals[0] if totals[1].get(session, 0.0) > 0.0 and totals[0][session] > 0.0]
    ratios = np.array([math.log(totals[1][session] / totals[0][session]) for session in both])
    return Shift.of(ratios).relative, tuple(measured)


def _controls_of(suite: Suite) -> tuple[str, ...]:
    """The phases that the candidate cannot touch: fewer where it changes more than who attends."""
    first, second = (_chain(suite, name) for name in (suite.claim.baseline, suite.claim.candidate))
    differ = any(_value(first, key) != _value(second, key) for key in ("page_size", "layout", *_ENGINE))
    return ALWAYS_CONTROL if differ else (*UNPAGED_CONTROL, *ALWAYS_CONTROL)


_ENGINE = tuple(f"engine.{key}" for key in ("kv_tokens", "max_batched_tokens", "max_seqs", "graph", "prefix_caching",
                                            "chunked_prefill", "watermark"))  # fmt: skip


def _value(chain: list[Variant], key: str) -> object:
    table, _, name = key.rpartition(".")
    for variant in chain:
        value = getattr(variant.engine if table else variant, name)
        if value is not None:
            return value
    return None


def _chain(suite: Suite, name: str | None) -> list[Variant]:
    found: list[Variant] = []
    seen: set[str] = set()
    while name is not None and name in suite.variants and name not in seen:
        seen.add(name)
        found.append(suite.variants[name])
        name = found[-1].extends
    return found


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan
