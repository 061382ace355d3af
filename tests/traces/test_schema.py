"""A trace survives its file; a file that is not a whole, unchanged trace is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbench.errors import TraceError
from kbench.traces.columns import COLUMNS
from kbench.traces.schema import RequestRow, Trace, TraceMeta, read_trace, trace_from_rows, write_trace
from kbench.traces.synth import synthesise

from .conftest import block_traces, stream_traces, token_traces


def plain(row: RequestRow) -> dict[str, Any]:
    cells = {spec.name: getattr(row, spec.name) for spec in COLUMNS}
    return {name: cell.tolist() if isinstance(cell, np.ndarray) else cell for name, cell in cells.items()}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(stream_traces(), block_traces(), token_traces()))
def test_a_file_gives_back_what_was_written(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "t.parquet"
    write_trace(trace, path)
    back = read_trace(path)
    assert [plain(row) for row in back.rows()] == [plain(row) for row in trace.rows()]
    assert back.sha256 == trace.sha256
    assert back.content_kind == trace.content_kind


def test_metadata_and_optional_columns_survive(tmp_path: Path) -> None:
    meta = TraceMeta(
        source="x.csv",
        importer="azure",
        options={"dejitter": True, "seed": 3},
        source_sha256="ab",
        licence="CC BY 4.0",
        citation="someone",
        dropped={"json": 2},
    )
    rows = [
        RequestRow(
            session_id=5,
            input_tokens=3,
            output_tokens=2,
            arrival_us=4,
            recorded_duration_us=9,
            regime="größer",
            ttft_slo_ms=0.5,
            tpot_slo_ms=20.0,
        ),
        RequestRow(session_id=6, input_tokens=3, output_tokens=2, arrival_us=4),
    ]
    trace = trace_from_rows(rows, meta)
    write_trace(trace, tmp_path / "sub" / "t.parquet")
    back = read_trace(tmp_path / "sub" / "t.parquet")
    assert back.meta == meta
    assert [plain(row) for row in back.rows()] == [plain(row) for row in trace.rows()]
    assert [entry.name for entry in (tmp_path / "sub").iterdir()] == ["t.parquet"]


def test_the_hash_follows_content_and_not_encoding_or_provenance(tmp_path: Path) -> None:
    trace = synthesise("chat", 40, 1)
    path = tmp_path / "t.parquet"
    write_trace(trace, path)
    table = pq.read_table(path)
    narrow = table.select([name for name in table.column_names if table[name].null_count < len(table)])
    pq.write_table(narrow, path, compression="none", row_group_size=7, use_dictionary=False)
    assert read_trace(path).sha256 == trace.sha256
    rows = list(trace.rows())
    assert trace_from_rows(rows, TraceMeta(source="else", importer="else")).sha256 == trace.sha256
    rows[0] = RequestRow(session_id=0, input_tokens=1, output_tokens=1, arrival_us=0)
    assert trace_from_rows(rows[:1], trace.meta).sha256 != trace_from_rows(list(trace.rows())[:1], trace.meta).sha256


def test_columns_cannot_be_written_to() -> None:
    trace = synthesise("chat", 5, 1)
    for array in (trace.input_tokens, trace.arrival_us.values, trace.parent_ids.values, trace.prefix_tokens.known):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


Edit = Callable[[pa.Table], pa.Table]


def put(name: str, values: Any, type_: pa.DataType) -> Edit:
    def edit(table: pa.Table) -> pa.Table:
        at = table.column_names.index(name)
        return table.set_column(at, pa.field(name, type_), pa.array(values, type_))

    return edit


def without_metadata(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata(None)


def with_pair(key: str, value: str) -> Edit:
    pair = {f"kbench.trace.{key}".encode(): value.encode()}
    return lambda table: table.replace_schema_metadata({**table.schema.metadata, **pair})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda table: table.drop_columns(["output_tokens"]), "output_tokens: missing column"),
        (lambda table: table.append_column("prefix", pa.array([0] * 3)), "prefix: unknown column"),
        (put("input_tokens", ["1", "2", "3"], pa.string()), "input_tokens: string where int32 belongs"),
        (put("input_tokens", [1.5, 2, 3], pa.float64()), "input_tokens: double where int32 belongs"),
        (put("turn", [0, None, 0], pa.int32()), r"t\.parquet:2: turn: request 1: null"),
        (put("parent_ids", [[], [], [None]], pa.list_(pa.int64())), "parent_ids: null inside a list"),
        (put("parent_ids", [[], None, []], pa.list_(pa.int64())), r":2: parent_ids: request 1: null"),
        (put("output_tokens", [9, 9, 0], pa.int32()), r":3: output_tokens: request 2: an output has at least one"),
        (put("output_tokens", [9, 9, 10], pa.int32()), "sha256: the rows are not those that this file was written"),
        (without_metadata, "not a kbench trace"),
        (with_pair("version", "7"), "trace version 7, not 1"),
        (with_pair("options", "{"), "options: not JSON"),
        (with_pair("dropped", "3"), "dropped: not a JSON object"),
        (with_pair("block_tokens", "many"), "block_tokens: not a number"),
        (lambda table: table.slice(0, 0), "holds no requests"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    path = tmp_path / "t.parquet"
    write_trace(synthesise("burst", 3, 1), path)
    pq.write_table(edit(pq.read_table(path)), path)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(synthesise("chat", 30, 1), path)
    data = path.read_bytes()
    for share in (0.0, 0.2, 0.6, 0.95, 0.999):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(TraceError, match="not a Parquet file, or a damaged one"):
            read_trace(path)


def test_a_flipped_byte_is_noticed_or_changes_no_content(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trace = synthesise("chat", 200, 1)
    write_trace(trace, path)
    data = bytearray(path.read_bytes())
    refused = 0
    for at in range(0, len(data), 23):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            assert read_trace(path).sha256 == trace.sha256
        except TraceError:
            refused += 1
    assert refused > len(data) / 23 / 2


def test_places_that_are_no_trace_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none.parquet")
    with pytest.raises(TraceError, match="not a file"):
        read_trace(tmp_path)
    (tmp_path / "text.parquet").write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(TraceError, match="not a Parquet file"):
        read_trace(tmp_path / "text.parquet")
    with pytest.raises(TraceError, match="cannot write"):
        write_trace(synthesise("burst", 2, 1), tmp_path / "text.parquet" / "t.parquet")
