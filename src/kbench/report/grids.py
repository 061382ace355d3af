"""Documents and decisions as rows of text, once for the terminal and for Markdown.

Owns what a reader sees of each level: columns, units, counts. It knows no medium: cells are cleaned text, not escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kbench.report.text import MISSING, clean, count, duration, interval_duration, joined, number, percent
from kbench.selection import selections_of

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """A titled table of text. The first `labels` columns name the row, the others hold its values."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1
    notes: tuple[str, ...] = ()


def kernel_grid(view: Row) -> Grid:
    rows = []
    for case in view["cases"]:
        latency, correct = case["latency_us"], case["correctness"]
        error = MISSING
        if correct is not None:
            error = f"{number(correct.get('rel_l2'))} of {number(correct.get('limit'))}"
        rows.append(
            (
                clean(f"{case['op']} {case['point']}"),
                clean(case["variant"]),
                clean(case["status"]),
                duration(latency["median"]),
                interval_duration(latency["low"], latency["high"]),
                _n(latency["sessions"], case["samples"]),
                duration((case.get("roofline") or {}).get("floor_us")),
                error,
                joined(clean(flag) for flag in case["flags"]),
            )
        )
    columns = ("case", "variant", "status", "latency", "95 %", "n", "roofline", "error of limit", "flags")
    notes = (
        "latency: mean over sessions of the session's median; 95 %: t over sessions; roofline: time at the measured "
        "ceilings; error: relative L2 against the float64 oracle, worst row",
        *(
            f"{clean(case['op'])} {clean(case['point'])}, {clean(case['variant'])}: {clean(case['message'])}"
            for case in view["cases"]
            if case["message"]
        ),
    )
    return _without_empty(Grid("Kernel", columns, tuple(rows), labels=2, notes=notes))


def comparison_grid(view: Row) -> Grid:
    rows = []
    for item in view["comparisons"]:
        ratio = item["ratio"] or {}
        low, high = ratio.get("low"), ratio.get("high")
        limits = "no interval" if low is None or high is None else f"{number(low)} to {number(high)}"
        rows.append((clean(item["case"]), number(ratio.get("point")), limits, clean(item["verdict"])))
    note = "ratio: time of the candidate over time of the baseline; below 1 the candidate is faster"
    return Grid("Kernel, candidate against baseline", ("case", "ratio", "95 %", "verdict"), tuple(rows), notes=(note,))


def step_grid(view: Row) -> Grid:
    rows = [
        (
            clean(case["point"]),
            clean(case["variant"]),
            _status(case),
            duration(case["wall_us"]),
            interval_duration(case["wall_low_us"], case["wall_high_us"]),
            _n(case["sessions"], case["samples"]),
            duration(case["device_us"]),
            percent(case["closure"]),
        )
        for case in view["cases"]
    ]
    columns = ("point", "variant", "status", "step", "95 %", "n", "device", "closure")
    notes = ("step: wall time of the clean pass; closure: sum of the phased pass's phases over its wall time",)
    return _without_empty(Grid("Step", columns, tuple(rows), labels=2, notes=notes))


def selection_grid(view: Row) -> Grid:
    """What ran in a step, beside what was asked for."""
    rows = tuple(
        (
            clean(case["point"]),
            clean(case["variant"]),
            _selection(case["selection"]),
            number(case["launches"]),
            percent(case["perturbation"], signed=True),
            joined(clean(flag) for flag in case["flags"]),
        )
        for case in view["cases"]
    )
    columns = ("point", "variant", "attention ran", "launches", "phased pass slower by", "flags")
    return _without_empty(Grid("Step, what ran", columns, rows, labels=2))


def phase_grid(view: Row) -> Grid:
    """Where a step's time goes, phase by phase."""
    cases = [case for case in view["cases"] if case["phases"]]
    names = dict.fromkeys(name for case in cases for name in case["phases"])
    rows = tuple(
        (
            clean(case["point"]),
            clean(case["variant"]),
            *(duration(case["phases"].get(name)) for name in names),
            count(case["sessions"], "session"),
        )
        for case in cases
    )
    return Grid("Step, by phase", ("point", "variant", *(clean(name) for name in names), "n"), rows, labels=2)


