"""Who serves which query and every reason why not; and what was asked for, resolved and seen wherever it was measured.

Owns the document of `kbench backends` and its grids, and the grid of selections in every report. It resolves as a run
does (`suite.demands`) and loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kbench.catalog import Implementation
from kbench.decide.evidence import cell_of
from kbench.errors import UsageError
from kbench.record import RunRecord
from kbench.report.grids import Grid
from kbench.report.text import MISSING, clean, joined
from kbench.selection import SelectionRecord, absent, check_all, selections_of
from kbench.suite.choices import choice_of, registry_of
from kbench.suite.demands import Demand, served
from kbench.suite.schema import Arm

Document = dict[str, Any]
Row = Mapping[str, Any]


def matrix(arms: Sequence[tuple[Arm, Sequence[Demand]]], device: str, capability: tuple[int, int] | None) -> Document:
    """`kbench backends --json`: a row for each variant, operation and role, with every implementation of it."""
    return {
        "device": device,
        "capability": None if capability is None else ".".join(map(str, capability)),
        "queries": [_query(arm, demand) for arm, demands in arms for demand in demands],
    }


def _query(arm: Arm, demand: Demand) -> Document:
    choice = choice_of(arm, demand.op, demand.role)
    try:
        record, refusal = served(arm, demand), ""
    except UsageError as error:
        record, refusal = None, str(error)
    chain = [] if choice is None else [name for name, _ in choice.chain]
    return {
        "variant": arm.name,
        "op": demand.op,
        "role": demand.role,
        "layers": record.layers if record is not None else "",
        "level": demand.level,
        "requested": "" if choice is None else choice.requested,
        "policy": arm.policy,
        "fallback": chain,
        "resolved": "" if record is None else record.resolved,
        "refusal": refusal,
        "candidates": [_candidate(found, demand) for found in registry_of(arm).of(demand.op)],
    }


def _candidate(found: Implementation, demand: Demand) -> Document:
    missing = absent(found)
    each = [[*missing, *check_all(found, queries)] for queries in demand.alternatives]
    reasons = dict.fromkeys(reason for reasons in each for reason in reasons)
    return {
        "name": found.name,
        "summary": found.summary,
        "priority": found.priority,
        "serves": sum(not reasons for reasons in each),
        "of": len(each),
        "reasons": [{"field": one.field, "want": one.want, "have": one.have} for one in reasons],
    }


def matrix_grids(document: Row) -> list[Grid]:
    """One table an operation and role: a row for each implementation, a column for each variant and level that asks."""
    grids = []
    queries = document["queries"]
    for op, role in dict.fromkeys((query["op"], query["role"]) for query in queries):
        own = _apart([query for query in queries if (query["op"], query["role"]) == (op, role)])
        names = dict.fromkeys(one["name"] for query in own for one in query["candidates"])
        names |= dict.fromkeys(query["requested"] for query in own if query["requested"] != "auto")
        ordered = sorted(names, key=lambda name: (-max(_standing(name, query) for query in own), -_priority(name, own)))
        rows = tuple((clean(name), *(_mark(name, query) for query in own), _why_not(name, own)) for name in ordered)
        place = f"on {document['device']}" + (f" {document['capability']}" if document["capability"] else "")
        title = f"{op}{'' if role == 'target' else ', ' + role} {place}"
        notes = tuple(clean(f"{_who(query, own)}: {query['refusal']}") for query in own if query["refusal"])
        columns = ("backend", *(_who(query, own) for query in own), "why not")
        grids.append(Grid(clean(title), tuple(clean(name) for name in columns), rows, notes=notes))
    return grids


def _apart(queries: Sequence[Row]) -> list[Row]:
    """Without the kernel level's question of a variant where it has the same answers as its engine's."""

    def answers(query: Row) -> object:
        return query["variant"], query["resolved"], [(one["name"], one["reasons"]) for one in query["candidates"]]

    kept: list[Row] = []
    for query in queries:
        if not any(answers(query) == answers(other) for other in kept):
            kept.append(query)
    return kept


def _who(query: Row, queries: Sequence[Row]) -> str:
    """The variant; and the level, where two levels ask apart: a step wants what its engine needs, a kernel case not."""
    twice = len({one["level"] for one in queries}) > 1
    return str(query["variant"]) + (f" {query['level']}" if twice else "")


def _of(name: str, query: Row) -> Row | None:
    return next((one for one in query["candidates"] if one["name"] == name), None)


def _standing(name: str, query: Row) -> int:
    """3 resolved, 2 wanted, 1 able, 0 not."""
    if name == query["resolved"]:
        return 3
    if name == query["requested"] or name in query["fallback"]:
        return 2
    one = _of(name, query)
    return 1 if one is None or one["serves"] else 0


def _priority(name: str, queries: Sequence[Row]) -> int:
    return max((one["priority"] for query in queries if (one := _of(name, query)) is not None), default=0)


def _mark(name: str, query: Row) -> str:
    marks = ["RESOLVED"] if name == query["resolved"] else []
    if name == query["requested"] and name != query["resolved"]:
        marks.append("requested")
    if name in query["fallback"]:
        marks.append(f"fallback {query['fallback'].index(name) + 1}")
    one = _of(name, query)
    if one is not None and name != query["resolved"]:
        able = "serves" if one["serves"] == one["of"] else f"serves {one['serves']} of {one['of']} cases"
        marks.append(able if one["serves"] else "no")
    return joined(marks)


def _why_not(name: str, queries: Sequence[Row]) -> str:
    """Every reason, with the columns that it speaks of where it does not speak of all."""
    by_reason: dict[str, list[str]] = {}
    for query in queries:
        for reason in (_of(name, query) or {"reasons": ()})["reasons"]:
            text = f"{reason['field']}: wants {reason['want']}, has {reason['have']}"
            by_reason.setdefault(text, []).append(_who(query, queries))
    told = [text if len(who) == len(queries) else f"{text} ({', '.join(who)})" for text, who in by_reason.items()]
    if all(_of(name, query) is None for query in queries):
        told.append("code of the suite: its limits are known when it is loaded")
    return "; ".join(clean(text) for text in told) or MISSING


# ---------------------------------------------------------------------------------------------- what was measured


def selections(runs: Sequence[RunRecord]) -> list[Document]:
    """Every distinct selection of the runs' trials, with the number of cases it served; observations are joined in."""
    found: dict[tuple[str, ...], Document] = {}
    seen: dict[tuple[str, str, str], SelectionRecord] = {}
    for variant, case, record in _records(runs):
        key = (variant, case, record.op)
        before = seen.get(key)
        if before is None or (record.resolved and not before.drift and (record.observed or record.drift)):
            seen[key] = record
    for (variant, case, _), record in seen.items():
        data = record.to_json()
        own = tuple(str(value) for value in (variant, record.role, case.partition("/")[0], *data.values()))
        row = found.setdefault(own, {"variant": variant, **data, "drift": record.drift, "cases": 0})
        row["cases"] += 1
    return sorted(found.values(), key=lambda row: (row["variant"], row["op"], row["role"], row["resolved"]))


