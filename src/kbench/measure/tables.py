"""The tables of a replay as Parquet parts: requests, steps, and the KV pool over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from kbench.errors import MeasurementError
from kbench.measure.service import Limits, Segments, classify
from kbench.targets.base import ReplayResult, RequestResult

_KV_COLUMNS = ("start_us", "duration_us", "in_use_pages", "evictable_pages", "blank_pages", "used_tokens")


def write_parts(
    result: ReplayResult, limits: Limits, cut: Segments, labels: Mapping[str, str], paths: Mapping[str, str]
) -> None:
    """Parquet parts for whichever of `requests`, `steps` and `kv` a path is given."""
    unknown = set(paths) - {"requests", "steps", "kv"}
    if unknown:
        raise MeasurementError(f"no table {', '.join(sorted(unknown))}", remedy="requests, steps or kv")
    if "requests" in paths:
        _write_requests(result, limits, cut, labels, Path(paths["requests"]))
    if "steps" in paths:
        _write({**result.steps}, labels, Path(paths["steps"]))
    if "kv" in paths:
        columns: dict[str, Sequence[Any]] = {name: result.steps[name] for name in _KV_COLUMNS}
        count = len(columns["start_us"])
        pool: dict[str, Sequence[Any]] = {"pages": [result.pages] * count, "page_size": [result.page_size] * count}
        _write({**columns, **pool}, labels, Path(paths["kv"]))


def _write_requests(result: ReplayResult, limits: Limits, cut: Segments, labels: Mapping[str, str], path: Path) -> None:
    segment_of = {request: index for index, members in enumerate(cut.members) for request in members}
    columns: dict[str, list[Any]] = {
        item.name: [getattr(request, item.name) for request in result.requests] for item in fields(RequestResult)
    }
    columns["class"] = [classify(request, limits) for request in result.requests]
    # Null in the warm-up, which belongs to no segment.
    columns["segment"] = [segment_of.get(request.request_id) for request in result.requests]
    _write(columns, labels, path)


def _write(columns: Mapping[str, Sequence[Any]], labels: Mapping[str, str], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = len(next(iter(columns.values())))
    arrays = {name: pa.array([text] * count, pa.string()) for name, text in labels.items()}
    for name, values in columns.items():
        arrays[name] = pa.array(values, pa.list_(pa.int32())) if name == "output" else pa.array(values)
    partial = path.with_suffix(".partial")
    pq.write_table(pa.table(arrays), partial, compression="zstd")
    partial.replace(path)


def read_requests(path: Path | str) -> tuple[RequestResult, ...]:
    """The requests of one part, as they were written by a job."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [item.name for item in fields(RequestResult)]
    try:
        rows = pq.read_table(Path(path), columns=names).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise MeasurementError(f"not a table of requests: {str(error).splitlines()[0]}", where=str(path)) from error
    return tuple(RequestResult(**{**row, "output": tuple(row["output"])}) for row in rows)
