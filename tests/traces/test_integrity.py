"""Each way in which rows fail to be a trace is refused with its row, its field and a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kbench.errors import ExitCode, TraceError
from kbench.traces.schema import MAX_SEQUENCE_TOKENS, RequestRow, TraceMeta, trace_from_rows

META = TraceMeta(source="t", importer="test", block_tokens=4)


def root(**cells: Any) -> RequestRow:
    return replace(RequestRow(session_id=0, input_tokens=10, output_tokens=3, arrival_us=0), **cells)


def child(**cells: Any) -> RequestRow:
    base = RequestRow(session_id=0, turn=1, parent_ids=(0,), think_us=0, input_tokens=20, output_tokens=3)
    return replace(base, **cells)


def blocks(*ids: int, **cells: Any) -> RequestRow:
    return root(**{"input_tokens": 4 * len(ids), "block_ids": ids, **cells})


BAD: list[tuple[list[RequestRow], str]] = [
    ([], "the trace holds no requests"),
    ([root(), root(input_tokens=0)], "t:2: input_tokens: request 1"),
    ([root(output_tokens=0)], "t:1: output_tokens"),
    ([root(input_tokens=-5)], "input_tokens"),
    ([root(input_tokens=MAX_SEQUENCE_TOKENS)], "input_tokens: .* pass 16,777,216"),
    ([root(turn=-1)], "turn"),
    ([root(ttft_slo_ms=0.0)], "ttft_slo_ms"),
    ([root(arrival_us=None)], "arrival_us: .* needs an arrival"),
    ([root(arrival_us=-1)], "arrival_us: .* negative"),
    ([root(think_us=-1)], "think_us: .* negative"),
    ([root(arrival_us=4 * 10**14)], "arrival_us: .* more than 10 years"),
    ([root(), child(think_us=None)], "t:2: think_us: .* an arrival or a think time"),
    ([root(arrival_us=9), child(), root(arrival_us=8)], "t:3: arrival_us: request 2: arrives before"),
    ([root(), child(parent_ids=(1,))], "parent_ids: .* earlier row"),
    ([root(), child(parent_ids=(5,))], "parent_ids: .* earlier row"),
    ([root(), child(parent_ids=(-1,))], "parent_ids: .* negative"),
    ([root(), child(session_id=3)], "session_id"),
    ([root(), child(turn=0)], "turn: .* above the parent's"),
    ([root(), child(prefix_tokens=14)], "prefix_tokens: .* longer than the parent's"),
    ([root(), child(prefix_tokens=21)], "prefix_tokens: .* between 0 and input_tokens"),
    ([root(prefix_tokens=1)], "prefix_tokens: .* no parent"),
    ([root(shared_id=1)], "shared_id: .* go together"),
    ([root(shared_tokens=1)], "shared_id: .* go together"),
    ([root(shared_id=1, shared_tokens=11)], "shared_tokens: .* between 1 and input_tokens"),
    ([root(), child(prefix_tokens=5, shared_id=1, shared_tokens=3)], "t:2: shared_tokens: .* both the parent's"),
    ([root(shared_id=1, shared_tokens=3), child(prefix_tokens=5, shared_id=2, shared_tokens=3)], "shared_tokens"),
    ([root(shared_id=1, shared_tokens=3), child(prefix_tokens=5, shared_id=1, shared_tokens=4)], "shared_tokens"),
    ([blocks(1, 2), root(arrival_us=1)], "t:2: block_ids: .* missing"),
    ([blocks(1, 2, input_tokens=12)], "block_ids: .* 4 full blocks"),
    ([blocks(1, 2, tail_id=3)], "tail_id: .* no tail"),
    ([root(tail_id=3)], "tail_id: .* needs block_ids"),
    ([blocks(1, 2), blocks(3, 1)], "block_ids: .* block id 1 stands at two positions"),
    ([blocks(1, 2), blocks(3, 2)], "t:2: block_ids: .* block id 2 follows two different blocks"),
    ([blocks(7, 7)], "block_ids: .* two positions"),
    ([blocks(1, 2, shared_id=1, shared_tokens=2)], "shared_id: .* beside block_ids"),
    ([blocks(1, 2, token_ids=[1] * 8)], "token_ids: .* beside block_ids"),
    ([root(token_ids=[1] * 9)], "token_ids: .* as many ids"),
    ([root(token_ids=[1] * 9 + [-1])], "token_ids: .* negative"),
    ([root(token_ids=[1] * 10, output_token_ids=[1])], "output_token_ids: .* as many ids"),
    ([root(output_token_ids=[1, 2, 3])], "output_token_ids: .* needs token_ids"),
]


@pytest.mark.parametrize(("rows", "message"), BAD, ids=[message for _, message in BAD])
def test_refused(rows: list[RequestRow], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        trace_from_rows(rows, META)
    assert caught.value.exit_code is ExitCode.USAGE
    assert "\n" not in str(caught.value)


def test_errors_point_at_the_line_of_the_source() -> None:
    with pytest.raises(TraceError, match=r"^src\.jsonl:90: output_tokens: "):
        trace_from_rows([root(), root(output_tokens=0)], META, file="src.jsonl", lines=[7, 90])


def test_block_ids_need_a_block_size() -> None:
    with pytest.raises(TraceError, match="without a block size"):
        trace_from_rows([blocks(1, 2)], TraceMeta(source="t", importer="test"))


def test_what_a_trace_may_do() -> None:
    rows = [
        root(shared_id=1, shared_tokens=6),
        child(prefix_tokens=13, shared_id=1, shared_tokens=6),
        child(prefix_tokens=2, shared_id=1, shared_tokens=9),
        child(turn=2, parent_ids=(1, 2), prefix_tokens=0, arrival_us=5),
    ]
    trace = trace_from_rows(rows, META)
    assert trace.parents(3) == [1, 2] and trace.row(1).prefix_tokens == 13 and trace.content_kind == "streams"
    same_prefix = trace_from_rows([blocks(1, 2), blocks(1, 2), blocks(1, 9), blocks(4)], META)
    assert same_prefix.content_kind == "blocks"
