"""Cutting, scaling and mixing keep sessions and prefixes whole, and say what they did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kbench.errors import UsageError
from kbench.traces.importers import import_trace
from kbench.traces.mix import Part, mix_traces
from kbench.traces.schema import RequestRow, Trace, TraceMeta, read_trace, trace_from_rows, write_trace
from kbench.traces.statistics import trace_info
from kbench.traces.synth import synthesise
from kbench.traces.transform import scale_trace, slice_trace

from .conftest import META, block_traces, stream_traces, token_traces
from .samples import MOONCAKE, QWEN

ANY = st.one_of(stream_traces(), block_traces(), token_traces())
LOOSE = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def sessions_of(trace: Trace) -> dict[int, list[tuple[Any, ...]]]:
    """What a session is, apart from when it starts: lengths, turns, think times, what each request keeps."""
    told: dict[int, list[tuple[Any, ...]]] = {}
    for row in trace.rows():
        cell = (row.turn, row.input_tokens, row.output_tokens, row.think_us, row.prefix_tokens, row.shared_tokens)
        told.setdefault(row.session_id, []).append(cell)
    return {session: sorted(cells, key=repr) for session, cells in told.items()}


@LOOSE
@given(ANY)
def test_all_of_a_trace_is_the_trace(trace: Trace) -> None:
    assert slice_trace(trace).sha256 == trace.sha256


@LOOSE
@given(ANY, st.data())
def test_a_slice_has_whole_sessions_and_info_speaks_of_it(tmp_path: Path, trace: Trace, data: st.DataObject) -> None:
    whole = sessions_of(trace)
    count = data.draw(st.integers(1, len(whole)))
    cut = slice_trace(trace, sessions=count, sample=data.draw(st.sampled_from([0.3, 1.0])), seed=5)
    assert all(cells == whole[session] for session, cells in sessions_of(cut).items())
    write_trace(cut, tmp_path / "t.parquet")
    info = trace_info(read_trace(tmp_path / "t.parquet"), [4])
    assert info["requests"] == len(cut) and info["sessions"] == len(sessions_of(cut)) <= count
    assert info["source"]["options"]["of"]["sha256"] == trace.sha256


def test_a_slice_by_time_takes_sessions_by_their_start() -> None:
    trace = synthesise("chat", 300, 1)
    cut = slice_trace(trace, from_s=10, to_s=40)
    starts = trace.arrival_us.values[trace.turn == 0] / 1e6
    assert len(sessions_of(cut)) == ((starts >= 10) & (starts < 40)).sum()
    assert cut.arrival_us.values[0] == 0 and cut.meta.importer == "slice"
    assert cut.meta.options["of"]["options"]["command"].startswith("kbench trace synth chat")
    both = slice_trace(cut, sessions=3, sample=0.5, seed=1)
    assert both.meta.options["of"]["options"]["from_s"] == 10 and both.meta.options["seed"] == 1


def test_sampling_is_seeded_and_near_its_share() -> None:
    trace = synthesise("chat", 600, 1)
    cut = slice_trace(trace, sample=0.25, seed=3)
    assert 150 <= len(cut) < 165
    assert (
        slice_trace(trace, sample=0.25, seed=3).sha256 == cut.sha256 != slice_trace(trace, sample=0.25, seed=4).sha256
    )


def test_sampling_keeps_prefix_trees_together() -> None:
    """Forty families of four prompts each, all behind one block that everybody has."""
    rows = [
        RequestRow(
            session_id=index,
            input_tokens=12,
            output_tokens=1,
            arrival_us=index,
            block_ids=[0, 1 + index % 40, 100 + index],
        )
        for index in range(160)
    ]
    trace = trace_from_rows(rows, TraceMeta(source="t", importer="t", block_tokens=4))
    cut = slice_trace(trace, sample=0.3, seed=2)
    families = cut.block_ids.values.reshape(-1, 3)[:, 1]
    assert len(cut) == 48 and set(np.bincount(families)[1:].tolist()) == {0, 4}


def test_sampling_keeps_the_hit_ratio_of_a_real_trace(real_trace: Callable[[str], Path]) -> None:
    trace = import_trace("mooncake", real_trace("mooncake_conversation_trace.jsonl"))
    whole = trace_info(trace, [512])["infinite_cache_hit_ratio"]["512"]
    by_tree = trace_info(slice_trace(trace, sample=0.2, seed=1), [512])["infinite_cache_hit_ratio"]["512"]
    rng = np.random.default_rng(1)
    rows = [trace.row(int(row)) for row in np.sort(rng.choice(len(trace), len(trace) // 5, replace=False))]
    by_row = trace_info(trace_from_rows(rows, trace.meta), [512])["infinite_cache_hit_ratio"]["512"]
    assert abs(by_tree - whole) < 0.05 < 0.1 < whole - by_row


def test_scaling_moves_sessions_and_not_what_is_in_them() -> None:
    trace = synthesise("chat", 300, 1)
    fast = scale_trace(trace, factor=2)
    assert sorted(sessions_of(fast).values()) == sorted(sessions_of(trace).values())
    starts = trace.arrival_us.values[trace.turn == 0]
    assert np.abs(fast.arrival_us.values[fast.turn == 0] - starts / 2).max() <= 1
    assert trace_info(scale_trace(trace, rate=9.0), [16])["request_rate_per_s"] == pytest.approx(9.0, rel=0.01)
    all_fast = scale_trace(trace, factor=4, everything=True)
    assert all_fast.think_us.values.sum() == pytest.approx(trace.think_us.values.sum() / 4, rel=0.001)
    assert fast.meta.options["factor"] == 2 and all_fast.meta.options["everything"] is True


@LOOSE
@given(ANY, st.sampled_from([0.1, 0.5, 3.0, 1_000.0]))
def test_scaling_keeps_every_request(trace: Trace, factor: float) -> None:
    scaled = scale_trace(trace, factor=factor)
    assert sorted(sessions_of(scaled).values()) == sorted(sessions_of(trace).values())


@LOOSE
@given(stream_traces(), stream_traces(), st.sampled_from([0.2, 1.0, 3.0]))
def test_a_mix_shares_nothing_between_its_parts(one: Trace, other: Trace, share: float) -> None:
    assume(max(one.arrival_us.values) > 0 and max(other.arrival_us.values) > 0)
    mixed = mix_traces([Part("one", one, 1.0), Part("other", other, share)], seed=3)
    assert len(sessions_of(mixed)) <= len(sessions_of(one)) + len(sessions_of(other))
    said = mixed.meta.options["parts"]
    assert sum(part["requests"] for part in said) == len(mixed) and said[0]["sha256"] == one.sha256
    streams = mixed.shared_id.values[mixed.shared_id.known]
    whole = [set(each.shared_id.values[each.shared_id.known].tolist()) for each in (one, other)]
    assert len(np.unique(streams)) <= sum(map(len, whole))


def test_a_mix_has_its_shares_and_one_duration() -> None:
    chat, rag = synthesise("chat", 400, 1), synthesise("rag", 100, 1)
    mixed = mix_traces([Part("chat", chat, 0.5), Part("rag", rag, 0.5)])
    chats, rags = (part["requests"] for part in mixed.meta.options["parts"])
    assert abs(chats - 100) < 13 and rags == 100
    ends = [trace_info(each, [16])["duration_s"] for each in (chat, rag, mixed)]
    assert ends[2] == pytest.approx(max(ends[:2]), rel=0.15)


def test_a_mix_of_a_trace_with_itself_reuses_nothing_across(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(MOONCAKE)
    trace = import_trace("mooncake", tmp_path / "m")
    mixed = mix_traces([Part("a", trace, 1.0), Part("b", trace, 1.0)])
    alone, both = (trace_info(each, [512])["infinite_cache_hit_ratio"]["512"] for each in (trace, mixed))
    assert len(mixed) == 6 and both == pytest.approx(alone)


def test_prompts_that_share_nothing_may_join_blocks_and_others_may_not(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(MOONCAKE)
    (tmp_path / "q").write_bytes(QWEN)
    blocks, sixteen = import_trace("mooncake", tmp_path / "m"), import_trace("qwen-bailian", tmp_path / "q")
    burst = synthesise("burst", 30, 1)
    mixed = mix_traces([Part("m", blocks, 1.0), Part("b", burst, 1.0)])
    assert mixed.content_kind == "blocks" and mixed.meta.block_tokens == 512
    assert "Mooncake" in mixed.meta.citation and mixed.meta.licence == "Apache-2.0"
    for other in (synthesise("chat", 30, 1), sixteen):
        with pytest.raises(UsageError, match="content is described in different ways"):
            mix_traces([Part("m", blocks, 1.0), Part("o", other, 1.0)])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda t: slice_trace(t, from_s=-1), "from_s = -1"),
        (lambda t: slice_trace(t, from_s=5, to_s=5), "to_s = 5"),
        (lambda t: slice_trace(t, sample=0.0), "sample = 0.0"),
        (lambda t: slice_trace(t, sessions=0), "sessions = 0"),
        (lambda t: slice_trace(t, from_s=9e9), "no session is left"),
        (lambda t: scale_trace(t), "one of --factor and --rate"),
        (lambda t: scale_trace(t, factor=1, rate=1), "one of --factor and --rate"),
        (lambda t: scale_trace(t, factor=0.0), "factor = 0.0"),
        (lambda t: scale_trace(t, factor=float("nan")), "factor = nan"),
        (lambda t: mix_traces([Part("a", t, 1.0)]), "parts = 1"),
        (lambda t: mix_traces([Part("a", t, 1.0), Part("b", t, 0.0)]), "b = 0.0"),
    ],
)
def test_options_out_of_range_are_refused(what: Callable[[Trace], Trace], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        what(synthesise("chat", 10, 1))


def test_a_rate_needs_a_duration() -> None:
    row = RequestRow(session_id=0, input_tokens=5, output_tokens=1, arrival_us=0)
    with pytest.raises(UsageError, match="there is no rate"):
        scale_trace(trace_from_rows([row], META), rate=2.0)
