"""All samples and trials of one plan hash, pooled over its runs and grouped once.

Owns which rows count (complete sessions only; sessions of different runs are different sessions) and the lookup by
cell, metric and variant. It knows no statistics. The model's name in a case is ignored: a suite has one model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbench.catalog import Case, parse_shape
from kbench.decide.results import RunCount
from kbench.decide.voids import explained, lost_sessions, void_sessions
from kbench.errors import IntegrityError, UsageError
from kbench.record import RunRecord, SampleTable

IMPOSSIBLE = "IMPOSSIBLE"
"""The flag of a value above what the device can physically do: it is not a number that anything may rest on."""
NO_SESSION = -1


@dataclass(frozen=True, slots=True)
class Cell:
    """Where something was measured, on any variant: a step or kernel point, or a trace class."""

    level: str
    op: str
    point: str
    mode: str = ""

    def __str__(self) -> str:
        if self.level == "workload":
            return f"trace class {self.point!r}"
        return f"{self.op} at {self.point}" if self.level == "kernel" else self.point


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one metric, variant and cell, sorted by session and slot (block of a window, segment of a replay)."""

    session: NDArray[np.int64]
    """Number of the session over all runs; of a segment, the number of its run."""
    slot: NDArray[np.int64]
    value: NDArray[np.float64]
    position: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Place of a window in its block; empty where nobody asks for it."""

    def __len__(self) -> int:
        return len(self.value)


@dataclass(frozen=True, slots=True)
class Ended:
    """How one trial ended; `session` is NO_SESSION outside of a complete one."""

    session: int
    variant: str
    status: str
    message: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Void:
    """One session that does not count, and why."""

    run: str
    session: int
    """Its number in its run."""
    codes: tuple[str, ...]


_EMPTY = Series(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64))
_SeriesKey = tuple[Cell, str, str, str]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that counts under one plan hash. Build it with `Evidence.of`."""

    plan_hash: str
    sessions: int
    """Complete sessions, over all runs."""
    runs: RunCount
    integrity: tuple[str, ...] = ()
    """Problems that make every verdict invalid, found by the caller (ledger, edited rule)."""
    voids: tuple[Void, ...] = ()
    """Sessions that a declared code voids, for both arms. They are left out, counted and shown."""
    lost: int = 0
    """Sessions that ended with a worker, of either arm."""
    forced: tuple[str, ...] = ()
    """Runs whose replays were asked for by name, whether or not levels 1 and 2 had passed."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Point → share of the recorded time, for clauses that weigh their cells."""
    aa_floors: Mapping[Cell, float] = field(default_factory=dict)
    """Relative half-width that this host shows between two equal variants; no cell where it was never calibrated."""
    benchmarked: frozenset[tuple[str, str]] = frozenset()
    """(operation, implementation) of declared fallbacks whose named evidence is there and measured them."""
    _series: Mapping[_SeriesKey, Series] = field(default_factory=dict, repr=False)
    _trials: Mapping[Cell, tuple[Ended, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        runs: Sequence[RunRecord],
        *,
        aborted: int = 0,
        void: int = 0,
        total: int | None = None,
        plan_hash: str | None = None,
        integrity: Iterable[str] = (),
        void_codes: Collection[str] = (),
        weights: Mapping[str, float] | None = None,
        aa_floors: Mapping[Cell, float] | None = None,
        benchmarked: Collection[tuple[str, str]] = (),
    ) -> Evidence:
        """Pool `runs`, in the order of their names. IntegrityError when they belong to different plans.

        `void_codes` are the rule's: a session in which one of them occurred counts for neither arm.
        """
        ordered = sorted(runs, key=lambda run: run.run_id)
        hashes = {str(run.header.get("plan_hash", "")) for run in ordered} | ({plan_hash} if plan_hash else set())
        if len(hashes) > 1:
            raise IntegrityError(
                f"runs of {len(hashes)} different plans: {', '.join(sorted(hashes))}",
                remedy="decide over the runs of one plan hash",
            )
        void_in = [void_sessions(run, void_codes) for run in ordered]
        numbers = _number_sessions(ordered, void_in)
        pairs = list(zip(ordered, numbers, strict=True))
        return cls(
            plan_hash=next(iter(hashes), ""),
            sessions=sum(len(known) for known in numbers),
            runs=RunCount(total=len(ordered) if total is None else total, aborted=aborted, void=void),
            integrity=tuple(integrity),
            voids=tuple(
                Void(run.run_id, session, codes)
                for run, found in zip(ordered, void_in, strict=True)
                for session, codes in found.items()
            ),
            lost=sum(lost_sessions(run.sessions, out) for run, out in zip(ordered, void_in, strict=True)),
            forced=tuple(run.run_id for run in ordered if run.header.get("forced")),
            weights={_canonical(point): weight for point, weight in (weights or {}).items()},
            aa_floors=dict(aa_floors or {}),
            benchmarked=frozenset(benchmarked),
            _series=_group(SampleTable.join(_counted(run, known, number) for number, (run, known) in enumerate(pairs))),
            _trials=_collect_trials(ordered, numbers, void_in),
        )

    def aa_floor(self, *cells: Cell) -> float:
        """The largest floor of these cells, 0 where none is known."""
        return max((self.aa_floors.get(cell, 0.0) for cell in cells), default=0.0)

    def series(self, cell: Cell, metric: str, variant: str, scope: str = "window") -> Series:
        """The samples, or an empty series where there are none."""
        return self._series.get((cell, metric, scope, variant), _EMPTY)

    def trials(self, cell: Cell, variant: str | None = None) -> tuple[Ended, ...]:
        """How the cell's trials ended in any session, complete or not, in run order."""
        found = self._trials.get(cell, ())
        return tuple(trial for trial in found if variant is None or trial.variant == variant)

    def cells(self, level: str | None = None) -> tuple[Cell, ...]:
        """Every cell that has a sample or a trial, sorted."""
        known = {key[0] for key in self._series} | set(self._trials)
        ordered = sorted(known, key=lambda cell: (cell.level, cell.op, cell.point, cell.mode))
        return tuple(cell for cell in ordered if level is None or cell.level == level)

    def metrics(self, cell: Cell, variant: str, scope: str) -> tuple[str, ...]:
        return tuple(sorted(key[1] for key in self._series if key[0] == cell and key[2:] == (scope, variant)))


def cell_of(case: str) -> tuple[Cell, str]:
    """The cell of a case id, and its attributes other than `mode` (a case that has any is a cell of its own)."""
    try:
        parsed = Case.parse(case)
    except UsageError as error:
        raise IntegrityError(f"a record of an unknown case: {case!r}", remedy="restore the run folder") from error
    attributes = dict(parsed.attributes)
    mode = attributes.pop("mode", "")
    rest = "".join(f";{name}={value}" for name, value in attributes.items())
    point = parsed.point if parsed.level == "workload" else _canonical(parsed.point)
    return Cell(parsed.level, parsed.op, point + rest, mode), rest


def _canonical(point: str) -> str:
    """`1@127` and `1*1@127` are the same point."""
    try:
        return str(parse_shape(point))
    except UsageError:
        return point


def _number_sessions(runs: Sequence[RunRecord], void: Sequence[Mapping[int, object]]) -> list[dict[int, int]]:
    """For each run, its complete sessions that are not void → their number among all runs' sessions."""
    numbers: list[dict[int, int]] = []
    following = 0
    for run, out in zip(runs, void, strict=True):
        counted = sorted(set(run.complete_sessions) - set(out))
        known = {session: following + place for place, session in enumerate(counted)}
        following += len(known)
        numbers.append(known)
    return numbers


def _counted(run: RunRecord, known: Mapping[int, int], run_number: int) -> SampleTable:
    """The rows that count, sessions renumbered.

    A replayed segment belongs to a trace rather than to a session, and is on record only with its whole replay: its
    session is the number of its run.
    """
    table = run.samples
    session = table.whole["session"]
    complete = np.array(sorted(known), dtype=np.int64)
    keep = np.isin(session, complete)
    segment = np.zeros(len(table), dtype=bool)
    if "segment" in table.values["scope"]:
        segment = table.codes["scope"] == table.values["scope"].index("segment")
        keep |= segment
    kept = table.where(keep)
    numbers = np.array([known[number] for number in complete.tolist()], dtype=np.int64)
    renumbered = np.full(len(kept), NO_SESSION, dtype=np.int64)
    if complete.size:
        place = np.minimum(np.searchsorted(complete, kept.whole["session"]), complete.size - 1)
        inside = complete[place] == kept.whole["session"]
        renumbered[inside] = numbers[place[inside]]
    renumbered[segment[keep]] = run_number
    return replace(kept, whole={**kept.whole, "session": renumbered})


def _group(table: SampleTable) -> dict[_SeriesKey, Series]:
    """One sort over all rows, then a slice for every (cell, metric, scope, variant)."""
    if len(table) == 0:
        return {}
    cells: dict[Cell, int] = {}
    modes = table.values["mode"]
    pairs = table.codes["case"].astype(np.int64) * len(modes) + table.codes["mode"]
    lookup = np.zeros(len(table.values["case"]) * len(modes), dtype=np.int64)
    for pair in np.flatnonzero(np.bincount(pairs, minlength=lookup.size)).tolist():
        case, mode = divmod(pair, len(modes))
        cell, _ = cell_of(table.values["case"][case])
        lookup[pair] = cells.setdefault(replace(cell, mode=modes[mode]) if modes[mode] else cell, len(cells))

    scope_names, slot = table.values["scope"], table.whole["block"]
    if "segment" in scope_names:
        slot = np.where(table.codes["scope"] == scope_names.index("segment"), table.whole["segment"], slot)
    value = table.value
    impossible = [code for code, text in enumerate(table.values["flags"]) if IMPOSSIBLE in text.split(",")]
    if impossible:
        value = np.where(np.isin(table.codes["flags"], impossible), np.nan, value)

    key = lookup[pairs]
    for name in ("metric", "scope", "variant"):
        key = key * len(table.values[name]) + table.codes[name]
    order = _order(key, table.whole["session"], slot, value)
    key, session, slot, value = key[order], table.whole["session"][order], slot[order], value[order]
    position = table.whole["position"][order]
    starts = np.concatenate(([0], np.flatnonzero(np.diff(key)) + 1, [key.size])).tolist()
    by_code = list(cells)
    grouped: dict[_SeriesKey, Series] = {}
    for begin, end in pairwise(starts):
        rest, variant = divmod(int(key[begin]), len(table.values["variant"]))
        rest, scope = divmod(rest, len(table.values["scope"]))
        code, metric = divmod(rest, len(table.values["metric"]))
        found = (by_code[code], table.values["metric"][metric], scope_names[scope], table.values["variant"][variant])
        grouped[found] = Series(session[begin:end], slot[begin:end], value[begin:end], position[begin:end])
    return grouped


def _order(
    key: NDArray[np.int64], session: NDArray[np.int64], slot: NDArray[np.int64], value: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Rows by key, session, slot and value: by value too, so that no result depends on how rows were written."""
    whole, digits = key, 1
    for column in (session, slot):
        low, width = int(column.min()), int(column.max()) - int(column.min()) + 1
        whole, digits = whole * width + (column - low), digits * width
    if (int(key.max()) + 1) * digits < 2**62:
        return np.lexsort((value, whole))
    return np.lexsort((value, slot, session, key))


def _collect_trials(
    runs: Sequence[RunRecord], numbers: Sequence[Mapping[int, int]], void: Sequence[Mapping[int, tuple[str, ...]]]
) -> dict[Cell, tuple[Ended, ...]]:
    """Trials by cell. A void session excuses what its code explains, and nothing else: wrong stays wrong."""
    found: dict[Cell, list[Ended]] = {}
    for run, known, out in zip(runs, numbers, void, strict=True):
        for trial in run.trials:
            if not trial.case:  # a worker was lost before its first case: nobody's evidence
                continue
            cell, _ = cell_of(trial.case)
            in_session = cell.level not in ("workload", "timeline") and trial.session in out
            if in_session and explained(trial.message, trial.facts, out[trial.session]):
                continue
            number = known.get(trial.session, NO_SESSION)
            found.setdefault(cell, []).append(Ended(number, trial.variant, trial.status, trial.message, trial.facts))
    return {cell: tuple(trials) for cell, trials in found.items()}
