"""What the tests of traces share: small traces, strategies for random ones, and where the real files are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from kbench.traces.schema import RequestRow, Trace, TraceMeta, trace_from_rows

META = TraceMeta(source="test", importer="test")


@pytest.fixture
def real_trace() -> Callable[[str], Path]:
    """The path of a real public trace; the test is skipped where the file is absent."""

    def find(name: str) -> Path:
        root = Path(__file__).resolve().parents[2]
        folder = Path(os.environ.get("KBENCH_REAL_TRACES", root.parent / "shared" / "traces"))
        if not (folder / name).is_file():
            pytest.skip(f"{name} is not here; KBENCH_REAL_TRACES names its folder")
        return folder / name

    return find


@st.composite
def stream_traces(draw: st.DrawFn) -> Trace:
    """Sessions that branch, share streams of different lengths and keep any part of a parent."""
    rows: list[RequestRow] = []
    for index in range(draw(st.integers(1, 9))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        tokens = draw(st.integers(1, 40))
        output = draw(st.integers(1, 12))
        if parent is None:
            shared = draw(st.none() | st.tuples(st.integers(-1, 1), st.integers(1, tokens)))
            rows.append(
                RequestRow(
                    session_id=index,
                    input_tokens=tokens,
                    output_tokens=output,
                    arrival_us=index,
                    shared_id=shared and shared[0],
                    shared_tokens=shared and shared[1],
                )
            )
            continue
        above = rows[parent]
        prefix = draw(st.integers(0, min(tokens, above.input_tokens + above.output_tokens)))
        says_so = above.shared_tokens is not None and draw(st.booleans())
        rows.append(
            RequestRow(
                session_id=above.session_id,
                turn=above.turn + 1,
                parent_ids=(parent,),
                think_us=draw(st.integers(0, 5)),
                input_tokens=tokens,
                output_tokens=output,
                prefix_tokens=prefix,
                shared_id=above.shared_id if says_so else None,
                shared_tokens=min(above.shared_tokens or 1, tokens) if says_so else None,
            )
        )
    return trace_from_rows(rows, META)


BLOCK = 4


@st.composite
def block_traces(draw: st.DrawFn) -> Trace:
    """Paths through a random tree of blocks, so that ids are chain ids by construction."""
    ids: dict[tuple[int, int], int] = {}
    rows = []
    for index in range(draw(st.integers(1, 7))):
        path: list[int] = []
        for choice in draw(st.lists(st.integers(0, 1), max_size=8)):
            path.append(ids.setdefault((path[-1] if path else -1, choice), 1000 - 7 * len(ids)))
        tail = draw(st.integers(0 if path else 1, BLOCK - 1))
        rows.append(
            RequestRow(
                session_id=index,
                input_tokens=len(path) * BLOCK + tail,
                output_tokens=draw(st.integers(1, 9)),
                arrival_us=index,
                block_ids=path,
                tail_id=5 if tail else None,
            )
        )
    return trace_from_rows(rows, TraceMeta(source="test", importer="test", block_tokens=BLOCK))


@st.composite
def token_traces(draw: st.DrawFn) -> Trace:
    """Prompts over two tokens, so that prefixes really coincide; outputs recorded or not."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    rows = []
    for index in range(draw(st.integers(1, 8))):
        prompt, output = draw(tokens), draw(tokens)
        rows.append(
            RequestRow(
                session_id=index,
                input_tokens=len(prompt),
                output_tokens=len(output),
                arrival_us=index,
                token_ids=prompt,
                output_token_ids=output if draw(st.booleans()) else None,
            )
        )
    return trace_from_rows(rows, META)


def recorded_traces() -> st.SearchStrategy[Trace]:
    """Token traces whose outputs are all recorded, so that content is a matter of tokens alone."""
    return token_traces().filter(lambda trace: bool(trace.output_token_ids.known.all()))
