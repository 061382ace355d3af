"""The batches that a recorded workload had: the steps of a run, or a histogram of them.

Owns the three forms: `steps.parquet` of a run (or the run's folder), `run.json` with the histogram that each replay
leaves among its facts, and a JSON list of `{point, calls, time_us}`. `#VARIANT` behind a file names whose steps count;
without it they are those of the suite's baseline: a candidate must not choose what it is judged by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbench.catalog import Group, Point, parse_point
from kbench.errors import UsageError
from kbench.suite.shape_files import read_text
from kbench.suite.shapes import Recorded, Row, merged
from kbench.traces.shapes import histogram

STEPS = (
    "duration_us",
    "decode_seqs",
    "decode_context_tokens",
    "prefill_seqs",
    "prefill_tokens",
    "prefill_context_tokens",
)
LABELS = ("variant", "mode", "trace")
MODES = ("exec", "virtual")
"""Real replays count before modelled ones."""


def path_of(reference: str) -> str:
    """The file of `FILE#VARIANT`, a run's folder standing for its steps."""
    return reference.partition("#")[0]


def file_of(reference: str, root: Path) -> Path:
    """The very file that is read."""
    path = root / path_of(reference)
    return path / "steps.parquet" if path.is_dir() else path


def read(reference: str, baseline: str, root: Path) -> Recorded:
    """Raises UsageError where the file is none of the three forms or has nothing of the variant."""
    path, asked = file_of(reference, root), reference.partition("#")[2]
    if path.suffix == ".parquet":
        return _steps(path, asked, baseline)
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError("neither JSON nor Parquet", where=str(path), remedy="name steps.parquet of a run") from error
    if isinstance(data, dict) and isinstance(data.get("trials"), list):
        return _run(path, data["trials"], asked, baseline)
    listed = data.get("shapes") if isinstance(data, dict) else data
    return _recorded(_rows(path, listed), path.name, str(path))


def _steps(path: Path, asked: str, baseline: str) -> Recorded:
    columns = step_columns(path)
    variant = _variant(set(columns["variant"]), asked, baseline, str(path))
    modes = {mode for mode, own in zip(columns["mode"], columns["variant"], strict=True) if own == variant}
    mode = next((name for name in MODES if name in modes), "")
    keep = [
        place
        for place, (own, how) in enumerate(zip(columns["variant"], columns["mode"], strict=True))
        if own == variant and how == mode
    ]
    steps = {name: [columns[name][place] for place in keep] for name in STEPS}
    traces = ", ".join(sorted({columns["trace"][place] for place in keep}))
    return _recorded(_rows(path, histogram(steps)), f"{path.name}, {mode} replay of {traces} by {variant}", str(path))


def step_points(path: Path, asked: str) -> list[Point]:
    """The batch of every step of one variant's replays, in the order of the file: trace by trace, in time."""
    columns = step_columns(path)
    variant = _variant(set(columns["variant"]), asked, "", str(path))
    keep = [place for place, own in enumerate(columns["variant"]) if own == variant]
    return points_of({name: [columns[name][place] for place in keep] for name in STEPS})


def points_of(steps: Mapping[str, Sequence[float]]) -> list[Point]:
    """The batch of every step, sequences of a kind at their mean; `steps` has at least the columns `STEPS`."""
    points = []
    for decodes, held, chunks, asked, reached in zip(*(steps[name] for name in STEPS[1:]), strict=True):
        groups = []
        if decodes:
            groups.append(Group(int(decodes), 1, max(1, round(held / decodes))))
        if chunks:
            query = max(2, round(asked / chunks))
            groups.append(Group(int(chunks), query, max(query, round(reached / chunks))))
        if groups:
            points.append(Point(tuple(groups)))
    return points


def step_columns(path: Path) -> dict[str, list[Any]]:
    """The columns of `steps.parquet` that shapes are made of, in the order of the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=[*LABELS, *STEPS])
    except FileNotFoundError as error:
        raise UsageError("no such file", where=str(path), remedy="name steps.parquet of a run") from error
    except (pa.ArrowException, OSError, KeyError) as error:
        what = f"not the steps of a run: {str(error).splitlines()[0][:120]}"
        raise UsageError(what, where=str(path), remedy="kbench workload writes steps.parquet") from error
    missing = [name for name in (*LABELS, *STEPS) if name not in table.schema.names]
    if missing:
        raise UsageError(
            f"not the steps of a run: no column {', '.join(missing)}", where=str(path), remedy="name steps.parquet"
        )
    return {name: table.column(name).to_pylist() for name in (*LABELS, *STEPS)}


def _run(path: Path, trials: Sequence[Any], asked: str, baseline: str) -> Recorded:
    """The histograms in the facts of a run's replays."""
    found = [
        trial
        for trial in trials
        if isinstance(trial, Mapping) and isinstance((trial.get("facts") or {}).get("shapes"), list)
    ]
    if not found:
        raise UsageError("the run recorded no shapes", where=str(path), remedy="name one that measured level 3")
    variant = _variant({str(trial.get("variant")) for trial in found}, asked, baseline, str(path))
    own = [trial for trial in found if trial.get("variant") == variant]
    real = [trial for trial in own if "mode=exec" in str(trial.get("case"))]
    rows = [row for trial in real or own for row in _rows(path, trial["facts"]["shapes"])]
    return _recorded(merged(rows), f"{path.name}, replays by {variant}", str(path))


def _variant(known: set[str], asked: str, baseline: str, where: str) -> str:
    if asked in known:
        return asked
    if not asked and baseline in known:
        return baseline
    if not asked and len(known) == 1:
        return next(iter(known))
    names = ", ".join(sorted(known)) or "nobody"
    what = f"no steps of {asked!r}" if asked else f"steps of {names}, none of them the baseline {baseline!r}"
    raise UsageError(what, where=where, remedy=f"write FILE#VARIANT with one of {names}")


def _rows(path: Path, listed: Any) -> tuple[Row, ...]:
    rows: list[Row] = []
    for place, item in enumerate(listed if isinstance(listed, list) else [None]):
        calls, time_us = (item.get(key) if isinstance(item, Mapping) else None for key in ("calls", "time_us"))
        whole = all(
            isinstance(value, int | float) and math.isfinite(value) and value >= 0.0 for value in (calls, time_us)
        )
        if not whole or not isinstance(item, Mapping):
            raise UsageError(
                f"row {place} is no {{point, calls, time_us}}", where=str(path), remedy="name steps.parquet of a run"
            )
        rows.append(Row(str(parse_point(str(item.get("point")))), float(calls or 0.0), float(time_us or 0.0)))
    return merged(rows)


def _recorded(rows: tuple[Row, ...], source: str, where: str) -> Recorded:
    if sum(row.time_us for row in rows) <= 0.0:
        raise UsageError("no step took any time", where=where, remedy="name a run that replayed a workload")
    return Recorded(tuple(sorted(rows, key=lambda row: -row.time_us)), source, steps=True, timed=True)
