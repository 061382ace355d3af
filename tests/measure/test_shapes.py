"""The histogram of a replay's steps: buckets are points, no step and no time is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbench.catalog import parse_point
from kbench.measure.shapes import histogram


def steps(*rows: tuple[float, float, float, float, float, float]) -> dict[str, list[float]]:
    names = (
        "duration_us", "decode_seqs", "decode_context_tokens", "prefill_seqs", "prefill_tokens",
        "prefill_context_tokens",
    )  # fmt: skip
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def test_decodes_chunks_and_mixed_steps() -> None:
    found = histogram(
        steps(
            (10.0, 8, 8 * 1000, 0, 0, 0),
            (12.0, 9, 9 * 1100, 0, 0, 0),
            (50.0, 0, 0, 2, 1000, 2000),
            (70.0, 4, 4 * 100, 1, 300, 300),
        )
    )
    assert found == [
        {"point": "4*1@128+1*256@256", "calls": 1, "time_us": 70.0},
        {"point": "2*512@1024", "calls": 1, "time_us": 50.0},
        {"point": "8*1@1024", "calls": 2, "time_us": 22.0},
    ]


def test_nothing_replayed_has_no_shapes() -> None:
    assert histogram(steps()) == []


counts = st.integers(0, 300)


@given(st.lists(st.tuples(counts, st.integers(1, 40_000), counts, st.integers(1, 600), st.integers(0, 4_000))))
def test_every_bucket_is_a_point_and_time_adds_up(rows: list[tuple[int, int, int, int, int]]) -> None:
    taken = [
        (1.0 + place, n, n * context, m, m * query, m * (query + before))
        for place, (n, context, m, query, before) in enumerate(rows)
        if n or m
    ]
    found = histogram(steps(*taken))
    assert sum(item["calls"] for item in found) == len(taken)
    assert sum(item["time_us"] for item in found) == pytest.approx(sum(row[0] for row in taken))
    assert len({item["point"] for item in found}) == len(found)
    for item in found:
        parse_point(item["point"])
