"""Captured CUDA graphs: the replayed step is the eager step, whatever is padded, mixed, overlapped or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kbench.catalog import Case, parse_point
from kbench.engine.phases import NullClock
from kbench.engine.requests import Sampling
from kbench.engine.runner import Engine, Runner, output_of
from kbench.measure.exec_batch import BatchState, open_runner
from kbench.measure.exec_correct import worst_row
from kbench.measure.step import StepTrial
from kbench.protocol import Status
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BOUND = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative L2 between a replayed and an eager step where splits or padded sizes differ: rounding of the dtype only."""


def make_arm(dtype: str = "float32", preset: str = "tiny", graph: str = "graph", **changes: Any) -> Arm:
    keys: dict[str, Any] = {
        "name": "arm",
        "model": ModelSettings(preset=preset, dtype=dtype),  # type: ignore[arg-type]
        "engine": EngineSettings(kv_tokens=4_096, max_batched_tokens=512, max_seqs=64, graph=graph),  # type: ignore[arg-type]
        "prefill": "triton-prefill",
        "decode": "triton-paged",
        "page_size": 16,
        "layout": "NHD",
        "seed": 1,
        "root": ".",
    }
    return Arm.model_validate(keys | changes)


def both_ways(arm: Arm, point: str) -> tuple[Runner, list[torch.Tensor], list[list[int]]]:
    """Logits and tokens of a point: replayed twice, then eager."""
    parsed = parse_point(point)
    runner = open_runner(arm, "cuda", [parsed])
    state = BatchState(runner, parsed, 3)
    state.fill(3)
    logits, tokens = [], []
    for eager in ("", "", "asked for"):
        runner.force(eager=eager)
        state.restore()
        tokens.append(state.step(NullClock()))
        logits.append(runner.last_logits.clone())
        assert runner.last_step.mode == ("eager" if eager else "graph"), runner.last_step
    runner.force()
    return runner, logits, tokens


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("point", ["1*1@128", "4*1@512", "32*1@1024"])
def test_a_replay_in_its_own_size_has_the_bits_of_the_eager_step(point: str, dtype: str, layout: str) -> None:
    _, logits, tokens = both_ways(make_arm(dtype, "small", layout=layout), point)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decode", ["triton-paged", "triton-paged-features", "sdpa-gather"])
@pytest.mark.parametrize("batch", [3, 9, 17, 33])
def test_a_padded_replay_is_the_eager_step_within_rounding(batch: int, decode: str, dtype: str) -> None:
    runner, logits, _ = both_ways(make_arm(dtype, "small", decode=decode), f"{batch}*1@300")
    assert torch.equal(logits[0], logits[1])
    assert worst_row(logits[0].double(), logits[2].double()) <= BOUND[dtype]
    for layer in runner.pool.layers:
        assert torch.isnan(layer.k[0]).all()  # the null page


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("point", ["1*100", "1*100@300+3*1@200", "3*20@50+1*33+9*1@700"])
def test_mixed_batches_are_replayed(point: str, dtype: str) -> None:
    _, logits, _ = both_ways(make_arm(dtype, "small"), point)
    assert torch.equal(logits[0], logits[1])
    assert worst_row(logits[0].double(), logits[2].double()) <= BOUND[dtype]


def test_steps_are_captured_again_when_buffers_grow() -> None:
    """The large batch needs more room for its table than the small one: all graphs are dropped, and made anew."""
    points = [parse_point(text) for text in ("1*1@128", "32*1@4096")]
    runner = open_runner(make_arm("bfloat16", "small"), "cuda", points)
    states = [BatchState(runner, point, 3, first_id=100 * index) for index, point in enumerate(points)]
    tokens: list[list[list[int]]] = [[], []]
    for _ in range(3):
        for index, state in enumerate(states):
            state.fill(3)
            state.restore()
            tokens[index].append(state.step(NullClock()))
            assert (runner.last_step.mode, runner.last_step.reason) == ("graph", "")
    assert runner.graphs is not None
    assert runner.graphs.captures >= 3
    assert all(found == each[0] for each in tokens for found in each)


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-window"])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("kv_tokens", [4_096, 320])
def test_engines_generate_the_same(kv_tokens: int, overlapped: bool, preset: str) -> None:
    prompts = [[(13 * index * index + 7 * length) % 512 for index in range(length)] for length in (1, 17, 64, 150, 9)]
    how = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5), Sampling(), Sampling(), Sampling()]
    decode = "triton-paged-features" if preset == "tiny-window" else "triton-paged"
    expected = Engine(make_arm(preset=preset, graph="eager", decode=decode), "cuda").generate(prompts, 12, how)
    settings = EngineSettings(kv_tokens=kv_tokens, max_batched_tokens=256, graph="graph")
    engine = Engine(make_arm(preset=preset, engine=settings, decode=decode), "cuda", poison=True)
    engine.runner.poison_outputs = False
    requests = [engine.add(prompt, 12, sampling) for prompt, sampling in zip(prompts, how, strict=True)]
    ticket = None
    while engine.has_work or ticket is not None:
        if overlapped:
            ticket, _ = engine.step_overlapped(ticket)
        else:
            engine.step()
    assert [output_of(request) for request in requests] == expected
    assert engine.runner.steps["graph", ""] > 0


