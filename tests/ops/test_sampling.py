"""Sampling against transformers' logits processors and torch; what is judged wrong, and what a generator must show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from kbench.catalog import parse_shape, resolve_shape
from kbench.kernels.base import PlainKernel
from kbench.kernels.sampling import TorchChain, TorchDraw, TorchDrawExponential
from kbench.kernels.verify import verify
from kbench.measure.answers import copied
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.ops.sampling import OWN_GENERATOR
from kbench.ops.support import chi_square, inverse_cdf, support
from kbench.ops.tensors import TensorInputs
from kbench.protocol import Status

MINUS_INFINITY = float("-inf")
CPU = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), 3)


def made(op: str, shape: str, kind: str = "random", settings: InputSettings = CPU) -> TensorInputs:
    inputs: TensorInputs = load_op(op).build(resolve_shape(op, parse_shape(shape), None), settings, kind)[0]
    return inputs


def held(op: str, answer: Any, inputs: TensorInputs) -> str:
    found = load_op(op)
    return found.judge(answer, found.standard(inputs)).problem


# ------------------------------------------------------------------------------------------ filters


@pytest.mark.parametrize("kind", ["random", "peaked", "tied", "single", "extreme"])
@pytest.mark.parametrize("k", [1, 7, 111, 500])
def test_top_k_is_that_of_transformers(kind: str, k: int) -> None:
    inputs = made("sampling.top_k", f"rows=6,vocab=111,k={k}", kind)
    logits = inputs.arguments["logits"]
    expected = theirs.TopKLogitsWarper(top_k=k)(None, logits)
    assert torch.equal(load_op("sampling.top_k").exact(inputs)[0].float(), expected)
    assert held("sampling.top_k", expected, inputs) == ""


@pytest.mark.parametrize("kind", ["random", "peaked", "single"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0])
def test_top_p_is_that_of_transformers(kind: str, p: float) -> None:
    inputs = made("sampling.top_p", f"rows=6,vocab=111,p={p}", kind)
    expected = theirs.TopPLogitsWarper(top_p=p)(None, inputs.arguments["logits"])
    assert torch.equal(load_op("sampling.top_p").exact(inputs)[0].float(), expected)
    assert held("sampling.top_p", expected, inputs) == ""


def test_repetition_is_that_of_transformers() -> None:
    inputs = made("sampling.penalties", "rows=4,vocab=111")
    given_ = inputs.arguments
    given_["repetition"].fill_(1.3), given_["presence"].zero_(), given_["frequency"].zero_()
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.3)(given_["history"], given_["logits"])
    torch.testing.assert_close(load_op("sampling.penalties").exact(inputs)[0].float(), expected)


def test_presence_and_frequency_count_generated_tokens() -> None:
    inputs = made("sampling.penalties", "rows=4,vocab=111,history=24")
    found = load_op("sampling.penalties").exact(inputs)[0]
    given_ = inputs.arguments
    for row in range(4):
        seen = given_["history"][row].tolist()
        generated = seen[int(given_["prompt"][row]) :]
        for token in range(111):
            value = float(given_["logits"][row, token])
            if token in seen:
                factor = float(given_["repetition"][row])
                value = value / factor if value > 0 else value * factor
            value -= float(given_["frequency"][row]) * generated.count(token)
            value -= float(given_["presence"][row]) * (token in generated)
            assert float(found[row, token]) == pytest.approx(value, rel=1e-6, abs=1e-6)


@given(vocab=st.integers(1, 100), seed=st.integers(0, 1_000))
def test_a_bit_is_a_token(vocab: int, seed: int) -> None:
    settings = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), seed)
    inputs = made("sampling.mask", f"rows=3,vocab={vocab}", settings=settings)
    words = inputs.arguments["bits"].tolist()
    kept = torch.tensor([[words[row][t // 32] >> (t % 32) & 1 for t in range(vocab)] for row in range(3)]).bool()
    assert torch.equal(torch.isfinite(load_op("sampling.mask").exact(inputs)[0]), kept)


def test_of_tied_tokens_any_may_be_kept_but_not_too_few() -> None:
    inputs = made("sampling.top_k", "rows=1,vocab=6,k=3")
    logits = inputs.arguments["logits"]
    logits.copy_(torch.tensor([[5.0, 1.0, 1.0, 1.0, 0.0, 5.0]]))
    for kept, right in (((0, 5, 1), True), ((0, 5, 1, 2, 3), True), ((0, 5), False), ((0, 1, 2), False),
                        ((0, 5, 1, 4), False)):  # fmt: skip
        answer = torch.full_like(logits, MINUS_INFINITY)
        answer[0, list(kept)] = logits[0, list(kept)]
        assert (held("sampling.top_k", answer, inputs) == "") == right, kept
    answer = logits.clone()
    answer[0, 0] = 4.0
    assert "neither kept" in held("sampling.top_k", answer, inputs)


def test_the_token_that_crosses_p_is_kept() -> None:
    inputs = made("sampling.top_p", "rows=1,vocab=4,p=0.7")
    logits = inputs.arguments["logits"]
    logits.copy_(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log())
    for kept, right in (((0, 1), True), ((0,), False), ((0, 1, 2), False), ((1, 2), False)):
        answer = torch.full_like(logits, MINUS_INFINITY)
        answer[0, list(kept)] = logits[0, list(kept)]
        assert (held("sampling.top_p", answer, inputs) == "") == right, kept


# --------------------------------------------------------------------------------------------- draw


def test_a_draw_inverts_the_cumulative_mass() -> None:
    inputs = made("sampling.draw", "rows=4,vocab=5")
    inputs.arguments["logits"].copy_(torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4]).log().expand(4, 5))
    inputs.arguments["uniform"].copy_(torch.tensor([0.0, 0.2999, 0.3001, 0.99999]))
    assert load_op("sampling.draw").exact(inputs)[0].tolist() == [0, 1, 3, 4]
    assert held("sampling.draw", torch.tensor([0, 1, 3, 4]), inputs) == ""
    assert "cannot be drawn" in held("sampling.draw", torch.tensor([0, 2, 3, 4]), inputs)
    assert "cumulative mass" in held("sampling.draw", torch.tensor([1, 1, 3, 4]), inputs)
    assert "dtype" in held("sampling.draw", torch.tensor([0, 1, 3, 4], dtype=torch.int32), inputs)


def test_nothing_left_is_answered_with_no_token() -> None:
    for op in ("sampling.draw", "sampling.chain"):
        inputs = made(op, "rows=4,vocab=111", "dead")
        expected = load_op(op).exact(inputs)[0]
        assert (expected == -1).any()
        assert held(op, expected, inputs) == ""
        assert "cannot be drawn" in held(op, expected.clamp_min(0), inputs)


def test_temperature_zero_is_greedy_and_any_tied_token_is_right() -> None:
    inputs = made("sampling.draw", "rows=3,vocab=5,temperature=0.0")
    inputs.arguments["logits"].copy_(torch.tensor([1.0, 3.0, 0.0, 3.0, 2.0]).expand(3, 5))
    inputs.arguments["uniform"].copy_(torch.tensor([0.2, 0.2, 0.8]))
    assert held("sampling.draw", torch.tensor([1, 1, 3]), inputs) == ""
    assert "cannot be drawn" in held("sampling.draw", torch.tensor([1, 4, 3]), inputs)


@given(seed=st.integers(0, 10_000))
def test_the_chain_is_that_of_transformers(seed: int) -> None:
    """Penalties (repetition), temperature, top-k, top-p in their order; then torch's own cumulative sum."""
    settings = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), seed)
    inputs = made("sampling.chain", "rows=3,vocab=200,k=20,p=0.8,temperature=0.7", settings=settings)
    given_ = inputs.arguments
    given_["presence"].zero_(), given_["frequency"].zero_(), given_["bits"].fill_(-1)
    scores = theirs.RepetitionPenaltyLogitsProcessor(1.3)(given_["history"], given_["logits"])
    for step in (theirs.TemperatureLogitsWarper(0.7), theirs.TopKLogitsWarper(20), theirs.TopPLogitsWarper(0.8)):
        scores = step(given_["history"], scores)
    total = scores.double().softmax(dim=-1).cumsum(dim=-1)
    tokens = torch.searchsorted(total, given_["uniform"][:, None].double(), right=True)[:, 0]
    assert held("sampling.chain", tokens, inputs) == ""


