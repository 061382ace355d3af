"""Page keys and token ids say the same thing about who shares what, at every page size."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.errors import TraceError
from kbench.traces.content import PAGE_BITS, PageKeys, TokenSource, owners, page_keys, token_ids
from kbench.traces.schema import RequestRow, Trace, TraceMeta, trace_from_rows
from kbench.traces.synth import synthesise

from .conftest import BLOCK, META, block_traces, stream_traces, token_traces

VOCAB = 2**31 - 1  # wide, so that two streams agree on no token by accident
Sequence_ = list[object]


def assert_keys_mean(trace: Trace, page_size: int, sequences: list[Sequence_]) -> None:
    """Every pair of requests shares key k exactly where the first (k + 1) pages of their sequences are equal."""
    keys = PageKeys(trace, page_size)
    of = [keys(request) for request in range(len(trace))]
    for request, sequence in enumerate(sequences):
        assert len(of[request]) == len(sequence) // page_size
        assert len(set(of[request])) == len(of[request])
    for (a, left), (b, right) in product(enumerate(sequences), repeat=2):
        for page in range(min(len(of[a]), len(of[b]))):
            end = (page + 1) * page_size
            assert (of[a][page] == of[b][page]) == (left[:end] == right[:end]), (a, b, page)
    flat = {key: page for each in of for page, key in enumerate(each)}
    assert all(key & ((1 << PAGE_BITS) - 1) == page for key, page in flat.items())


def spoken(trace: Trace, seed: int = 3) -> list[Sequence_]:
    source = TokenSource(trace, VOCAB, seed)
    whole = range(len(trace))
    return [[*source.prompt(request).tolist(), *source.output(request).tolist()] for request in whole]


def by_definition(trace: Trace) -> list[Sequence_]:
    """Streams token by token, from the words of the schema alone."""
    sequences: list[Sequence_] = []
    for request, row in enumerate(trace.rows()):
        total, prefix, shared = row.input_tokens + row.output_tokens, row.prefix_tokens or 0, row.shared_tokens or 0
        sequence: Sequence_ = [("own", request, position) for position in range(total)]
        if prefix:
            sequence[:prefix] = sequences[row.parent_ids[0]][:prefix]
        sequence[:shared] = [("shared", row.shared_id, position) for position in range(shared)]
        sequences.append(sequence)
    return sequences


@settings(max_examples=60, deadline=None)
@given(stream_traces(), st.sampled_from([1, 2, 3, 4, 7, 16]))
def test_stream_pages_are_shared_exactly_where_tokens_are(trace: Trace, page_size: int) -> None:
    assert_keys_mean(trace, page_size, spoken(trace))
    assert_keys_mean(trace, page_size, by_definition(trace))


@settings(max_examples=50, deadline=None)
@given(block_traces(), st.sampled_from([1, 2, 4, 8, 16]))
def test_block_pages_are_shared_exactly_where_tokens_are(trace: Trace, page_size: int) -> None:
    assert_keys_mean(trace, page_size, spoken(trace))
    assert PageKeys(trace, page_size).exact == (page_size >= BLOCK)


@settings(max_examples=80, deadline=None)
@given(token_traces(), st.sampled_from([1, 2, 3, 5]))
def test_recorded_pages_are_shared_exactly_where_tokens_are(trace: Trace, page_size: int) -> None:
    sequences: list[Sequence_] = []
    for request, row in enumerate(trace.rows()):
        assert row.token_ids is not None
        said = row.output_token_ids
        unknown = [("unknown", request, position) for position in range(row.output_tokens)]
        sequences.append([*map(int, row.token_ids), *(unknown if said is None else map(int, said))])
    assert_keys_mean(trace, page_size, sequences)


def two_turns() -> Trace:
    first = RequestRow(session_id=0, input_tokens=50, output_tokens=21, arrival_us=0, shared_id=9, shared_tokens=33)
    second = RequestRow(
        session_id=0, turn=1, parent_ids=(0,), think_us=5, input_tokens=90, output_tokens=8, prefix_tokens=71
    )
    other = RequestRow(session_id=2, input_tokens=40, output_tokens=4, arrival_us=7, shared_id=9, shared_tokens=33)
    return trace_from_rows([first, second, other], META)


def test_owners_of_a_second_turn_include_the_first_answer() -> None:
    who = owners(two_turns())
    assert who.of(1) == [(0, 3), (33, 0), (71, 1)]
    assert who.of(2) == [(0, 3), (33, 2)]
    assert [page_keys(two_turns(), request, 16)[:3] for request in (1, 2)] == [
        [3 << 24, 3 << 24 | 1, 2],
        [3 << 24, 3 << 24 | 1],
    ]


def test_a_prompt_carries_what_the_engine_really_said() -> None:
    source = TokenSource(two_turns(), 500, seed=1)
    said = list(range(100, 121))
    plain, carried = source.prompt(1), source.prompt(1, {0: said})
    assert carried[50:71].tolist() == said
    assert np.array_equal(np.delete(plain, slice(50, 71)), np.delete(carried, slice(50, 71)))
    short = source.prompt(1, {0: said[:5]})
    assert short[50:55].tolist() == said[:5] and np.array_equal(short[55:], plain[55:])


def test_unshared_tokens_are_spread_over_the_vocabulary() -> None:
    trace = trace_from_rows([RequestRow(session_id=0, input_tokens=20_000, output_tokens=1, arrival_us=0)], META)
    tokens = token_ids(trace, 0, 100, seed=0)
    assert tokens.dtype == np.int32 and tokens.min() == 0 and tokens.max() == 99
    counts = np.bincount(tokens, minlength=100)
    # Pearson's chi-square with 99 degrees of freedom passes 158 once in 5,000 draws of a fair source.
    assert ((counts - 200) ** 2 / 200).sum() < 158


def test_seed_and_trace_change_the_tokens_and_a_new_process_does_not() -> None:
    trace = synthesise("chat", 5, 1)
    tokens = token_ids(trace, 4, 1000, seed=1)
    assert not np.array_equal(tokens, token_ids(trace, 4, 1000, seed=2))
    assert not np.array_equal(tokens[:20], token_ids(synthesise("chat", 6, 1), 4, 1000, seed=1)[:20])
    code = (
        "from kbench.traces.content import token_ids; from kbench.traces.synth import synthesise;"
        "print(token_ids(synthesise('chat', 5, 1), 4, 1000, seed=1).tolist())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(tokens.tolist())


def test_importing_traces_leaves_torch_and_pyarrow_out() -> None:
    code = (
        "import sys, kbench.traces.schema, kbench.traces.content, kbench.traces.synth, kbench.traces.statistics,"
        "kbench.traces.importers; print([name for name in ('torch', 'triton', 'pyarrow', 'pandas', 'scipy')"
        " if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_page_size_that_blocks_cannot_answer_is_refused_with_those_they_can() -> None:
    row = RequestRow(session_id=0, input_tokens=600, output_tokens=3, arrival_us=0, block_ids=[4], tail_id=5)
    trace = trace_from_rows([row], TraceMeta(source="t.jsonl", importer="test", block_tokens=512))
    with pytest.raises(TraceError, match=r"multiple of 512 \(exact\) or a divisor"):
        PageKeys(trace, 768)
    with pytest.raises(TraceError, match="page of 0"):
        PageKeys(trace, 0)


def test_a_recorded_token_outside_the_vocabulary_is_refused() -> None:
    row = RequestRow(session_id=0, input_tokens=2, output_tokens=1, arrival_us=0, token_ids=[7, 500])
    trace = trace_from_rows([row], META)
    assert token_ids(trace, 0, 501, seed=0).tolist() == [7, 500]
    with pytest.raises(TraceError, match="token id 500 is outside a vocabulary of 500"):
        token_ids(trace, 0, 500, seed=0)
