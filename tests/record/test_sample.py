"""Samples in columns are the samples that went in, on disk too."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbench.errors import IntegrityError, MeasurementError
from kbench.record import Sample, SampleTable
from kbench.record.sample import sample_from_json
from record.conftest import samples

ONE = Sample("step/step/tiny/1*1@127", "step", "a", "step_time", "us", 1.5)
lists = st.lists(samples, max_size=6)


@settings(max_examples=40, deadline=None)
@given(lists)
def test_a_table_holds_its_rows_in_order(rows: list[Sample]) -> None:
    table = SampleTable.of(rows)
    assert len(table) == len(rows)
    assert list(table.rows()) == rows


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lists)
def test_parquet_round_trip(tmp_path: Path, rows: list[Sample]) -> None:
    path = tmp_path / "samples.parquet"
    SampleTable.of(rows).write(path)
    assert list(SampleTable.read(path).rows()) == rows
    assert [file.name for file in tmp_path.iterdir()] == ["samples.parquet"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324])
def test_every_float_survives(tmp_path: Path, value: float) -> None:
    path = tmp_path / "samples.parquet"
    SampleTable.of([replace(ONE, value=value)]).write(path)
    kept = SampleTable.read(path).value
    assert kept.tobytes() == np.array([value]).tobytes()


@settings(max_examples=30, deadline=None)
@given(st.lists(lists, max_size=3))
def test_joining_is_concatenation(parts: list[list[Sample]]) -> None:
    joined = SampleTable.join(SampleTable.of(part) for part in parts)
    assert list(joined.rows()) == [row for part in parts for row in part]


@settings(max_examples=40, deadline=None)
@given(lists, st.sampled_from(["case", "variant", "metric", "scope", "mode"]))
def test_selecting_is_filtering(rows: list[Sample], name: str) -> None:
    table = SampleTable.of(rows)
    for text in {getattr(row, name) for row in rows} | {"nobody has this text"}:
        assert list(table.select(**{name: text}).rows()) == [row for row in rows if getattr(row, name) == text]
    assert set(table.distinct(name)) == {getattr(row, name) for row in rows}


@given(samples)
def test_json_round_trip(row: Sample) -> None:
    assert sample_from_json(json.loads(json.dumps(asdict(row)))) == row


@pytest.mark.parametrize("change", [{"extra": 1}, {"value": ...}])
def test_a_sample_of_another_shape_is_refused(change: dict[str, object]) -> None:
    data = {**asdict(ONE), **change}
    data = {name: value for name, value in data.items() if value is not ...}
    with pytest.raises(IntegrityError, match="other keys"):
        sample_from_json(data)


def test_a_file_that_another_tool_rewrote_is_the_same(tmp_path: Path) -> None:
    """Plain strings instead of dictionaries, several row groups, columns in another order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [replace(ONE, variant=name, value=float(i), flags=("X",) * (i % 3)) for i, name in enumerate("abcab")]
    path = tmp_path / "samples.parquet"
    SampleTable.of(rows).write(path)
    table = pq.read_table(path)
    plain = [column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column for column in table.columns]
    rewritten = pa.table(dict(zip(table.column_names, plain, strict=True)))
    rewritten = rewritten.select(sorted(rewritten.column_names)).replace_schema_metadata(table.schema.metadata)
    pq.write_table(rewritten, path, row_group_size=2, use_dictionary=False)
    assert list(SampleTable.read(path).rows()) == rows


@pytest.mark.parametrize("damage", ["absent", "empty", "noise", "version", "column", "folder", "null"])
def test_a_file_that_is_no_samples_file_is_an_integrity_error(tmp_path: Path, damage: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "samples.parquet"
    SampleTable.of([ONE]).write(path)
    table = pq.read_table(path)
    if damage == "absent":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "noise":
        path.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    elif damage == "version":
        pq.write_table(table.replace_schema_metadata({"kbench.samples.version": "99"}), path)
    elif damage == "column":
        pq.write_table(table.drop_columns(["metric"]), path)
    elif damage == "null":
        nulls = pa.array([None], pa.int64())
        pq.write_table(table.set_column(table.column_names.index("session"), "session", nulls), path)
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(IntegrityError):
        SampleTable.read(path)


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="cannot write"):
        SampleTable.of([ONE]).write(tmp_path / "gone" / "samples.parquet")


def test_reading_imports_neither_torch_nor_pandas(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    SampleTable.of([ONE]).write(path)
    code = (
        "import sys, pathlib; from kbench.record import SampleTable\n"
        "assert len(SampleTable.read(pathlib.Path(sys.argv[1]))) == 1\n"
        "assert not {'torch', 'pandas', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
