"""Formats with sessions: who follows whom, after how long, and what a turn keeps of the one before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbench.errors import TraceError
from kbench.traces.columns import Lists
from kbench.traces.importers import ImportOptions, import_trace
from kbench.traces.importers.qwen_bailian import chained
from kbench.traces.schema import Trace
from kbench.traces.statistics import trace_info

from .samples import (
    BURSTGPT,
    BURSTGPT_SESSIONS,
    JSONL,
    OTEL,
    QWEN,
    TRACELAB_CSV,
    TRACELAB_ROUNDS,
    lines,
    qwen,
    span,
    tracelab,
)

SKIP = ImportOptions(skip_bad_rows=True)


@pytest.fixture
def bring(tmp_path: Path) -> Callable[..., Trace]:
    def read(kind: str, data: bytes, **options: Any) -> Trace:
        path = tmp_path / "source"
        path.write_bytes(data)
        return import_trace(kind, path, ImportOptions(**options))

    return read


Bring = Callable[..., Trace]


def cells(trace: Trace, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(row, name) for name in names) for row in trace.rows()]


# --------------------------------------------------------------------------------------------- qwen-bailian


def test_qwen_turns_seconds_and_partial_blocks(bring: Bring) -> None:
    trace = bring("qwen-bailian", QWEN)
    assert cells(trace, "session_id", "turn", "parent_ids", "arrival_us", "input_tokens", "tail_id") == [
        (0, 0, (), 0, 40, 3),
        (1, 0, (), 2_500_000, 16, None),
        (0, 1, (0,), 8_750_000, 70, 6),
    ]
    assert trace.row(2).block_ids.tolist() == [1, 2, 4, 5]  # type: ignore[union-attr]
    assert trace.meta.options["parents_not_in_file"] == 1 and not trace.meta.options["block_ids_chained"]
    # Of 126 prompt tokens, blocks 1 and 2 come again. The partial block 3 never could.
    assert trace_info(trace, [16])["infinite_cache_hit_ratio"]["16"] == pytest.approx(32 / 126)


def test_qwen_ids_that_name_blocks_are_chained(bring: Bring) -> None:
    rows = [qwen(1, -1, 0, 49, [5, 9, 5, 1]), qwen(2, -1, 1, 49, [5, 9, 9, 1]), qwen(3, -1, 2, 33, [9, 5, 1])]
    trace = bring("qwen-bailian", lines(*rows))
    first, second, third = (trace.row(row).block_ids.tolist() for row in range(3))  # type: ignore[union-attr]
    assert trace.meta.options["block_ids_chained"]
    assert first[:2] == second[:2] and first[2] != second[2] and third[0] not in first and third[1] not in first


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8))
def test_chained_ids_are_equal_exactly_where_prefixes_are(rows: list[list[int]]) -> None:
    named = chained(Lists.of(rows))
    ids = [named.values[named.offsets[row] : named.offsets[row + 1]].tolist() for row in range(len(rows))]
    pairs = [(tuple(row[: at + 1]), ids[number][at]) for number, row in enumerate(rows) for at in range(len(row))]
    assert len({prefix for prefix, _ in pairs}) == len({name for _, name in pairs}) == len(set(pairs))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (qwen(10, -1, 1, 16, [8]), r"source:4: chat_id: 10 is also the chat of line 1"),
        (qwen(13, -2, 1, 16, [8]), r"source:4: parent_chat_id: not a chat: -2"),
        (qwen("x", -1, 1, 16, [8]), r"source:4: chat_id: not a chat: 'x'"),
        (qwen(13, -1, -1, 16, [8]), r"source:4: timestamp: a time cannot be negative: -1"),
        (qwen(13, -1, 1e12, 16, [8]), r"source:4: timestamp: no time in s"),
        (qwen(13, -1, 1, 16, [8, 9]), r"source:4: hash_ids: 2 ids for 16 tokens"),
        (qwen(13, -1, 1, 16, [2**63]), r"source:4: hash_ids: not a list of ids"),
        (qwen(13, 11, 1, 16, [8]), r"source:4: arrival: arrives before its parent, which stands in line 2"),
        (qwen(13, 13, 1, 16, [8]), r"source:4: parent_ids: its parents lead back to itself"),
        (qwen(13, -1, 1e9, 16, [8]), r"source:4: arrival: lies more than 10 years"),
    ],
)
def test_qwen_bad_rows_are_named(bring: Bring, row: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        bring("qwen-bailian", QWEN + b"\n" + lines(row))


def test_cycles_are_named(bring: Bring) -> None:
    rows = [qwen(1, -1, 0, 16, [1]), qwen(2, 4, 5, 16, [1]), qwen(3, 2, 5, 16, [1]), qwen(4, 3, 5, 16, [1])]
    with pytest.raises(TraceError, match=r"source:2: parent_ids: its parents lead back to itself"):
        bring("qwen-bailian", lines(*rows))


# --------------------------------------------------------------------------------------------- burstgpt


def test_burstgpt_without_and_with_sessions(bring: Bring) -> None:
    plain = bring("burstgpt", BURSTGPT)
    assert cells(plain, "session_id", "arrival_us", "input_tokens", "output_tokens") == [
        (0, 0, 472, 18),
        (1, 40_000_000, 1087, 230),
        (2, 40_000_000, 10, 1),
    ]
    assert not plain.recorded_duration_us.known.any() and not plain.parent_ids.values.size
    trace = bring("burstgpt", BURSTGPT_SESSIONS)
    assert cells(trace, "session_id", "turn", "parent_ids", "arrival_us", "recorded_duration_us") == [
        (0, 0, (), 0, 1_500_000),
        (1, 0, (), 1_000_000, None),
        (0, 1, (0,), 4_000_000, 250_000),
    ]


def test_burstgpt_whole_seconds_are_spread_in_order(bring: Bring) -> None:
    head = BURSTGPT.split(b"\n")[0]
    data = b"\n".join([head, *(b"%d,GPT-4,%d,1,%d,API log" % (n // 3, n + 1, n + 2) for n in range(60))])
    assert bring("burstgpt", data).meta.options["quantum_us"] == 1_000_000
    spread = bring("burstgpt", data, dejitter=True, seed=1)
    assert spread.meta.options["dejittered"] and spread.meta.options["seed"] == 1
    assert spread.input_tokens.tolist() == list(range(1, 61))
    assert (np.diff(spread.arrival_us.values) > 0).mean() > 0.9


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"46,GPT-4,10,0,10,API log", r"source:5: Response tokens: 0 tokens: 1 or more"),
        (b"46,GPT-4,-10,20,10,API log", r"source:5: Request tokens: -10 tokens"),
        (b"46,GPT-4,10,1,12,API log", r"source:5: Total tokens: 12 tokens, where request and response make 11"),
        (b"46,GPT-4,10,1,11", r"source:5: columns: 5 columns where 6 belong"),
        (b"soon,GPT-4,10,1,11,API log", r"source:5: Timestamp: not a number of s: 'soon'"),
    ],
)
def test_burstgpt_bad_rows_are_named_and_counted(bring: Bring, row: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        bring("burstgpt", BURSTGPT + row)
    trace = bring("burstgpt", BURSTGPT + row, skip_bad_rows=True)
    assert len(trace) == 3 and sum(trace.meta.dropped.values()) == 1
    with pytest.raises(TraceError, match="source:1: header: the first line has no column 'Model'"):
        bring("burstgpt", BURSTGPT.replace(b"Model", b"Engine"))


# --------------------------------------------------------------------------------------------- tracelab


def test_tracelab_csv_keeps_prefixes_and_waits(bring: Bring) -> None:
    trace = bring("tracelab", TRACELAB_CSV)
    assert sorted(cells(trace, "session_id", "turn", "arrival_us", "think_us", "input_tokens", "prefix_tokens")) == [
        (0, 0, 0, None, 512, None),
        (0, 1, None, 100_000, 704, 576),
        (0, 2, None, 250_500, 896, 768),
        (1, 0, 200_000, None, 400, None),
        (1, 1, None, 80_000, 548, 448),
    ]
    swapped = TRACELAB_CSV.replace(b"session_id,arrival_time,round_idx", b"id,arrival_time,round_idx")
    assert bring("tracelab", swapped).sha256 == trace.sha256


def test_tracelab_rounds_start_after_the_last_tool_and_share_what_was_cached(bring: Bring) -> None:
    trace = bring("tracelab", TRACELAB_ROUNDS)
    names = ("session_id", "turn", "arrival_us", "think_us", "recorded_duration_us", "prefix_tokens", "shared_tokens")
    assert sorted(cells(trace, *names), key=lambda row: row[:2]) == [
        (0, 0, 0, None, 4_000_000, None, 640),
        (0, 1, None, 7_000_000, 2_000_000, 920, None),
        (1, 0, 1_000_000, None, 1_000_000, None, 640),
    ]
    assert trace.meta.options["first_rounds_with_cached_prefix"] == 2
    assert set(trace.shared_id.values[trace.shared_id.known].tolist()) == {0}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TRACELAB_CSV + b"a,0,2,1,1,1,0", r"source:7: round_idx: line 4 is the same round"),
        (TRACELAB_CSV + b"c,0,0,0,0,1,0", r"source:7: input_len: 0 tokens"),
        (TRACELAB_CSV + b"c,0,0", r"source:7: columns: 3 columns where 7"),
        (TRACELAB_CSV.replace(b"round_idx", b"round"), r"source:1: header: .*'round_idx'"),
        (lines(tracelab("s", 0, 9, 10, [("text", "40:20")])), r"source:1: prefix_tokens: 10 of 9 tokens"),
        (lines(tracelab("s", 0, 9, 1, [])), r"source:1: timing_events: not a list of events"),
        (lines(tracelab("s", 0, 9, 1, [("text", "99:20")])), r"source:1: timing_events: not a time"),
    ],
)
def test_tracelab_bad_rows_are_named(bring: Bring, data: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        bring("tracelab", data)


# --------------------------------------------------------------------------------------------- otel


def test_otel_calls_fan_out_and_in(bring: Bring) -> None:
    trace = bring("otel", OTEL)
    names = ("parent_ids", "turn", "arrival_us", "think_us", "recorded_duration_us", "input_tokens", "prefix_tokens")
    assert cells(trace, *names) == [
        ((), 0, 0, None, 2_000_000, 10, None),
        ((0,), 1, None, 1_000_000, 2_000_000, 30, 14),
        ((0,), 1, None, 1_500_000, 2_500_000, 10, None),
        # Goes on from the first call's messages, and waits for both that ran side by side.
        ((0, 1, 2), 2, None, 1_000_000, 1_000_000, 30, 14),
    ]
    assert trace.meta.options["spans_that_are_no_calls"] == 1


def otlp(*spans: dict[str, Any]) -> bytes:
    def attribute(key: str, value: Any) -> dict[str, Any]:
        return {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}

    told = [
        {
            "traceId": each["trace_id"],
            "startTimeUnixNano": str(1_772_013_600_000_000_000 + 1_000_000_000 * index),
            "endTimeUnixNano": str(1_772_013_600_500_000_000 + 1_000_000_000 * index),
            "attributes": [attribute(*pair) for pair in each["attributes"].items()],
        }
        for index, each in enumerate(spans)
    ]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": told}]}]}).encode()


def test_otel_in_otlp_and_in_lines(bring: Bring) -> None:
    spans = [span(1, 0, 0.5, ["a"], "b"), span(2, 1, 1.5, ["a", "b", "c"], "d")]
    one = bring("otel", json.dumps({"spans": spans}).encode())
    assert bring("otel", otlp(*spans)).sha256 == one.sha256
    assert bring("otel", lines(*spans)).sha256 == one.sha256
    assert bring("otel", json.dumps(spans).encode()).sha256 == one.sha256
    assert cells(one, "parent_ids", "think_us", "prefix_tokens") == [((), None, None), ((0,), 500_000, 14)]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"spans": [span(1, 5, 2, ["a"], "b")]}, r"source:1: end_time: span 1: ends before it starts"),
        ({"spans": [3]}, r"source:1: spans: span 1 is not an object"),
        ({"resourceSpans": [{}]}, r"source:1: scopeSpans: missing"),
        ({"x": 1}, r"source:1: spans: neither a span"),
        (
            {"spans": [span(1, 1, 2, ["a"], "b", **{"gen_ai.usage.input_tokens": -4})]},
            r"source:1: gen_ai.usage.input_tokens: span 1: -4 tokens",
        ),
    ],
)
def test_otel_bad_spans_are_named(bring: Bring, document: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        bring("otel", json.dumps(document).encode())


# --------------------------------------------------------------------------------------------- jsonl


def test_jsonl_names_units_and_streams(bring: Bring) -> None:
    trace = bring("jsonl", JSONL)
    names = (
        "session_id",
        "parent_ids",
        "arrival_us",
        "think_us",
        "input_tokens",
        "prefix_tokens",
        "shared_id",
        "regime",
    )
    assert cells(trace, *names) == [
        (0, (), 0, None, 5, None, None, "größer"),
        (1, (), 500_000, None, 20, None, 0, None),
        (1, (1,), None, 20_000, 31, 23, None, None),
    ]


def test_jsonl_blocks_and_tokens(bring: Bring) -> None:
    row = {"arrival_ms": 1, "input_tokens": 9, "output_tokens": 1}
    blocks = bring("jsonl", lines({**row, "block_ids": [1, 2, 3]}, {**row, "block_ids": [1, 2]}), block_tokens=4)
    assert [blocks.tail_id.get(0), blocks.tail_id.get(1)] == [3, None] and blocks.content_kind == "blocks"
    tokens = bring("jsonl", lines({"arrival_us": 3, "token_ids": [5, 6], "output_token_ids": [7]}))
    assert (tokens.input_tokens.tolist(), tokens.output_tokens.tolist()) == ([2], [1])


ROW = {"arrival_s": 2, "input_tokens": 5, "output_tokens": 2}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "inputs": 4}, r"source:4: 'inputs': unknown field .*input_tokens"),
        ({**ROW, "request_id": "q"}, r"source:4: request_id: 'q' is also that of line 1"),
        ({**ROW, "parent_ids": ["z"]}, r"source:4: parent_ids: no request 'z'"),
        ({**ROW, "parent_ids": "q"}, r"source:4: parent_ids: not a list"),
        ({**ROW, "arrival_ms": 3}, r"source:4: arrival_ms: this time is there in two units"),
        ({**ROW, "arrival_s": -1}, r"source:4: arrival_s: a time cannot be negative"),
        ({**ROW, "output_tokens": -1}, r"source:4: output_tokens: -1 tokens"),
        ({**ROW, "block_ids": [1]}, r"source:4: block_ids: of how many tokens\? \(say --block-tokens\)"),
        ({**ROW, "session_id": 1.5}, r"source:4: session_id: neither text nor"),
        ({"input_tokens": 5, "output_tokens": 2}, r"source:4: arrival_us: .*without parents needs an arrival"),
        ({**ROW, "prefix_tokens": 2}, r"source:4: prefix_tokens: .*no parent"),
    ],
)
def test_jsonl_bad_rows_are_named(bring: Bring, row: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        bring("jsonl", JSONL + b"\n" + lines(row))


def test_leaving_out_a_row_leaves_out_what_follows_it(bring: Bring) -> None:
    rows = [
        {**ROW, "request_id": "a", "output_tokens": 0},
        {**ROW, "request_id": "b", "parent_ids": ["a"]},
        {**ROW, "request_id": "c", "parent_ids": ["b"]},
        {**ROW, "request_id": "d"},
    ]
    trace = bring("jsonl", lines(*rows), skip_bad_rows=True)
    assert len(trace) == 1 and trace.meta.dropped == {"output_tokens": 1, "parent_ids": 2}


# --------------------------------------------------------------------------------------------- the real files


def test_tracelab_examples(real_trace: Callable[[str], Path]) -> None:
    replay = import_trace("tracelab", real_trace("tracelab/multi_session_example.csv"))
    assert (len(replay), int(replay.session_id.max()) + 1) == (8, 3)
    later = replay.turn > 0
    assert (replay.prefix_tokens.values[later] > 0).all() and replay.meta.options["prefixes_cut_to_parent"] == 0
    rounds = import_trace("tracelab", real_trace("tracelab/sanitized_round_trace.jsonl"))
    assert (len(rounds), int(rounds.session_id.max()) + 1, int(rounds.turn.max())) == (19, 2, 9)
    assert rounds.think_us.get(int(np.flatnonzero(rounds.input_tokens == 35_740)[0])) == 19_291_000


def test_otel_examples(real_trace: Callable[[str], Path]) -> None:
    shared = import_trace("otel", real_trace("otel/prefix_sharing_example.json"))
    assert shared.turn.tolist() == [0, 0, 0, 1, 2, 3, 0]
    assert [shared.prefix_tokens.get(row) for row in (3, 4, 5)] == [150, 240, 340]
    chain = real_trace("otel/simple_chain.json")
    with pytest.raises(TraceError, match=r"no usage was recorded .*--chars-per-token"):
        import_trace("otel", chain)
    guessed = import_trace("otel", chain, ImportOptions(chars_per_token=4.0))
    assert guessed.meta.options["chars_per_token"] == 4.0
    assert [guessed.prefix_tokens.get(row) for row in range(3)] == [
        None,
        guessed.input_tokens[0] + guessed.output_tokens[0],
        guessed.input_tokens[1] + guessed.output_tokens[1],
    ]