def waterfall_grids(view: Row) -> list[Grid]:
    """One table a point: what each term adds to the baseline's step, down to the candidate's."""
    grids = []
    for fall in view["waterfalls"]:
        rows = [("baseline step", duration(fall["baseline_us"]), "clean pass")]
        rows += [(clean(term["name"]), _signed(term["delta_us"]), clean(term["source"])) for term in fall["terms"]]
        rows += [
            ("residual", _signed(fall["residual_us"]), "what no term explains"),
            ("candidate step", duration(fall["candidate_us"]), "clean pass"),
        ]
        notes = (
            f"saved {duration(fall['saved_us'])} ({percent(fall['saving'])} of the step); "
            f"Amdahl's bound {duration(fall['bound_us'])} ({percent(fall['bound_saving'])}): "
            f"attention is f = {percent(fall['attention_share'])} of the step, "
            f"level 1 saves s = {percent(fall['attention_saving'])} of it",
        )
        title = f"Waterfall {clean(fall.get('point') or fall.get('case') or '')}".strip()
        grids.append(Grid(title, ("term", "time", "from"), tuple(rows), notes=notes))
    return grids


def workload_grid(view: Row) -> Grid:
    """One row a metric, the variants beside each other."""
    variants = view["variants"]
    names = {
        (regime, metric): None
        for found in variants.values()
        for regime, metrics in found["regimes"].items()
        for metric in metrics
    }
    rows = tuple(
        (
            clean(regime),
            clean(metric),
            *(_metric(metric, found["regimes"].get(regime, {}).get(metric)) for found in variants.values()),
        )
        for regime, metric in names
    )
    notes = [f"timing is {view['timing']}; mode {view['mode']}"]
    notes += [
        f"{clean(variant)}: {count(found['scheduled'], 'scheduled request')}" for variant, found in variants.items()
    ]
    title = "Workload " + ("(modelled)" if view["timing"] == "modeled" else "(measured)")
    columns = ("regime", "metric", *(clean(variant) for variant in variants))
    return Grid(title, columns, rows, labels=2, notes=tuple(notes))


def request_grid(view: Row) -> Grid:
    """The class in which every scheduled request ended."""
    names = next((tuple(found["classes"]) for found in view["variants"].values()), ())
    rows = tuple(
        (clean(variant), number(found["scheduled"]), *(number(found["classes"][name]) for name in names))
        for variant, found in view["variants"].items()
    )
    return Grid("Requests", ("variant", "scheduled", *names), rows)


def replay_grid(view: Row) -> Grid:
    """Every replay by itself: what was modelled, and how far outside of what was measured."""
    rows = []
    for variant, found in view["variants"].items():
        for trace, modes in found["traces"].items():
            for mode, facts in modes.items():
                rows.append(
                    (
                        clean(trace),
                        clean(variant),
                        clean(mode),
                        _status(facts),
                        number(facts.get("scheduled")),
                        percent(facts.get("extrapolated_fraction")),
                        number(facts.get("autocorrelation")),
                    )
                )
    columns = ("trace class", "variant", "mode", "status", "requests", "extrapolated steps", "lag-1 autocorrelation")
    return Grid("Replays", columns, tuple(rows), labels=3)


def calibration_grid(view: Row) -> Grid:
    rows = tuple(
        (
            clean(item["trace"]),
            clean(item["variant"]),
            percent(item.get("bias"), signed=True),
            percent(item.get("half_width")),
            percent(item.get("exec_attainment")),
            number(item.get("requests")),
            "yes" if item.get("usable") else "no",
        )
        for item in view["calibrations"]
    )
    columns = ("trace class", "variant", "bias", "± 95 %", "attainment measured", "requests", "usable")
    return Grid("Calibration, modelled against measured", columns, rows, labels=2)


def timeline_grid(document: Row) -> Grid:
    step_us = document.get("step_us") or 0.0
    rows = [
        (clean(name), duration(item["us"]), percent(item["share"]))
        for name, item in sorted(document["classes"].items(), key=lambda pair: -pair[1]["us"])
        if item["us"] > 0
    ]
    rows += [
        (f"gap: {clean(cause).replace('_', ' ')}", duration(us), percent(us / step_us if step_us else None))
        for cause, us in sorted(document["gaps"].items(), key=lambda pair: -pair[1])
        if us > 0
    ]
    notes = [
        f"step {duration(document.get('step_us'))}, n = {count(int(document.get('steps') or 0), 'step')}, "
        f"{clean(document.get('centre') or 'their mean')}; "
        f"closure {percent(document.get('closure'))} of wall time known by name, "
        f"{percent(document.get('named_share'))} of the work's; "
        f"limit: {clean(document.get('limit') or 'unknown')}"
    ]
    if document.get("largest_saving_us") is not None:
        notes.append(
            f"largest saving {duration(document['largest_saving_us'])} a step: "
            f"a {percent(document['expected_saving'])} "
            f"saving of {clean(document.get('saved_class') or 'attention')} time, if it all is on the critical path"
        )
    if document.get("limit_basis"):
        notes.append(f"limit: {clean(document['limit_basis'])}")
    notes += [clean(warning) for warning in document.get("warnings", ())]
    return Grid("Timeline", ("class", "time a step", "share"), tuple(rows), notes=tuple(notes))


