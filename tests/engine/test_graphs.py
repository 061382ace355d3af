"""Captured sizes and padded steps: what is padded to what, why some steps are not, and that nobody notices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kbench.catalog import RoutingControl, parse_point
from kbench.catalog.capability import GraphSupport
from kbench.engine.arena import Place, places_of
from kbench.engine.graphs import StepGraphs
from kbench.engine.ladder import Ladder, StepRecord
from kbench.engine.phases import NullClock, PhaseClock
from kbench.engine.requests import Sampling
from kbench.engine.routing_control import control_routing
from kbench.engine.runner import Engine, output_of
from kbench.engine.sizes import SEQUENCES, PartSize, StepSize
from kbench.measure.exec_batch import BatchState, open_runner
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

torch.set_num_threads(1)
NEVER, SINGLE, UNIFORM, ALWAYS = GraphSupport


def make_ladder(decode: GraphSupport = SINGLE, prefill: GraphSupport = NEVER, **changes: int) -> Ladder:
    keys = {"page_size": 16, "pages": 1_000, "max_seqs": 64, "max_tokens": 2_048} | changes
    return Ladder(**keys, decode=decode, prefill=prefill)  # type: ignore[arg-type]


def decodes(count: int, width: int = 8) -> StepSize:
    return StepSize(count, count, decode=PartSize(count, width))


def make_arm(graph: str = "graph", **changes: object) -> Arm:
    keys = {
        "name": "arm",
        "model": ModelSettings(preset="tiny"),
        "engine": EngineSettings(kv_tokens=4_096, max_batched_tokens=256, max_seqs=40, graph=graph),  # type: ignore[arg-type]
        "prefill": "sdpa",
        "decode": "sdpa-gather",
        "page_size": 16,
        "layout": "NHD",
        "seed": 1,
        "root": ".",
    }
    return Arm.model_validate(keys | changes)


@pytest.mark.parametrize(("batch", "captured"), [(1, 1), (2, 2), (3, 4), (4, 4), (9, 16), (17, 24), (33, 40), (64, 64)])
def test_a_batch_is_padded_to_the_next_captured_size(batch: int, captured: int) -> None:
    padded = make_ladder().pad(decodes(batch), [])
    assert padded == StepSize(captured, captured, decode=PartSize(captured, 8))


def test_the_engines_own_limit_is_captured_and_tables_end_at_the_pool() -> None:
    ladder = make_ladder(max_seqs=35, pages=300)
    assert ladder.sequences == (1, 2, 4, 8, 16, 24, 32, 35)
    assert ladder.widths == (8, 16, 32, 64, 128, 256, 300)
    assert ladder.pad(decodes(33, 257), []) == StepSize(35, 35, decode=PartSize(35, 300))
    assert make_ladder(page_size=64, pages=9).widths == (2, 4, 8, 9)
    assert "513 sequences are above" in str(make_ladder(max_seqs=4_096).pad(decodes(513), []))
    assert max(make_ladder(max_seqs=4_096).sequences) == SEQUENCES[-1]


def test_the_four_support_levels() -> None:
    chunk = StepSize(7, 1, prefill=PartSize(1, 2))
    pair = StepSize(14, 2, prefill=PartSize(2, 2))
    mixed = StepSize(3 + 7, 4, PartSize(3, 8), PartSize(1, 2))
    for level in GraphSupport:
        ladder = make_ladder(level, level)
        served = [not isinstance(ladder.pad(decodes(3), []), str)]
        served.append(not isinstance(ladder.pad(chunk, [7]), str))
        served.append(not isinstance(ladder.pad(pair, [7, 7]), str))
        served.append(not isinstance(ladder.pad(pair, [6, 8]), str))
        served.append(not isinstance(ladder.pad(mixed, [7]), str))
        expected = {
            NEVER: [False] * 5,
            SINGLE: [True, False, False, False, False],
            UNIFORM: [True, True, True, False, False],
            ALWAYS: [True] * 5,
        }
        assert served == expected[level], level


def test_a_mixed_batch_is_padded_in_tokens_and_in_sequences() -> None:
    ladder = make_ladder(SINGLE, ALWAYS)
    size = ladder.pad(StepSize(3 + 70, 3, PartSize(3, 20), PartSize(3, 5)), [40, 20, 10])
    assert size == StepSize(4 + 128, 8, PartSize(4, 32), PartSize(4, 8))
    assert "513 prefill tokens are above" in str(ladder.pad(StepSize(513, 1, prefill=PartSize(1, 33)), [513]))
    small = make_ladder(SINGLE, ALWAYS, max_tokens=100)
    assert "128 padded tokens are above the budget of 100" in str(
        small.pad(StepSize(70, 1, prefill=PartSize(1, 5)), [70])
    )


def run_point(graph: str, point: str, **changes: object) -> tuple[list[int], torch.Tensor, BatchState, StepRecord]:
    """One step of a point: its tokens, its logits, and what the pool holds afterwards."""
    parsed = parse_point(point)
    runner = open_runner(make_arm(graph, **changes), "cpu", [parsed])
    runner.poison_outputs = True
    state = BatchState(runner, parsed, 3)
    state.fill(3)
    state.restore()
    tokens = state.step(NullClock())
    return tokens, runner.last_logits.clone(), state, runner.last_step


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("batch", "captured"), [(1, 1), (3, 4), (9, 16), (17, 24), (33, 40)])
def test_a_padded_step_is_the_step(batch: int, captured: int, layout: str) -> None:
    """A float32 row of a product may depend on how many rows there are, in its last bits: the bound allows that."""
    point = f"{batch}*1@77"
    tokens, logits, _, record = run_point("graph", point, layout=layout)
    plain_tokens, plain_logits, _, plain_record = run_point("eager", point, layout=layout)
    assert (record.mode, record.padded_tokens) == ("padded", captured - batch)
    assert (plain_record.mode, plain_record.reason) == ("eager", "the arm wants eager launches")
    assert tokens == plain_tokens
    assert torch.allclose(logits, plain_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [3, 9, 17, 33])
def test_live_rows_are_bitwise_those_of_a_full_batch(batch: int) -> None:
    """Beside other requests or beside padding: the same rows in a batch of one size have the same bits."""
    parsed = parse_point(f"{batch}*1@77")
    arm = make_arm()
    runner = open_runner(arm, "cpu", [parse_point("40*1@77")])
    state = BatchState(runner, parsed, 3)
    state.fill(3)
    state.restore()
    state.step(NullClock())
    first = runner.last_logits.clone()
    # The padding now computes another token from a page with other contents.
    for layer in runner.pool.layers:
        layer.k[runner.pool.dummy_page] = 1e3
        layer.v[runner.pool.dummy_page] = -1e3
    state.restore()
    state.step(NullClock())
    assert runner.last_step.padded_tokens > 0
    assert torch.equal(first, runner.last_logits)


def test_padding_writes_no_live_page_and_the_null_page_stays_untouched() -> None:
    parsed = parse_point("9*1@50")
    runner = open_runner(make_arm(), "cpu", [parsed])
    state = BatchState(runner, parsed, 3)
    state.fill(3)
    state.restore()
    pages = {page for request in state.requests for page in request.pages}
    assert runner.pool.dummy_page not in pages
    before = [torch.stack((layer.k, layer.v)).clone() for layer in runner.pool.layers]
    state.step(NullClock())
    written = {(request.pages[49 // 16], 49 % 16) for request in state.requests}
    for layer, old in zip(runner.pool.layers, before, strict=True):
        new = torch.stack((layer.k, layer.v))
        same = torch.where(torch.isnan(old), torch.isnan(new), new == old).all(dim=0).flatten(2).all(dim=-1)
        changed = {(page, slot) for page, slot in (~same).nonzero().tolist()}
        assert changed == written | {(runner.pool.dummy_page, 0)}
        assert torch.isnan(layer.k[0]).all()


@pytest.mark.parametrize("how", [None, Sampling(temperature=0.8, top_p=0.9, seed=5), Sampling(repetition_penalty=1.3)])
def test_an_engine_in_graph_mode_generates_the_same(how: Sampling | None) -> None:
    prompts = [[(13 * index * index + 7 * length) % 512 for index in range(length)] for length in (1, 17, 64, 150, 9)]
    asked = [how] * len(prompts) if how else None
    expected = Engine(make_arm("eager"), "cpu", poison=True).generate(prompts, 12, asked)
    engine = Engine(make_arm(), "cpu", poison=True)
    assert engine.generate(prompts, 12, asked) == expected
    modes = {mode for mode, _ in engine.runner.steps}
    assert modes == {"padded", "eager"}
    assert engine.runner.steps["eager", "the prefill implementation captures nothing"] > 0
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.captures <= 4


def test_a_replayed_step_has_one_forward_phase_and_says_why_it_was_not_replayed() -> None:
    parsed = parse_point("3*1@40")
    runner = open_runner(make_arm(), "cpu", [parsed])
    state = BatchState(runner, parsed, 3)
    clock = PhaseClock()
    state.step(NullClock())
    state.restore()
    state.step(clock)
    stamps = clock.take()
    assert stamps.keys() == {"schedule", "prepare", "metadata", "h2d", "forward", "bookkeeping"}
    runner.force(eager="asked for")
    state.restore()
    state.step(clock)
    assert {"attention", "kv_write"} <= clock.take().keys()
    assert runner.last_step == StepRecord("eager", "asked for")
    runner.force()
    assert runner.graphs is not None
    runner.graphs.frozen = True
    runner.graphs.clear()
    state.restore()
    state.step(clock)
    assert runner.last_step == StepRecord("eager", "its size was not captured beforehand")


PREFILL = """
import torch
from kbench.kernels.declare import implementation
from kbench.kernels.registry import load


