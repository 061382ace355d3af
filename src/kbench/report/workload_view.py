"""The JSON document of level 3.

Owns how replays of several trace classes become the metrics of a regime, and the classes in which every scheduled
request ends. Ratios are weighted by scheduled requests and counts are added; a percentile of two traces together
cannot be had from their percentiles, so it is null there (`traces` has them apart).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kbench.catalog import Case
from kbench.record import RunRecord, Trial
from kbench.report.documents import Document, finite, trials_of
from kbench.suite.schema import Suite

REQUEST_CLASSES = ("not_sent", "good", "late", "failed", "cancelled", "rejected", "unfinished")
_ADDED = frozenset({"recomputed_tokens", "preemptions"})
_PERCENTILES = ("_p50", "_p90", "_p95", "_p99")

_Replays = dict[tuple[str, str, str], Trial]
"""(variant, trace class, mode) → the newest replay."""


def workload_view(suite: Suite | None, runs: Sequence[RunRecord]) -> Document:
    """`kbench workload --json`. `regimes` are the suite's; without a suite, each trace class is one."""
    replays, calibrations = _replays(runs), []
    for trial in trials_of(runs, "workload/calibrate/"):
        calibrations.append(
            {"trace": Case.parse(trial.case).point, "variant": trial.variant, "status": trial.status,
             "message": trial.message, **finite(trial.facts)}
        )  # fmt: skip
    mode = _mode(replays, suite)
    traces = list(dict.fromkeys(trace for _, trace, _ in replays))
    regimes: dict[str, tuple[str, ...]] = {trace: (trace,) for trace in traces}
    if suite is not None and any(regime.trace_class for regime in suite.regime):
        regimes = {regime.id: tuple(regime.trace_class) for regime in suite.regime if regime.trace_class}
    variants = {
        variant: _variant(variant, mode, regimes, replays)
        for variant in dict.fromkeys(variant for variant, _, _ in replays)
    }
    return {
        "variants": variants,
        "mode": mode,
        "timing": "modeled" if mode == "virtual" else "measured",
        "calibrations": calibrations,
        "output_divergence": _divergence(runs),
    }


def _variant(variant: str, mode: str, regimes: dict[str, tuple[str, ...]], replays: _Replays) -> Document:
    mine = {trace: trial for (who, trace, how), trial in replays.items() if who == variant and how == mode}
    return {
        "regimes": {
            name: _metrics([mine[trace] for trace in classes])
            for name, classes in regimes.items()
            if all(trace in mine for trace in classes)
        },
        "classes": {
            name: sum(int(trial.facts.get("classes", {}).get(name, 0)) for trial in mine.values())
            for name in REQUEST_CLASSES
        },
        "scheduled": sum(int(trial.facts.get("scheduled", 0)) for trial in mine.values()),
        "traces": {
            trace: {
                how: {"status": trial.status, "message": trial.message, **finite(trial.facts)}
                for (who, other, how), trial in replays.items()
                if who == variant and other == trace
            }
            for trace in dict.fromkeys(trace for who, trace, _ in replays if who == variant)
        },
    }


def _metrics(trials: Sequence[Trial]) -> Document:
    summaries = [trial.facts.get("summary", {}) for trial in trials]
    if len(summaries) == 1:
        return dict(finite(summaries[0]))
    weights = [max(int(trial.facts.get("scheduled", 0)), 0) for trial in trials]
    return {
        name: _combined(name, [summary.get(name) for summary in summaries], weights)
        for name in dict.fromkeys(name for summary in summaries for name in summary)
    }


def _combined(name: str, values: Sequence[Any], weights: Sequence[int]) -> float | None:
    known = [value for value in values if isinstance(value, int | float) and np.isfinite(value)]
    if len(known) != len(values) or name.endswith(_PERCENTILES) or sum(weights) == 0:
        return None
    if name in _ADDED:
        return float(sum(known))
    return float(sum(value * weight for value, weight in zip(known, weights, strict=True)) / sum(weights))


def _mode(replays: _Replays, suite: Suite | None) -> str:
    """The suite's mode where it was replayed, else whichever was."""
    modes = sorted({mode for _, _, mode in replays}, reverse=True)
    wanted = suite.workload.mode if suite is not None and suite.workload is not None else "virtual"
    return wanted if wanted in modes or not modes else modes[0]


def _replays(runs: Sequence[RunRecord]) -> _Replays:
    found: _Replays = {}
    for trial in trials_of(runs, "workload/replay/"):
        case = Case.parse(trial.case)
        mode = dict(case.attributes).get("mode") or str(trial.facts.get("mode", "virtual"))
        found[(trial.variant, case.point, mode)] = trial
    return found


def _divergence(runs: Sequence[RunRecord]) -> Document:
    """Trace class → variant → mean share of an output that differs, and how many requests were compared.

    The baseline's own is the floor: it against its second replay.
    """
    found: Document = {}
    for run in runs:
        table = run.samples.select(level="workload", metric="output_divergence")
        for case in table.distinct("case") if len(table) else ():
            for variant in table.select(case=case).distinct("variant"):
                values = table.select(case=case, variant=variant).value
                mean = float(values.mean()) if len(values) and bool(np.isfinite(values).all()) else None
                found.setdefault(Case.parse(case).point, {})[variant] = {"mean": mean, "requests": len(values)}
    return found