def timeline_points_grid(document: Row) -> Grid:
    """One row a point; a trace that failed has one, too."""
    saved = document.get("saved_class") or "attention"
    rows = [
        (
            clean(item["point"]) or "(unnamed)",
            duration(item["step_us"]),
            count(int(item["steps"]), "step"),
            percent(item["classes"].get(saved, {}).get("share")),
            clean(item["limit"]),
            duration(item.get("largest_saving_us")),
            percent(item["closure"]),
        )
        for item in document.get("points", ())
    ]
    rows += [(clean(item["case"]), _status(item), *(MISSING,) * 5) for item in document.get("failures", ())]
    columns = ("point", "step", "n", clean(saved), "limit", "largest saving", "closure")
    return Grid("Timeline, by point", columns, tuple(rows))


def plan_grid(document: Row) -> Grid:
    """What would run; `document` is that of `kbench plan --json`."""
    have = document.get("sessions", {})
    rows = [("cases", number(len(document["cases"])))]
    rows += [("case", clean(case)) for case in document["cases"]]
    rows += [(f"arm {clean(name)}", clean(identity)[:16]) for name, identity in document["arms"].items()]
    rows += [
        ("looks at", joined(number(look) for look in document["looks"]) + " sessions"),
        ("on record", joined(f"{clean(level)} {count(int(n), 'session')}" for level, n in have.items())),
        ("takes about", duration(1e6 * document["estimated_s"])),
    ]
    rows += [
        (f"smallest visible saving at a session sd of {clean(sd)}", percent(saving))
        for sd, saving in document.get("smallest_visible_saving", {}).items()
    ]
    if document.get("family_error") is not None:
        rows.append(("wrong enables over all regimes, simulated", percent(document["family_error"])))
    rows += [("threshold and sight", clean(sight["sentence"])) for sight in document.get("sees", ())]
    if document.get("power_reached") is not None:
        rows.append(
            ("rule.power", "reached" if document["power_reached"] else "not reached: more looks, or less noise")
        )
    notes = (f"plan hash {clean(document['plan_hash'])}",)
    return Grid(f"Plan: {clean(document['suite'])}", ("what", "value"), tuple(rows), notes=notes)


# ------------------------------------------------------------------------------------------------


def _without_empty(grid: Grid) -> Grid:
    """Leave out columns in which no row has anything."""
    kept = [
        index
        for index in range(len(grid.columns))
        if index < grid.labels or any(row[index] != MISSING for row in grid.rows)
    ]
    rows = tuple(tuple(row[index] for index in kept) for row in grid.rows)
    return replace(grid, columns=tuple(grid.columns[index] for index in kept), rows=rows)


def _status(item: Row) -> str:
    message = clean(item.get("message") or "")
    return clean(item["status"]) + (f": {message}" if message else "")


def _n(sessions: int, samples: int) -> str:
    return f"{count(sessions, 'session')}, {count(samples, 'window')}" if sessions else "0 sessions"


def _selection(selection: Any) -> str:
    """`decode blocked (asked for sdpa)`: what ran, and what was asked for where that differs."""
    parts = []
    for phase, record in selections_of({"selection": selection}):
        ran = record.get("observed") or record.get("resolved")
        asked = record.get("requested")
        told = f"{clean(phase)} {clean(ran)}".strip()
        parts.append(told + (f" (asked for {clean(asked)})" if asked not in (ran, None) else ""))
    return joined(parts)


def _signed(value_us: float | None) -> str:
    text = duration(value_us)
    return f"+{text}" if value_us is not None and value_us > 0 else text


def _metric(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return MISSING if value is None else clean(value)
    if name in ("goodput", "hit_ratio", "attainment") or name.endswith(("_ratio", "_share", "_fraction", "_tax")):
        return percent(value)
    if name.endswith("_us") or name.startswith(("ttft", "tpot", "itl", "e2e", "queue")):
        return duration(value)
    return number(value)