@implementation("attention.prefill", graph=True)
class Prefill:
    '''Reads every length on the device, as a captured launch does.'''

    def __init__(self):
        self.inner = load("reference", "attention.prefill")

    def convert(self, kv):
        return kv

    def plan(self, batch, spec, kv):
        return batch, spec

    def run(self, q, kv, plan, out):
        from kbench.ops.attention import AttentionBatch

        batch, spec = plan
        starts, lens = batch.query_start.tolist(), batch.seq_lens.tolist()
        queries = [stop - start for start, stop in zip(starts, starts[1:])]
        assert sum(queries) <= len(q) and batch.max_query >= max(queries) and batch.max_kv >= max(lens)
        exact = AttentionBatch.build(queries, lens, batch.block_table.tolist(), q.device)
        rows = starts[-1]
        out[:rows] = self.inner.run(q[:rows], kv, self.inner.plan(exact, spec, kv), out[:rows].clone())
        return out
"""


def test_mixed_batches_are_padded_where_the_prefill_can_be_captured(tmp_path: Path) -> None:
    (tmp_path / "prefill.py").write_text(PREFILL)
    prompts = [[(13 * index * index + 7 * length) % 512 for index in range(length)] for length in (1, 17, 64, 150, 9)]
    settings = EngineSettings(kv_tokens=4_096, max_batched_tokens=64, max_seqs=5)
    expected = Engine(make_arm("eager", engine=settings), "cpu", poison=True).generate(prompts, 12)
    settings = EngineSettings(kv_tokens=4_096, max_batched_tokens=300, max_seqs=5, graph="graph")
    arm = make_arm(engine=settings, prefill="prefill.py:Prefill", root=str(tmp_path))
    engine = Engine(arm, "cpu", poison=True)
    assert engine.generate(prompts, 12) == expected
    assert set(engine.runner.steps) == {("padded", "")}
    mixed = run_point("graph", "1*30@70+3*1@50", prefill="prefill.py:Prefill", root=str(tmp_path))
    plain = run_point("eager", "1*30@70+3*1@50", prefill="prefill.py:Prefill", root=str(tmp_path))
    assert mixed[3] == StepRecord("padded", "", padded_tokens=(32 - 30) + (4 - 3))
    assert mixed[0] == plain[0]
    assert torch.allclose(mixed[1], plain[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graph", ["eager", "graph"])
@pytest.mark.parametrize("kv_tokens", [4_096, 320])
@pytest.mark.parametrize("last", [Sampling(), Sampling(repetition_penalty=1.3, frequency_penalty=0.4)])
def test_overlapped_steps_give_the_same_tokens(graph: str, kv_tokens: int, last: Sampling) -> None:
    """The host schedules a step before it knows the tokens of the one before, also where requests are preempted."""
    prompts = [[(13 * index * index + 7 * length) % 512 for index in range(length)] for length in (1, 17, 64, 150, 9)]
    how = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5), Sampling(), Sampling(), last]
    expected = Engine(make_arm("eager"), "cpu", poison=True).generate(prompts, 12, how)
    settings = EngineSettings(kv_tokens=kv_tokens, max_batched_tokens=256, graph=graph)  # type: ignore[arg-type]
    engine = Engine(make_arm(engine=settings), "cpu", poison=True)
    requests = [engine.add(prompt, 12, sampling) for prompt, sampling in zip(prompts, how, strict=True)]
    ticket, steps = None, 0
    while engine.has_work or ticket is not None:
        ticket, _ = engine.step_overlapped(ticket)
        steps += 1
    assert [output_of(request) for request in requests] == expected
    assert (engine.scheduler.counters.preemptions > 0) == (kv_tokens == 320)
    assert steps > engine.scheduler.counters.steps


def test_sizes_captured_ahead_serve_an_engine_and_touch_only_the_dummy_page() -> None:
    settings = EngineSettings(kv_tokens=512, max_batched_tokens=256, max_seqs=5, graph="graph")
    engine = Engine(make_arm(engine=settings), "cpu", poison=True)
    runner = engine.runner
    runner.capture_ahead()
    assert runner.graphs is not None
    assert runner.graphs.captures == len(runner.ladder.sequences) * len(runner.ladder.widths) == 4 * 3
    for layer in runner.pool.layers:
        assert torch.isnan(layer.k[: runner.pool.dummy_page]).all()
    prompts = [[(7 * index + length) % 512 for index in range(length)] for length in (1, 17, 64)]
    expected = Engine(make_arm("eager"), "cpu", poison=True).generate(prompts, 12)
    assert engine.generate(prompts, 12) == expected
    assert runner.graphs.captures == 12
    assert set(runner.steps) == {("padded", ""), ("eager", "the prefill implementation captures nothing")}


def test_declared_routing_is_captured_and_a_look_on_the_host_is_not() -> None:
    parsed = parse_point("3*1@77")
    logits = []
    for graph in ("eager", "graph"):
        runner = open_runner(make_arm(graph, model=ModelSettings(preset="tiny-moe")), "cpu", [parsed])
        control_routing(runner, RoutingControl("balanced"), seed=1)
        state = BatchState(runner, parsed, 3)
        state.fill(3)
        state.restore()
        state.step(NullClock())
        logits.append(runner.last_logits.clone())
    assert (runner.last_step.mode, runner.last_step.padded_tokens) == ("padded", 1)
    assert torch.allclose(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    runner.routing = lambda layer, chosen: chosen
    state.restore()
    state.step(NullClock())
    assert runner.last_step == StepRecord("eager", "the experts' routing is overruled")
    control_routing(runner, RoutingControl("hot"), seed=1)
    state.restore()
    state.step(NullClock())
    assert runner.last_step.mode == "padded"
    assert not torch.allclose(runner.last_logits, logits[0], rtol=1e-3)


@pytest.mark.parametrize("page_size", [16, 64])
def test_the_buffers_have_room_for_every_captured_size_from_the_start(page_size: int) -> None:
    """Where they grow, all graphs are dropped, and none is captured any more once a replay has begun."""
    settings = EngineSettings(kv_tokens=65_536, max_batched_tokens=128, max_seqs=40, graph="graph")
    runner = Engine(make_arm(engine=settings, page_size=page_size), "cpu").runner
    ladder = replace(runner.ladder, decode=ALWAYS, prefill=ALWAYS)
    widest = PartSize(40, ladder.widths[-1])
    sizes = [ladder.pad(StepSize(40, 40, decode=widest), [])]
    sizes.append(ladder.pad(StepSize(64 + 40, 41, widest, PartSize(1, widest.width)), [64]))
    builder = runner._stepper.builder
    room = builder.arena.device(Place(0, 0, False)).untyped_storage().nbytes()
    for size in sizes:
        assert isinstance(size, StepSize)
        assert places_of(size).bytes <= room


class _Recording:
    """A CUDA graph as far as recording goes; it refuses to end what was broken off, as the real one does."""

    def __init__(self) -> None:
        self.ended = 0

    def capture_begin(self, **_: object) -> None: ...

    def capture_end(self) -> None:
        self.ended += 1
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_capture_that_breaks_off_stops_recording_and_tells_what_broke_it(error: BaseException) -> None:
    def body() -> torch.Tensor:
        raise error

    graph = _Recording()
    with pytest.raises(type(error)) as caught:
        StepGraphs(torch.device("cpu"))._record(graph, body)  # type: ignore[arg-type]
    assert caught.value is error
    assert graph.ended == 1


def test_a_capture_that_cannot_be_ended_is_no_graph() -> None:
    with pytest.raises(RuntimeError, match="previous error"):
        StepGraphs(torch.device("cpu"))._record(_Recording(), lambda: torch.zeros(1))  # type: ignore[arg-type]
