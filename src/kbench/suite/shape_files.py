"""A list of shapes of one's own, as CSV or TOML: point, axes, weight.

    point,axes,weight                 [[shape]]
    32*1@4096,window=128,40           point = "32q1s4k"
    ,"m=4000,n=4000,k=4000",1         axes = { m = 4000, n = 4000, k = 4000 }
                                      weight = 3

In CSV an axis may also be a column of its own (`m,n,k,weight`). `weight` is how often the shape is called, relative to
the others; 1 where it is left out.
"""

from __future__ import annotations

import csv
import io
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kbench.catalog import OPS, parse_shape
from kbench.errors import UsageError
from kbench.suite.shapes import Recorded, Row, merged

COLUMNS = ("point", "axes", "weight")
_AXES = frozenset(name for op in OPS.values() for name in op.axes)


def read(path: Path) -> Recorded:
    """Raises UsageError with file and row where something is no shape."""
    text = read_text(path)
    if path.suffix == ".csv":
        records = _csv(path, text)
    elif path.suffix == ".toml":
        records = _toml(path, text)
    else:
        raise UsageError("shapes are read from .csv and .toml files", where=str(path), remedy="see docs/kernel.md")
    rows = merged(_row(where, record) for where, record in records)
    if not rows:
        raise UsageError("the file has no shape", where=str(path), remedy="add a row with a point or axes")
    return Recorded(rows, path.name, steps=False, timed=False)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UsageError("no such file", where=str(path), remedy="paths in a suite are relative to it") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(f"cannot be read: {reason}", where=str(path), remedy="name a text file") from error


def _csv(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    try:
        for record in reader:
            place = f"{path}:{reader.line_num}"
            if None in record:
                raise UsageError("more values than columns", where=place, remedy="quote axes that hold commas")
            yield place, {(name or "").strip(): (value or "").strip() for name, value in record.items()}
    except csv.Error as error:
        raise UsageError(f"not CSV: {error}", where=str(path), remedy="correct the file") from error


def _toml(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"not TOML: {error}", where=str(path), remedy="correct the file") from error
    listed = data.get("shape")
    if set(data) != {"shape"} or not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise UsageError("not a list of [[shape]] tables", where=str(path), remedy='write [[shape]] and point = "…"')
    for place, item in enumerate(listed):
        yield f"{path}: shape[{place}]", item


def _row(where: str, record: Mapping[str, Any]) -> Row:
    axes = record.get("axes") or {}
    parts = [str(record.get("point") or "")]
    parts += [f"{name}={value}" for name, value in axes.items()] if isinstance(axes, Mapping) else [str(axes)]
    for name, value in record.items():
        if name in COLUMNS:
            continue
        if name not in _AXES:
            raise UsageError(
                f"{name!r} is no axis of any operation",
                where=where,
                remedy="point, axes, weight, or an axis: kbench list ops",
            )
        parts += [f"{name}={value}"] if value != "" else []
    text = ",".join(part.replace(";", ",") for part in parts if part)
    if not text:
        raise UsageError("neither a point nor axes", where=where, remedy="give one of them")
    try:
        shape = str(parse_shape(text))
    except UsageError as error:
        raise UsageError(error.problems[0].what, where=where, remedy=error.problems[0].remedy) from error
    return Row(shape, _weight(where, record.get("weight", "")), 0.0)


def _weight(where: str, value: Any) -> float:
    if value == "":
        return 1.0
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0.0 <= weight < math.inf:
        raise UsageError(f"weight {value!r} is no number from 0 on", where=where, remedy="write how often it is called")
    return weight
