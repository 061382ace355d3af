"""Shapes from files: lists of one's own, recordings; what is measured of them, and that their content is locked."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kbench.catalog import parse_point
from kbench.errors import UsageError
from kbench.plan import make_plan
from kbench.suite import LoadedSuite, load_suite
from kbench.suite.recorded import read as read_recording
from kbench.suite.shape_files import read
from kbench.suite.shapes import Row, part_of
from suite.conftest import SUITE

CSV = """point,axes,weight
32q1s1k,,3
32*1@1024,,2
1*512,"window=64,softcap=30.0",
"""
TOML = """[[shape]]
point = "32q1s1k"
weight = 5
[[shape]]
axes = { rows = 3, hidden = 64 }
"""
STEPS = {
    "variant": ["a"] * 4 + ["b"],
    "mode": ["exec", "exec", "exec", "virtual", "exec"],
    "trace": ["chat"] * 5,
    "duration_us": [100.0, 300.0, 50.0, 9_999.0, 1.0],
    "decode_seqs": [4, 4, 0, 64, 1],
    "decode_context_tokens": [4_000, 4_100, 0, 64_000, 10],
    "prefill_seqs": [0, 1, 1, 0, 0],
    "prefill_tokens": [0, 250, 500, 0, 0],
    "prefill_context_tokens": [0, 500, 512, 0, 0],
}


def suite_with(folder: Path, kernel: str) -> LoadedSuite:
    text = SUITE.replace('[kernel]\npoints = ["1*1@127"]\n', f"[kernel]\n{kernel}\n")
    (folder / "suite.toml").write_text(text)
    (folder / "chat.parquet").write_bytes(b"any")
    return load_suite(folder / "suite.toml")


def points(loaded: LoadedSuite) -> tuple[str, ...]:
    assert loaded.suite.kernel is not None
    return loaded.suite.kernel.points


def test_a_csv_is_read_in_either_grammar_and_equal_shapes_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(CSV)
    found = read(tmp_path / "own.csv")
    assert found.rows == (Row("32*1@1024", 5.0, 0.0), Row("1*512,softcap=30.0,window=64", 1.0, 0.0))
    assert not found.steps and not found.timed


def test_axes_may_be_columns_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("m,n,k,weight\n4000,4000,4000,1\n32,4096,4096,10\n")
    shapes = [row.shape for row in read(tmp_path / "own.csv").rows]
    assert shapes == ["k=4000,m=4000,n=4000", "k=4096,m=32,n=4096"]


def test_a_toml_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(TOML)
    rows = read(tmp_path / "own.toml").rows
    assert rows == (Row("32*1@1024", 5.0, 0.0), Row("hidden=64,rows=3", 1.0, 0.0))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("own.csv", "point,weight\n8*1@64,x\n", "weight 'x' is no number"),
        ("own.csv", "point,weight\n8*1@64,-1\n", "from 0 on"),
        ("own.csv", "point\n8*1@\n", "own.csv:2: point '8*1@'"),
        ("own.csv", "point,colour\n8*1@64,red\n", "'colour' is no axis"),
        ("own.csv", "point\n", "no shape"),
        ("own.csv", "point,axes\n8*1@64,m=1,n=2\n", "quote axes"),
        ("own.toml", "[[shape]]\nweight = 1\n", "neither a point nor axes"),
        ("own.toml", "shape = 3\n", "not a list of"),
        ("own.toml", "[[shape]\n", "not TOML"),
        ("own.yaml", "a", ".csv and .toml"),
        ("gone.csv", "", "no such file"),
    ],
    ids=lambda text: text[:25],
)
def test_a_file_that_is_no_list_of_shapes_is_one_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as error:
        read(tmp_path / name)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_all_shapes_of_an_own_list_are_measured_and_the_file_is_locked_by_content(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(CSV)
    loaded = suite_with(tmp_path, 'shapes = "own.csv"')
    assert points(loaded) == ("32*1@1024", "1*512,softcap=30.0,window=64")
    assert loaded.recorded is not None and loaded.recorded.source == "own.csv"
    before = make_plan(loaded).lock_hash
    (tmp_path / "moved.csv").write_text(CSV)
    assert make_plan(suite_with(tmp_path, 'shapes = "moved.csv"')).lock_hash == before
    (tmp_path / "own.csv").write_text(CSV.replace(",,2", ",,4"))
    assert make_plan(suite_with(tmp_path, 'shapes = "own.csv"')).lock_hash != before


def steps_file(folder: Path) -> Path:
    pq.write_table(pa.table(STEPS), folder / "steps.parquet")
    return folder / "steps.parquet"


def test_a_recording_is_the_baselines_real_steps(tmp_path: Path) -> None:
    steps_file(tmp_path)
    found = read_recording("steps.parquet", "a", tmp_path)
    assert {row.shape: (row.calls, row.time_us) for row in found.rows} == {
        "4*1@1024": (1.0, 100.0),
        "4*1@1024+1*256@512": (1.0, 300.0),
        "1*512": (1.0, 50.0),
    }
    assert "exec replay of chat by a" in found.source
    assert read_recording("steps.parquet#b", "a", tmp_path).rows == (Row("1*1@8", 1.0, 1.0),)


def test_of_a_recording_an_operation_sees_its_part_and_the_commonest_are_measured(tmp_path: Path) -> None:
    steps_file(tmp_path)
    loaded = suite_with(tmp_path, 'recorded = "steps.parquet"\nops = ["attention.decode", "attention.prefill"]')
    assert points(loaded) == ("4*1@1024", "1*256@512", "1*512")
    own = suite_with(tmp_path, 'recorded = "steps.parquet"\npoints = ["1*1@127"]')
    assert points(own) == ("1*1@127",) and own.recorded is not None
    batch = parse_point("4*1@1024+1*256@512")
    assert [str(part_of(batch, op)) for op in ("attention.decode", "attention.prefill", "norm.rmsnorm", "gemm")] == [
        "4*1@1024",
        "1*256@512",
        "4*1@1024+1*256@512",
        "None",
    ]


@pytest.mark.parametrize("form", ["list", "run"])
def test_the_histogram_that_a_replay_leaves_is_a_recording_too(tmp_path: Path, form: str) -> None:
    rows = [{"point": "8*1@512", "calls": 7, "time_us": 70.0}]
    trial = {"case": "workload/replay/tiny/chat;mode=exec", "variant": "a", "facts": {"shapes": rows}}
    document = rows if form == "list" else {"trials": [trial, {**trial, "variant": "b", "facts": {}}]}
    (tmp_path / "run.json").write_text(json.dumps(document))
    assert read_recording("run.json", "a", tmp_path).rows == (Row("8*1@512", 7.0, 70.0),)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("", "no shape to measure at"),
        ('recorded = "gone.parquet"', "no such file"),
        ('recorded = "steps.parquet#c"', "no steps of 'c'"),
        ('recorded = "suite.toml"', "neither JSON nor Parquet"),
        ('recorded = "chat.parquet"', "not the steps of a run"),
        ('recorded = "steps.parquet"\nops = ["gemm"]', "no shape of steps.parquet"),
        ('recorded = "steps.parquet"\nshapes = "own.csv"', "exclude each other"),
        ('definition = "d.json"', "needs a workload"),
    ],
    ids=lambda text: text[:30],
)
def test_a_suite_that_names_no_usable_file_is_told_so_with_its_line(tmp_path: Path, kernel: str, said: str) -> None:
    steps_file(tmp_path)
    with pytest.raises(UsageError) as error:
        suite_with(tmp_path, kernel)
    assert said in str(error.value) and "suite.toml:" in str(error.value)