def test_a_masked_token_is_never_right() -> None:
    inputs = made("sampling.chain", "rows=40,vocab=111")
    right = load_op("sampling.chain").exact(inputs)[0]
    banned = ((inputs.arguments["bits"][:, 0].long() & 1) == 0).nonzero()[0]
    right[banned] = 0
    assert "cannot be drawn" in held("sampling.chain", right, inputs)


# -------------------------------------------------------------------------------------- generators


class Skewed(PlainKernel):
    """Its own generator, at another temperature."""

    name = "skewed"
    own_generator = True

    def run(self, state: dict[str, Any], plan: None, out: Any) -> torch.Tensor:
        return torch.multinomial((state["logits"].float() / 1.5).softmax(dim=-1), 1)[:, 0]


class Honest(PlainKernel):
    name = "honest"
    own_generator = True

    def run(self, state: dict[str, Any], plan: None, out: Any) -> torch.Tensor:
        return torch.multinomial(state["logits"].float().softmax(dim=-1), 1)[:, 0]


def test_a_generator_of_its_own_is_held_to_frequencies() -> None:
    torch.manual_seed(1)
    op = load_op("sampling.draw")
    shape = resolve_shape("sampling.draw", parse_shape("rows=4,vocab=64"), None)
    inputs = op.build(shape, CPU, "same")[0]
    standard = op.standard(inputs)
    for implementation, right in ((Honest(), True), (Skewed(), False)):
        steps = op.bind(implementation, inputs)
        answer = steps.run(steps.convert(), None, op.outputs(inputs))
        assert answer[1] == OWN_GENERATOR and not op.repeats(copied(answer))
        judgement = op.judge(copied(answer), standard)
        assert judgement.ok == right, judgement.problem
        assert right or "chi-square" in judgement.problem


