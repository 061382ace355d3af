"""The trace file: one Parquet table, one row a request, provenance in its key-value metadata.

Owns reading and writing. A file is read whole, checked (`integrity`) and compared with the content hash that was
written with it; whatever is wrong is a TraceError, never a pyarrow exception.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kbench.errors import TraceError
from kbench.traces.columns import COLUMNS, AnyColumn, ColumnSpec, Floats, Ints, Kind, Lists, column_of, frozen
from kbench.traces.integrity import check_trace
from kbench.traces.trace import (
    BLOCK_ID_SEMANTICS,
    MAX_SEQUENCE_TOKENS,
    TRACE_VERSION,
    RequestRow,
    Trace,
    TraceMeta,
    trace_from_rows,
)

__all__ = [
    "MAX_SEQUENCE_TOKENS",
    "TRACE_VERSION",
    "RequestRow",
    "Trace",
    "TraceMeta",
    "file_sha256",
    "read_trace",
    "trace_from_rows",
    "write_trace",
]

_KEY = "kbench.trace."
_MAX_LIST_VALUES = 2**31 - 1  # Arrow's list offsets are 32 bits
_MAKE_ONE = "make one with `kbench trace import` or `kbench trace synth`"


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes, for provenance."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --------------------------------------------------------------------------------------------- writing


def write_trace(trace: Trace, path: Path) -> None:
    """Write `trace` to `path`, whole or not at all. Raises TraceError where the place cannot be written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = [_to_arrow(spec, getattr(trace, spec.name)) for spec in COLUMNS]
    fields = [pa.field(spec.name, array.type) for spec, array in zip(COLUMNS, arrays, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=_metadata_of(trace)))
    if not path.name or path.is_dir():
        raise TraceError("a folder, not a file", file=str(path), remedy="name the file to write, e.g. mine.parquet")
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, part, compression="zstd", write_page_checksum=True)
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise TraceError(
            f"cannot write: {error.strerror or error}", file=str(path), remedy="choose another place"
        ) from error


def _to_arrow(spec: ColumnSpec, column: AnyColumn) -> Any:
    import pyarrow as pa

    element = pa.type_for_alias(spec.element)
    if isinstance(column, tuple):
        return pa.array(column, element)
    if isinstance(column, np.ndarray):
        return pa.array(column).cast(element)
    if not isinstance(column, Lists):
        return pa.array(column.values, mask=~column.known).cast(element)
    if column.values.size > _MAX_LIST_VALUES:
        raise TraceError(f"{column.values.size:,} ids in one column", field=spec.name, remedy="split the trace")
    values = pa.array(column.values).cast(element)
    # A null at an offset marks the list that starts there as null.
    missing = np.append(~column.known, False)
    return pa.ListArray.from_arrays(pa.array(column.offsets.astype(np.int32), mask=missing), values)


def _metadata_of(trace: Trace) -> dict[str, str]:
    meta = trace.meta
    pairs: dict[str, str | None] = {
        "version": TRACE_VERSION,
        "sha256": trace.sha256,
        "source": meta.source,
        "source_sha256": meta.source_sha256,
        "licence": meta.licence,
        "citation": meta.citation,
        "importer": meta.importer,
        "options": json.dumps(dict(meta.options), sort_keys=True),
        "dropped": json.dumps(dict(meta.dropped), sort_keys=True),
        "block_tokens": None if meta.block_tokens is None else str(meta.block_tokens),
        "block_id_semantics": BLOCK_ID_SEMANTICS if trace.content_kind == "blocks" else None,
    }
    return {_KEY + key: value for key, value in pairs.items() if value is not None}


# --------------------------------------------------------------------------------------------- reading


def read_trace(path: Path) -> Trace:
    """Read and check a trace file.

    Raises TraceError for a file that is absent, not Parquet, cut short, of another version, without a needed column,
    changed since it was written, or whose rows break a rule of `integrity.check_trace`.
    """
    table = _read_table(path)
    raw = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in (table.schema.metadata or {}).items()
    }
    found = {key.removeprefix(_KEY): value for key, value in raw.items() if key.startswith(_KEY)}
    meta = _meta_from(found, path)
    _check_names(table.column_names, path)
    columns: dict[str, Any] = {spec.name: _from_arrow(spec, table, path) for spec in COLUMNS}
    trace = Trace(**columns, meta=meta)
    check_trace(trace, file=str(path))
    if found.get("sha256", trace.sha256) != trace.sha256:
        what = "the rows are not those that this file was written with"
        raise TraceError(what, file=str(path), field=_KEY + "sha256", remedy="import or synthesise it again")
    return trace


