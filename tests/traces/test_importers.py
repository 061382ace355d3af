"""Importers read the public formats with their traps, name the line and field of a bad row, and match known facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kbench.errors import TraceError, UsageError
from kbench.traces.importers import IMPORTERS, ImportOptions, import_trace
from kbench.traces.schema import read_trace, write_trace
from kbench.traces.statistics import trace_info

AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2023-11-16 18:15:50.9951699,396,109\r\n"
    b"2023-11-16 18:15:50.9951698,20,1"
)


def put(tmp_path: Path, data: bytes, name: str = "source") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def mooncake_line(time_ms: object, length: int, ids: list[int], output: int = 5, **extra: object) -> str:
    row = {"timestamp": time_ms, "input_length": length, "output_length": output, "hash_ids": ids, **extra}
    return json.dumps(row)


def test_azure_fractions_line_ends_and_order(tmp_path: Path) -> None:
    trace = import_trace("azure", put(tmp_path, AZURE))
    assert trace.arrival_us.values.tolist() == [0, 4_314_579, 4_314_579]
    assert trace.input_tokens.tolist() == [374, 396, 20] and trace.output_tokens.tolist() == [44, 109, 1]
    assert trace.session_id.tolist() == [0, 1, 2] and trace.meta.licence == "CC BY 4.0"


def test_azure_other_line_ends_offset_and_byte_order_mark(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf" + AZURE.replace(b"\r\n", b"\n").replace(b",374", b"+00:00,374") + b"\n\n"
    assert import_trace("azure", put(tmp_path, text)).sha256 == import_trace("azure", put(tmp_path, AZURE, "b")).sha256


def test_rows_out_of_order_are_sorted_and_said(tmp_path: Path) -> None:
    lines = AZURE.split(b"\r\n")
    trace = import_trace("azure", put(tmp_path, b"\r\n".join([lines[0], lines[2], lines[1], lines[3]])))
    assert trace.arrival_us.values.tolist() == [0, 4_314_579, 4_314_579]
    assert trace.meta.options["rows_moved_by_sorting"] == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"374,44", b"374", r"source:2: columns: 2 columns where 3 belong"),
        (b"374,44", b"many,44", r"source:2: ContextTokens: not a number of tokens: 'many'"),
        (b"374,44", b"374,0", r"source:2: GeneratedTokens: 0 tokens"),
        (b"2023-11-16 18:15:46.6805900", b"16/11/2023", r"source:2: TIMESTAMP: not a time like"),
        (b"2023-11-16 18:15:46", b"2023-13-16 18:15:46", r"source:2: TIMESTAMP: no such time"),
        (b"TIMESTAMP", b"Timestamp", r"source:1: header"),
        (b"374,44", b"374,\xff", r"source:2: not UTF-8"),
    ],
)
def test_azure_bad_rows_are_named(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace("azure", put(tmp_path, AZURE.replace(old, new)))


def test_bad_rows_are_counted_only_where_that_was_asked_for(tmp_path: Path) -> None:
    source = put(tmp_path, AZURE + b"\n\n2023-11-16 18:15:51,5,0\n2023-11-16 18:15:51,0,3\nx,1,1")
    trace = import_trace("azure", source, ImportOptions(skip_bad_rows=True))
    assert len(trace) == 3
    assert trace.meta.dropped == {"ContextTokens": 1, "GeneratedTokens": 1, "TIMESTAMP": 1, "columns": 1}
    write_trace(trace, tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet").meta == trace.meta


def test_mooncake_partial_last_block_never_matches(tmp_path: Path) -> None:
    lines = [mooncake_line(0, 1300, [1, 2, 3]), mooncake_line(27.5, 1300, [1, 2, 3]), mooncake_line(3000, 1024, [1, 2])]
    trace = import_trace("mooncake", put(tmp_path, "\n".join(lines).encode()))
    assert trace.arrival_us.values.tolist() == [0, 27_500, 3_000_000]
    assert [trace.row(0).block_ids.tolist(), trace.row(0).tail_id, trace.row(2).tail_id] == [[1, 2], 3, None]  # type: ignore[union-attr]
    # 1,024 of the second prompt's 1,300 tokens; of the third only the first block: its last token must be computed.
    ratio = trace_info(trace, [512])["infinite_cache_hit_ratio"]["512"]
    assert ratio == pytest.approx((1024 + 512) / (1300 + 1300 + 1024))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"source:2: json: not JSON"),
        ("[]", r"source:2: json: not a JSON object"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": []}', r"source:2: output_length: missing"),
        (mooncake_line(1, 1024, [1, 2, 3]), r"source:2: hash_ids: 3 ids for 1024 tokens, where blocks of 512 make 2"),
        (mooncake_line(1, 10, [True]), r"source:2: hash_ids: not a list of ids"),
        (mooncake_line(1, 10, [-3]), r"source:2: hash_ids: not a list of ids"),
        (mooncake_line("soon", 10, [1]), r"source:2: timestamp: not a time"),
        (mooncake_line(float("nan"), 10, [1]), r"source:2: timestamp: not a time"),
        (mooncake_line(-1, 10, [1]), r"source:2: timestamp: not a time"),
        (mooncake_line(1, 10, [1], output=0), r"source:2: output_length: 0 tokens"),
        (mooncake_line(1, 1024, [2, 3]), r"source:2: block_ids: request 1: block id 2 stands at two positions"),
    ],
)
def test_mooncake_bad_rows_are_named(tmp_path: Path, line: str, message: str) -> None:
    source = put(tmp_path, "\n".join([mooncake_line(0, 1300, [1, 2, 3]), line]).encode())
    with pytest.raises(TraceError, match=message):
        import_trace("mooncake", source)


def test_names_and_places_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown trace format 'azur' .*azure, mooncake"):
        import_trace("azur", tmp_path / "x")
    with pytest.raises(TraceError, match="no such file"):
        import_trace("azure", tmp_path / "x")
    with pytest.raises(TraceError, match="no usable rows"):
        import_trace("mooncake", put(tmp_path, b"x"), ImportOptions(skip_bad_rows=True))
    with pytest.raises(TraceError, match=r"1: header|no usable rows"):
        import_trace("azure", put(tmp_path, b"", "empty"))
    assert all(importer.load() for importer in IMPORTERS.values())


# --------------------------------------------------------------------------------------------- the real files


def test_mooncake_conversation(real_trace: Callable[[str], Path]) -> None:
    trace = import_trace("mooncake", real_trace("mooncake_conversation_trace.jsonl"))
    info = trace_info(trace, [512, 1024, 2048, 4096])
    assert info["requests"] == 12_031
    expected = {"512": 0.373, "1024": 0.340, "2048": 0.321, "4096": 0.291}
    assert info["infinite_cache_hit_ratio"] == pytest.approx(expected, abs=0.001)
    assert info["timestamp_quantum_us"] == 3_000_000
    assert info["input_tokens"]["mean"] == pytest.approx(12_035, abs=1)
    misses = [point["miss_ratio"] for point in info["miss_ratio_curve"]["points"]]
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] == pytest.approx(1 - info["infinite_cache_hit_ratio"]["512"])


def test_mooncake_dejittered(real_trace: Callable[[str], Path]) -> None:
    source = real_trace("mooncake_conversation_trace.jsonl")
    plain = import_trace("mooncake", source)
    spread = import_trace("mooncake", source, ImportOptions(dejitter=True, seed=4))
    assert spread.meta.options["dejittered"] and not plain.meta.options["dejittered"]
    assert spread.meta.options["quantum_us"] == 3_000_000 and spread.meta.options["seed"] == 4
    assert spread.input_tokens.tolist() == plain.input_tokens.tolist()
    assert trace_info(spread, [512])["timestamp_quantum_us"] == 1
    assert spread.sha256 != import_trace("mooncake", source, ImportOptions(dejitter=True, seed=5)).sha256


def test_azure_conversation(real_trace: Callable[[str], Path]) -> None:
    info = trace_info(import_trace("azure", real_trace("AzureLLMInferenceTrace_conv.csv")), [256])
    assert info["requests"] == 19_366
    assert info["request_rate_per_s"] == pytest.approx(5.53, abs=0.01)
    assert info["input_tokens"]["p50"] == 1020 and info["input_tokens"]["max"] == 14_050
    assert info["output_tokens"]["p99"] == 601
    assert info["inter_arrival_cv"] == pytest.approx(1.09, abs=0.01)
    assert info["infinite_cache_hit_ratio"] == {"256": 0.0}
