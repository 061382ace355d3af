"""Shapes from files on the command line, and the summary that they weigh."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.conftest import Said, kbench

STEPS = {
    "variant": ["page16"] * 3,
    "mode": ["exec"] * 3,
    "trace": ["chat"] * 3,
    "duration_us": [100.0, 300.0, 50.0],
    "decode_seqs": [4, 4, 0],
    "decode_context_tokens": [4_000, 4_100, 0],
    "prefill_seqs": [0, 1, 1],
    "prefill_tokens": [0, 250, 500],
    "prefill_context_tokens": [0, 500, 512],
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.csv").write_text('point,axes,weight\n32q1s1k,,3\n,"rows=3,hidden=64",1\n')
    pq.write_table(pa.table(STEPS), "steps.parquet")
    axes = {"M": {"type": "var"}, "N": {"type": "const", "value": 64}, "K": {"type": "const", "value": 32}}
    inputs = {"A": {"shape": ["M", "K"], "dtype": "bfloat16"}}
    defined = {"name": "gemm_x", "op_type": "gemm", "axes": axes, "inputs": inputs, "outputs": {}, "reference": ""}
    Path("d.json").write_text(json.dumps(defined))
    Path("w.jsonl").write_text(json.dumps({"uuid": "u", "axes": {"M": 8}, "inputs": {}}) + "\n")


def measured(*words: str) -> Said:
    return kbench("kernel", *words, "--device", "cpu", "--out", "results", "--json")


def norm(*words: str) -> Said:
    return measured("--op", "norm.rmsnorm", "--impl", "torch-rmsnorm", "--baseline", "torch-rmsnorm", *words)


def points(said: Said) -> set[str]:
    assert said.code == 0, said.err
    return {row["point"] for row in said.document["cases"]}


def test_a_list_of_ones_own_is_measured_whole_and_weighs_the_summary() -> None:
    said = norm("--shapes", "own.csv")
    assert points(said) == {"32*1@1024", "hidden=64,rows=3"}
    summary = said.document["summary"]
    assert summary["weights"] == "own.csv" and summary["shape_coverage"] == 1.0
    assert summary["speedup"] == pytest.approx(1.0, abs=0.05)
    assert summary["ops"].keys() == {"norm.rmsnorm"}


def test_a_recording_brings_its_commonest_shapes_or_weighs_given_ones() -> None:
    assert points(norm("--recorded", "steps.parquet")) == {"4*1@1024", "4*1@1024+1*256@512", "1*512"}
    said = norm("--recorded", "steps.parquet#page16", "--points", "1*512")
    assert points(said) == {"1*512"}
    assert said.document["summary"]["shape_coverage"] == pytest.approx(50 / 450)


def test_vllms_grammar_names_the_same_case() -> None:
    assert points(norm("--points", "2q2k_32q1s4k")) == {"2*2048+32*1@4096"}


def test_a_definition_brings_operation_dtype_and_shapes() -> None:
    said = measured("--definition", "d.json", "--workload", "w.jsonl", "--impl", "torch-gemm")
    assert points(said) == {"k=32,m=8,n=64"}
    assert said.document["cases"][0]["op"] == "gemm"


def test_without_weights_the_summary_counts_and_averages_nothing() -> None:
    summary = norm("--points", "1*512 1*513").document["summary"]
    assert summary["cases"] == 2 and summary["speedup"] is None and summary["weights"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shapes", "gone.csv"), "no such file"),
        (("--shapes", "own.csv", "--recorded", "steps.parquet"), "exclude each other"),
        (("--recorded", "steps.parquet#x"), "no steps of 'x'"),
        (("--workload", "w.jsonl"), "a definition needs a workload"),
        (("--points", "q1m"), "cannot read 'q1m'"),
        (("--sessions", "0"), "greater than or equal to 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_read_is_a_usage_error(words: tuple[str, ...], said: str) -> None:
    found = norm(*words)
    assert found.code == 2 and said in found.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to tune"),
        (("--op", "norm.rmsnorm", "--impl", "torch-rmsnorm", "--drift", "gone.parquet"), "no such file"),
        (("--op", "norm.rmsnorm", "--impl", "torch-rmsnorm", "--points", "gibberish"), "cannot read"),
    ],
)
def test_tune_says_in_one_line_what_it_lacks(words: tuple[str, ...], said: str) -> None:
    found = kbench("tune", *words, "--device", "cpu")
    assert found.code == 2 and said in found.err and found.err.count("\n") == 1


def test_the_steps_of_a_trace_are_modelled_and_need_a_cost_grid() -> None:
    trace = Path(__file__).parents[2] / "traces" / "chat.parquet"
    found = kbench("tune", "--op", "attention.decode", "--impl", "blocked-tuned", "--drift", trace, "--device", "cpu")
    assert found.code == 2 and "--costs" in found.err