def _records(runs: Sequence[RunRecord]) -> Iterator[tuple[str, str, SelectionRecord]]:
    for run in runs:
        for trial in run.trials:
            if not trial.case:
                continue
            for role, data in selections_of(trial.facts):
                op = str(data.get("op") or (f"attention.{role}" if role else cell_of(trial.case)[0].op))
                yield trial.variant, trial.case, SelectionRecord.from_json({**data, "op": op})


def selection_summary_grid(rows: Sequence[Row]) -> Grid:
    """What was asked for, resolved and observed, variant by variant."""
    told = tuple(
        (
            clean(row["variant"]),
            clean(row["op"] + ("" if row["role"] == "target" else f" ({row['role']})")),
            clean(row["requested"]),
            clean(row["resolved"]) or MISSING,
            clean(row["observed"]) or "not seen",
            clean(row["policy"]),
            _why(row),
            "DRIFT" if row["drift"] else "none",
            str(row["cases"]),
        )
        for row in rows
    )
    columns = ("variant", "operation", "requested", "resolved", "observed", "policy", "why", "drift", "cases")
    note = (
        "observed: by names that were seen in a trace; not seen: nothing was traced, no case needed it, or no name "
        "tells it from others"
    )
    return Grid("Backends, asked for and seen", columns, told, labels=2, notes=(note,))


def _why(row: Row) -> str:
    parts = [
        f"{one['name']}: " + "; ".join(f"{r['field']}: wants {r['want']}, has {r['have']}" for r in one["reasons"])
        for one in row["candidates"]
        if one["reasons"]
    ]
    parts += [f"{m['field']} changed from {m['before']} to {m['after']}" for m in row["mutations"]]
    if row["source"]:
        parts.append(f"registered: {row['source']}")
    return joined(clean(part) for part in parts)