def test_a_generator_that_is_not_declared_is_wrong() -> None:
    torch.manual_seed(1)
    undeclared = Honest()
    undeclared.own_generator = False  # type: ignore[misc]
    shape = resolve_shape("sampling.draw", parse_shape("rows=4,vocab=64"), None)
    assert verify(undeclared, load_op("sampling.draw"), shape, CPU).status is Status.INCORRECT


def test_the_exponential_race_passes_and_says_so() -> None:
    torch.manual_seed(2)
    shape = resolve_shape("sampling.draw", parse_shape("rows=4,vocab=64"), None)
    assert TorchDrawExponential.own_generator and not hasattr(TorchDraw, "own_generator")
    found = verify(TorchDrawExponential(), load_op("sampling.draw"), shape, CPU)
    assert found.status is Status.OK, found.message


def test_chi_square_is_that_of_scipy_with_merged_bins() -> None:
    from scipy.stats import chisquare

    seen = torch.tensor([40.0, 30.0, 18.0, 3.0, 6.0, 3.0])
    expected = torch.tensor([45.0, 30.0, 15.0, 4.0, 4.0, 2.0])
    assert chi_square(seen, expected) == pytest.approx(chisquare([40, 30, 18, 12], [45, 30, 15, 10]).pvalue)


# -------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("vocab", [111, 32_000, 128_256])
def test_one_token_left_of_a_large_vocabulary(vocab: int) -> None:
    """At temperature, k and p of any kind: only one token is possible."""
    inputs = made("sampling.chain", f"rows=2,vocab={vocab},allowed=1.0", "single")
    only = torch.isfinite(inputs.arguments["logits"]).int().argmax(dim=-1)
    kernel = TorchChain()
    answer = kernel.run(inputs.arguments, kernel.plan(inputs.arguments), ())
    assert torch.equal(answer, only)
    assert held("sampling.chain", answer, inputs) == ""


def test_top_p_is_of_what_top_k_left() -> None:
    values = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    k, p, one = torch.tensor([2]), torch.tensor([0.5]), torch.ones(1)
    assert support(values, k, p, one).possible[0].tolist() == [True, False, False, False]  # 0.4 of 0.7 is over a half
    assert support(values, k * 0, p, one).possible[0].tolist() == [True, True, False, False]
    assert inverse_cdf(support(values, k * 0, one, one), torch.tensor([0.95])).tolist() == [3]


@pytest.mark.parametrize(
    ("axes", "seed"), [("vocab=16384,k=0", 1), ("vocab=16384,k=0", 3), ("vocab=50000,temperature=0.0", 2)]
)
def test_a_wrong_chain_shows_in_a_large_vocabulary_without_filters(axes: str, seed: int) -> None:
    """Penalties fall on tokens that are drawn, and a tie that greedy may break either way is no wrong model."""
    op = load_op("sampling.chain")
    shape = resolve_shape("sampling.chain", parse_shape(f"rows=16,{axes}"), None)
    settings = InputSettings(16, "NHD", torch.bfloat16, torch.device("cpu"), seed)
    report = op.nulls(tuple(op.standard(op.build(shape, settings, kind)[0]) for kind in ("random", "peaked")))
    assert report.survived == ()
    assert "penalties left out" in report.killed
