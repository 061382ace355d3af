"""One number a session, and over the sessions a mean with its interval.

Owns the grouping of many samples (once, in numpy) by case, variant and metric. Sessions of different runs are different
sessions; those that ended early are left out. It knows no level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbench.record import RunRecord
from kbench.stats import session_interval

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of the sessions' medians with 95 % limits by t; a limit that one session cannot give is None."""

    median: float
    low: float | None
    high: float | None
    sessions: int
    samples: int

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": self.low, "high": self.high, "sessions": self.sessions}


@dataclass(frozen=True, slots=True)
class _Group:
    medians: list[float]
    samples: int
    finite: bool


@dataclass(frozen=True, slots=True)
class Estimates:
    """All estimates of some runs; `of` groups the samples once."""

    _groups: dict[tuple[str, str, str], _Group]
    _flags: dict[tuple[str, str], tuple[str, ...]]

    @classmethod
    def of(cls, runs: Sequence[RunRecord], level: str) -> Estimates:
        groups: dict[tuple[str, str, str], _Group] = {}
        flags: dict[tuple[str, str], set[str]] = {}
        for run in runs:
            table = run.samples.select(level=level)
            table = table.where(np.isin(table.whole["session"], np.array(run.complete_sessions, dtype=np.int64)))
            if len(table) == 0:
                continue
            keys = [table.codes[name] for name in ("case", "variant", "metric")]
            session = table.whole["session"]
            order = np.lexsort(np.stack([session, *keys[::-1]]))
            sorted_keys = np.stack([*(key[order] for key in keys), session[order]])
            starts = np.flatnonzero(np.r_[True, (np.diff(sorted_keys, axis=1) != 0).any(axis=0)])
            values = table.value[order]
            for begin, part in zip(starts, np.split(values, starts[1:]), strict=True):
                case, variant, metric = (
                    table.values[name][sorted_keys[row, begin]]
                    for row, name in enumerate(("case", "variant", "metric"))
                )
                _add(groups, (case, variant, metric), part)
            seen = np.unique(np.stack([keys[0], keys[1], table.codes["flags"]]), axis=1)
            for case_code, variant_code, flag_code in seen.T:
                key = (table.values["case"][case_code], table.values["variant"][variant_code])
                text = table.values["flags"][flag_code]
                flags.setdefault(key, set()).update(text.split(",") if text else ())
        return cls(groups, {key: tuple(sorted(found)) for key, found in flags.items()})

    def get(self, case: str, variant: str, metric: str) -> Estimate | None:
        """None where nothing was measured, or where a value is not a number: such a cell has no estimate."""
        group = self._groups.get((case, variant, metric))
        if group is None or not group.finite:
            return None
        found = session_interval(group.medians)
        return Estimate(found.point, _limit(found.low), _limit(found.high), found.n, group.samples)

    def value(self, case: str, variant: str, metric: str) -> float | None:
        found = self.get(case, variant, metric)
        return None if found is None else found.median

    def spoiled(self, case: str, variant: str) -> tuple[str, ...]:
        """The metrics that hold a value that is not a finite number."""
        return tuple(sorted(key[2] for key, group in self._groups.items() if key[:2] == (case, variant) and not (
            group.finite
        )))  # fmt: skip

    def metrics(self, case: str, variant: str) -> tuple[str, ...]:
        return tuple(sorted(key[2] for key in self._groups if key[:2] == (case, variant)))

    def flags(self, case: str, variant: str) -> tuple[str, ...]:
        return self._flags.get((case, variant), ())

    def keys(self) -> set[tuple[str, str]]:
        return {key[:2] for key in self._groups}


def _add(groups: dict[tuple[str, str, str], _Group], key: tuple[str, str, str], part: Floats) -> None:
    known = groups.get(key, _Group([], 0, True))
    finite = known.finite and bool(np.isfinite(part).all())
    median = float(np.median(part)) if finite else math.nan
    groups[key] = _Group([*known.medians, median], known.samples + len(part), finite)


def _limit(value: float) -> float | None:
    return value if math.isfinite(value) else None
