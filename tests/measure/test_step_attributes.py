"""What attributes of a step case do to its pages, tokens and requests; each step is right and starts from one state."""

from __future__ import annotations

import itertools

import pytest
import torch

from kbench.catalog import Case, parse_step
from kbench.engine.phases import NullClock
from kbench.engine.scheduler import Scheduler
from kbench.measure.exec_batch import BatchState, open_runner, scattered_tables
from kbench.measure.step import StepTrial
from kbench.protocol import Outcome, Status
from kbench.suite.schema import Arm, ModelSettings

from .test_step import SHORT, make_arm

NULL = NullClock()


def opened(text: str, arm: Arm | None = None) -> BatchState:
    shape = parse_step(text)
    assert shape.point is not None
    runner = open_runner(arm or make_arm(), "cpu", [shape.point])
    return BatchState(runner, shape.point, 1, attributes=shape.attributes)


def make_trial(text: str, **changes: object) -> StepTrial:
    shape = parse_step(text)
    case = Case("step", "step", "tiny", str(shape.point), shape.attributes.pairs())
    return StepTrial(case, make_arm(**changes), "cpu", SHORT, 1)


@pytest.mark.parametrize(
    "text",
    [
        "4*1@200;page=64;tail=full",
        "4*1@200;prefix_share=0.7;tail=partial",
        "3*1@200+1*40@130c",
        "4*1@200;scatter=frag:0.5;sampling=grammar",
        "4*1@200;sampling=topkp;graph=off",
    ],
)
def test_a_case_with_attributes_is_right_and_says_what_it_was(text: str) -> None:
    trial = make_trial(text)
    outcome = trial.prepare()
    assert outcome.status is Status.OK, outcome.message
    assert outcome.facts["attributes"] == dict(parse_step(text).attributes.pairs())
    trial.window()
    assert trial.finish().status is Status.OK


def test_pages_and_tails_are_those_that_were_asked_for() -> None:
    facts = make_trial("4*1@200;page=64;tail=full").prepare().facts
    assert (facts["page_size"], facts["point"]) == (64, "4*1@256")


def test_a_graph_that_was_asked_for_is_not_replaced_in_silence() -> None:
    outcome: Outcome = make_trial("4*1@200;graph=on").prepare()
    assert outcome.status is Status.UNSUPPORTED
    assert "graph=on" in outcome.message and "\n" not in outcome.message


def test_experts_are_visited_as_declared() -> None:
    arm = {"model": ModelSettings(preset="tiny-moe")}
    outcome = make_trial("8*1@100;moe=hot", **arm).prepare()
    assert outcome.status is Status.OK, outcome.message
    assert outcome.facts["attributes"] == {"moe": "hot"}
    missing = make_trial("8*1@100;moe=hot").prepare()
    assert missing.status is Status.UNSUPPORTED
    assert "has no experts" in missing.message


def test_a_share_of_the_pages_is_out_of_order() -> None:
    def neighbours(text: str) -> float:
        shape = parse_step(text)
        assert shape.point is not None
        runner = open_runner(make_arm(), "cpu", [shape.point])
        scheduler = Scheduler(runner.config)
        tables = scattered_tables(scheduler, shape.point, 16, 1, shape.attributes.scatter)
        flat = [page for table in tables for page in table]
        assert len(set(flat)) == len(flat) == 4 * 63
        return sum(b - a == 1 for a, b in itertools.pairwise(flat)) / (len(flat) - 1)

    assert neighbours("4*1@1000;scatter=seq") == 1.0
    assert neighbours("4*1@1000") < 0.1
    assert 0.1 < neighbours("4*1@1000;scatter=frag:0.5") < 0.6


def test_a_common_prefix_lies_on_the_same_pages_and_no_other() -> None:
    state = opened("3*1@300+1*20@250;prefix_share=0.6")
    tables = [request.pages for request in state.requests]
    for first, second in itertools.combinations(tables, 2):
        assert first[:8] == second[:8]  # 128 of 230 tokens
        assert not set(first[8:]) & set(second[8:])


def test_a_chunk_ends_where_the_budget_does_and_samples_nothing() -> None:
    state = opened("3*1@200+1*40@130c")
    state.fill(1)
    state.check_plan()
    state.restore()
    assert len(state.step(NULL)) == 3
    state.restore()
    assert len(state.step(NULL)) == 3


@pytest.mark.parametrize("text", ["3*1@300+1*20@250;prefix_share=0.6", "3*1@200+1*40@130c", "4*1@96;sampling=topkp"])
def test_every_repetition_starts_from_the_same_state(text: str) -> None:
    state = opened(text)
    state.fill(1)
    pool = state._runner.pool
    seen = []
    for _ in range(3):
        state.restore()
        before = [torch.stack([layer.k, layer.v]) for layer in pool.layers]
        seen.append(state.step(NULL))
        assert not torch.equal(
            before[0].nan_to_num(9.0), torch.stack([pool.layers[0].k, pool.layers[0].v]).nan_to_num(9.0)
        )
        state.restore()
        for kept, layer in zip(before, pool.layers, strict=True):
            assert torch.equal(kept.nan_to_num(9.0), torch.stack([layer.k, layer.v]).nan_to_num(9.0))
    assert seen[0] == seen[1] == seen[2]


def test_greedy_choices_obey_the_grammar() -> None:
    state = opened("9*1@96;sampling=grammar")
    state.fill(1)
    for index, token in enumerate(state.step(NULL)):
        assert token % 8 == index % 8