def _read_table(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise TraceError("no such file", file=str(path), remedy=_MAKE_ONE)
    if not path.is_file():
        raise TraceError("not a file", file=str(path), remedy="name the Parquet file itself")
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        table.validate(full=True)
        _ = table.column_names  # decodes them: damage in a name shows here
        return table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f"not a Parquet file, or a damaged one: {reason}"
        raise TraceError(what, file=str(path), remedy=_MAKE_ONE) from error


def _meta_from(found: Mapping[str, str], path: Path) -> TraceMeta:
    version = found.get("version")
    if version != TRACE_VERSION:
        what = "Parquet, but not a kbench trace" if version is None else f"trace version {version}, not {TRACE_VERSION}"
        raise TraceError(what, file=str(path), field=_KEY + "version", remedy=_MAKE_ONE)
    block_tokens = found.get("block_tokens")
    if block_tokens is not None and not block_tokens.isdecimal():
        raise TraceError(f"not a number: {block_tokens}", file=str(path), field=_KEY + "block_tokens")
    return TraceMeta(
        source=found.get("source", "unknown"),
        importer=found.get("importer", "unknown"),
        options=_json_object(found, "options", path),
        source_sha256=found.get("source_sha256"),
        licence=found.get("licence", "unknown"),
        citation=found.get("citation", ""),
        block_tokens=None if block_tokens is None else int(block_tokens),
        dropped=_json_object(found, "dropped", path),
    )


def _json_object(found: Mapping[str, str], key: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(found.get(key, "{}"))
    except ValueError as error:
        raise TraceError(f"not JSON: {error}", file=str(path), field=_KEY + key) from error
    if not isinstance(value, dict):
        raise TraceError("not a JSON object", file=str(path), field=_KEY + key)
    return value


def _check_names(names: list[str], path: Path) -> None:
    known = [spec.name for spec in COLUMNS]
    for spec in COLUMNS:
        if spec.required and spec.name not in names:
            raise TraceError("missing column", file=str(path), field=spec.name, remedy=_MAKE_ONE)
    for name in names:
        if name not in known or names.count(name) > 1:
            what = "unknown column" if name not in known else "this column is there twice"
            raise TraceError(what, file=str(path), field=name, remedy=f"columns are {', '.join(known)}")


def _from_arrow(spec: ColumnSpec, table: Any, path: Path) -> AnyColumn:
    import pyarrow as pa

    if spec.name not in table.column_names:
        return column_of(spec, [None] * table.num_rows)
    element = pa.type_for_alias(spec.element)
    wanted = pa.list_(element) if spec.kind is Kind.LISTS else element
    stored = table.schema.field(spec.name).type
    try:
        # Arrow would also turn texts and timestamps into integers, which nobody meant.
        if not _same_family(stored, wanted):
            raise pa.ArrowTypeError(str(stored))
        array = pa.concat_arrays(table.column(spec.name).cast(wanted).chunks or [pa.array([], wanted)])
    except pa.ArrowException as error:
        what = f"{stored} where {wanted} belongs"
        raise TraceError(what, file=str(path), field=spec.name) from error
    known = array.is_valid().to_numpy(zero_copy_only=False)
    if (spec.kind is Kind.DENSE or spec.name == "parent_ids") and not known.all():
        row = int(np.argmin(known))
        raise TraceError(
            f"request {row}: null", file=str(path), line=row + 1, field=spec.name, remedy="every row needs it"
        )
    return _column_from(spec, array, known, path)


def _same_family(stored: Any, wanted: Any) -> bool:
    import pyarrow.types as types

    if types.is_null(stored):
        return True
    if types.is_list(wanted):
        is_list = types.is_list(stored) or types.is_large_list(stored)
        return is_list and _same_family(stored.value_type, wanted.value_type)
    if types.is_string(wanted):
        return bool(types.is_string(stored) or types.is_large_string(stored))
    # Integers with nulls come out of pandas as floats; the cast refuses those that are not whole.
    return bool(types.is_integer(stored) or types.is_floating(stored))


def _column_from(spec: ColumnSpec, array: Any, known: Any, path: Path) -> AnyColumn:
    if spec.kind is Kind.TEXT:
        return tuple(array.to_pylist())
    if spec.kind is Kind.LISTS:
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        flat = array.flatten()
        if flat.null_count:
            raise TraceError("null inside a list", file=str(path), field=spec.name)
        values = flat.to_numpy(zero_copy_only=False)
        return Lists.packed(lengths, np.array(values), np.array(known))
    if spec.kind is Kind.FLOATS:
        return Floats(
            frozen(array.fill_null(0.0).to_numpy(zero_copy_only=False).astype(np.float64)), frozen(np.array(known))
        )
    values = frozen(array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64))
    return values if spec.kind is Kind.DENSE else Ints(values, frozen(np.array(known)))
