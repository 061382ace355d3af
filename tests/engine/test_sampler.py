"""The sampler: each link of the chain, draws that depend on seed and position only, and their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from kbench.engine.requests import GREEDY, Sampling
from kbench.engine.sampler import FULLY_MASKED_TOKEN, Ask, gumbel, sample
from kbench.errors import UsageError

CPU = torch.device("cpu")


def ask(sampling: Sampling, position: int = 9, tokens: tuple[int, ...] = (1, 2), prompt: int = 1) -> Ask:
    return Ask(sampling, position, tokens, prompt)


def one(logits: list[float], sampling: Sampling, **more: object) -> int:
    return int(sample(torch.tensor([logits]), [ask(sampling, **more)])[0])  # type: ignore[arg-type]


def test_greedy_takes_the_largest() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]), [ask(GREEDY)] * 2).tolist() == [1, 0]


def test_penalties_apply_to_greedy_choices() -> None:
    logits = [1.0, 4.0, 3.9, -1.0]
    assert one(logits, Sampling(repetition_penalty=2.0), tokens=(1,)) == 2  # positive: divided
    assert one([-1.0, -0.6, -5.0], Sampling(repetition_penalty=2.0), tokens=(1,)) == 0  # negative: multiplied
    assert one(logits, Sampling(presence_penalty=0.2), tokens=(1, 1), prompt=0) == 2
    assert one(logits, Sampling(presence_penalty=0.2), tokens=(1, 1), prompt=2) == 1  # a prompt token is no output
    assert one(logits, Sampling(frequency_penalty=0.06), tokens=(1, 1), prompt=0) == 2
    assert one(logits, Sampling(frequency_penalty=0.06), tokens=(1,), prompt=0) == 1


def test_masks_apply_and_a_fully_masked_row_yields_the_defined_token() -> None:
    logits = [1.0, 4.0, 3.0]
    assert one(logits, Sampling(banned=frozenset({1}))) == 2
    assert one(logits, Sampling(allowed=frozenset({0}))) == 0
    nothing = Sampling(allowed=frozenset({1}), banned=frozenset({1}), temperature=1.0, top_p=0.5)
    rows = torch.tensor([logits, logits])
    assert sample(rows, [ask(nothing), ask(GREEDY)]).tolist() == [FULLY_MASKED_TOKEN, 1]
    assert rows.tolist() == [logits, logits]


def test_a_draw_is_a_function_of_seed_and_position_whatever_the_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    asks = [ask(Sampling(temperature=1.0, seed=seed), position) for seed, position in ((1, 3), (1, 4), (2, 3), (7, 9))]
    together = sample(logits[:4], asks)
    for row, each in enumerate(asks):
        assert sample(logits[row : row + 1], [each])[0] == together[row]
    noise = gumbel([(1, 3), (1, 4), (2, 3), (-1, 3)], 50, CPU)
    assert len({tuple(row) for row in noise.tolist()}) == 4


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    draws = 20_000
    expected = (logits / 0.8).softmax(-1)
    asks = [ask(Sampling(temperature=0.8, seed=5), position) for position in range(draws)]
    counts = torch.bincount(sample(logits.expand(draws, -1), asks), minlength=5)
    assert (
        stats.chisquare(counts.numpy(), expected.double().numpy() / float(expected.double().sum()) * draws).pvalue
        > 0.001
    )


def test_noise_is_gumbel_and_uncorrelated_between_positions() -> None:
    noise = gumbel([(3, position) for position in range(64)], 512, CPU).double().numpy()
    assert stats.kstest(noise.ravel(), stats.gumbel_r.cdf).pvalue > 0.001
    assert abs(np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=1.0, top_k=2), {2, 1}),
        (Sampling(temperature=1.0, top_p=0.01), {2}),
        (Sampling(temperature=1.0, top_p=0.7), {2, 1}),
        (Sampling(temperature=1.0, top_k=3, top_p=0.999), {2, 1, 4}),
    ],
)
def test_cuts_leave_only_the_likeliest(sampling: Sampling, possible: set[int]) -> None:
    # softmax: 0.08, 0.23, 0.61, 0.03, 0.05 would be close calls; these are 0.067, 0.25, 0.55, 0.01, 0.12.
    logits = torch.log(torch.tensor([0.067, 0.25, 0.55, 0.013, 0.12]))
    asks = [ask(sampling, position) for position in range(2_000)]
    assert set(sample(logits.expand(2_000, -1), asks).tolist()) == possible


def test_greedy_rows_are_untouched_beside_drawn_ones() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0], [2.0, 1.0, 0.0]])
    assert sample(logits, [ask(Sampling(temperature=5.0, top_k=1)), ask(GREEDY)]).tolist() == [1, 0]


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"repetition_penalty": 0.0}])
def test_senseless_parameters_are_usage_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="sampling"):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_no_noise_is_infinite_at_the_ends_of_the_uniform() -> None:
    assert math.isfinite(-math.log(-math.log(0.5 * 2.0**-24)))
    assert math.isfinite(-math.log(-math.log(1 - 0.5 * 2.0**-24)))