def test_drawn_tokens_are_replayed_and_those_with_penalties_are_drawn_from_the_graphs_logits() -> None:
    prompts = [[(13 * index * index + 7 * length) % 512 for index in range(length)] for length in (1, 17, 64)]
    drawn = [Sampling(temperature=0.9, top_p=0.8, seed=index) for index in range(2)]
    for last in (Sampling(), Sampling(temperature=0.7, top_k=9, seed=2), Sampling(repetition_penalty=1.2)):
        how = [*drawn, last]
        expected = Engine(make_arm(prefill="sdpa", decode="sdpa-gather", graph="eager"), "cpu").generate(
            prompts, 12, how
        )
        for graph in ("eager", "graph"):
            assert Engine(make_arm(graph=graph), "cuda").generate(prompts, 12, how) == expected


def test_sizes_captured_ahead_serve_a_replay_without_another_capture() -> None:
    prompts = [[(7 * index + length) % 512 for index in range(length)] for length in (1, 17, 64, 150)]
    settings = EngineSettings(kv_tokens=2_048, max_batched_tokens=256, max_seqs=5, graph="graph")
    engine = Engine(make_arm(engine=settings, prefill="sdpa"), "cuda", poison=True)
    engine.runner.poison_outputs = False
    engine.runner.capture_ahead()
    graphs = engine.runner.graphs
    assert graphs is not None
    captured = graphs.captures
    assert captured == len(engine.runner.ladder.sequences) * len(engine.runner.ladder.widths)
    assert engine.generate(prompts, 12) == Engine(make_arm(graph="eager"), "cuda").generate(prompts, 12)
    assert graphs.captures == captured
    modes = {mode for mode, _ in engine.runner.steps}
    assert modes == {"graph", "eager"}
    assert engine.runner.steps["eager", "the prefill implementation captures nothing"] > 0


SYNCHRONISES = """
import torch
from kbench.kernels.declare import implementation
from kbench.kernels.registry import load


@implementation("attention.decode", devices=("cuda",), graph=True)
class Synchronises:
    def __init__(self):
        self.inner = load("triton-paged", "attention.decode")

    def convert(self, kv):
        return kv

    def plan(self, batch, spec, kv):
        return self.inner.plan(batch, spec, kv)

    def run(self, q, kv, plan, out):
        torch.cuda.synchronize()
        return self.inner.run(q, kv, plan, out)
"""


def test_a_capture_that_fails_is_launched_eagerly_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "sync.py").write_text(SYNCHRONISES)
    parsed = parse_point("4*1@100")
    runner = open_runner(make_arm(decode="sync.py:Synchronises", root=str(tmp_path)), "cuda", [parsed])
    state = BatchState(runner, parsed, 3)
    state.fill(3)
    tokens = []
    for _ in range(2):
        state.restore()
        tokens.append(state.step(NullClock()))
        assert runner.last_step.mode == "eager"
        assert "capture failed" in runner.last_step.reason
    assert tokens[0] == tokens[1]
    other = open_runner(make_arm(), "cuda", [parsed])
    state = BatchState(other, parsed, 3)
    state.fill(3)
    assert state.step(NullClock()) == tokens[0]
    assert other.last_step.mode == "graph"


@pytest.mark.parametrize("point", ["1*1@127", "9*1@1000", "32*1@1000"])
def test_a_step_trial_replays_and_its_phases_close(point: str) -> None:
    arm = make_arm("bfloat16", "small", page_size=64)
    trial = StepTrial(Case("step", "step", "small", point), arm, "cuda", Measure(window_steps=3, window_ms=20.0), 1)
    prepared = trial.prepare()
    assert prepared.status is Status.OK, f"{prepared.message} {prepared.facts}"
    assert prepared.facts["graph"] == "graph"
    assert {item.metric for item in trial.window()} >= {"step_time", "device_time"}
    finished = trial.finish()
    assert finished.status is Status.OK, finished.message
    taken = {item.metric: item.value for item in finished.measurements}
    assert 0.9 < taken["closure"] <= 1.0
    assert taken["phase_device.forward"] > 0
    assert "phase_device.attention" not in taken
    assert taken["eager_step_time"] > 0 < taken["overlapped_step_time"]
    traced = trial.trace()
    assert traced.facts["graph"] == "graph"
    assert traced.facts["selection"]["decode"]["observed"] == "triton-paged"
