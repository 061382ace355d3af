"""Whether to measure up to the last look: the predictive chances of an open cell, and what they end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from decide_lab import LONG, SHORT, Lab, make_suite
from scipy import stats as oracle

from kbench.decide import Evidence, decide, futile
from kbench.decide.budget import Budget
from kbench.decide.estimate import Sessions
from kbench.decide.timing import Region, last_look_chances
from kbench.stats import lower_bound, upper_bound
from kbench.suite.rule_schema import Rule

RULE = Rule.model_validate({"looks": (6, 8, 12)}, strict=False)


def sessions(mean: float, sd: float, count: int) -> Sessions:
    """`count` estimates with exactly this mean and standard deviation."""
    values = np.random.default_rng(3).normal(size=count)
    values = (values - values.mean()) / values.std(ddof=1)
    return Sessions(np.arange(count), mean + sd * values)


@pytest.mark.parametrize("mean", [-0.035, -0.025, -0.02, -0.01])
@pytest.mark.parametrize("count", [6, 8])
def test_the_chances_are_those_of_simulated_further_sessions(mean: float, count: int) -> None:
    region, budget = Region(-math.inf, math.log1p(-0.02)), Budget.of(RULE, 1, 0)
    seen = sessions(mean, 0.01, count)
    passes, fails = last_look_chances(seen, region, budget)
    rng, draws = np.random.default_rng(1), 4_000
    truth = mean + 0.01 / math.sqrt(count) * oracle.t(count - 1).rvs(draws, random_state=rng)
    further = rng.normal(truth[:, None], 0.01, (draws, 12 - count))
    means = (count * mean + further.sum(axis=1)) / 12
    alpha = budget.nominal[-1]
    # The bounds of twelve sessions with this scatter, laid around every simulated mean.
    shape = sessions(0.0, 0.01, 12).estimate
    high, low = upper_bound(shape, alpha), lower_bound(shape, 0.025)
    assert passes == pytest.approx(float((means + high < region.high).mean()), abs=0.03)
    assert fails == pytest.approx(float((means + low > region.high).mean()), abs=0.03)


def test_there_is_no_chance_to_speak_of_at_the_last_look_or_without_scatter() -> None:
    region, budget = Region(-math.inf, -0.02), Budget.of(RULE, 1, 0)
    for seen in (sessions(-0.02, 0.01, 12), sessions(-0.02, 0.0, 8), sessions(-0.02, 0.01, 8).first(1)):
        assert all(math.isnan(chance) for chance in last_look_chances(seen, region, budget))


@pytest.mark.parametrize(
    ("count", "saving", "expected"),
    [(8, 0.02, True), (6, 0.02, False), (8, 0.03, False), (8, 0.012, False), (12, 0.02, False), (8, 0.2, False)],
    ids=["at the threshold", "early", "may pass", "may fail", "no further look", "passes"],
)
def test_a_regime_is_futile_where_a_cell_stays_open(count: int, saving: float, expected: bool) -> None:
    suite = make_suite(points={"long": [LONG]})
    lab = Lab(sessions=count)
    mean = math.log1p(-saving)
    for session, ratio in enumerate(sessions(mean, 0.01, count).estimate):
        for block in range(2):
            for position, variant in enumerate(("old", "new", "new", "old")):
                value = 100.0 * math.exp(ratio) if variant == "new" else 100.0
                case = f"step/step/tiny/{LONG}"
                lab.add(case, "step", variant, "step_time", value, session=session, block=block, position=position)
        for variant in ("old", "new"):
            lab.trial(f"step/step/tiny/{LONG}", variant, session=session)
    lab.timing("kernel", LONG, 0.0)
    [verdict] = decide(suite, Evidence.of([lab.run()])).regimes
    assert futile(verdict) is expected
    assert ("futile: it would hardly be settled by the rule's last look at 12" in verdict.action) is expected


def test_a_cell_that_may_yet_fail_is_worth_measuring() -> None:
    """One cell sits at the threshold, another is likely to be refuted: disable says more than inconclusive."""
    suite = make_suite()
    lab = Lab(sessions=8).timing("kernel", LONG, 0.0).timing("kernel", SHORT, 0.0)
    for point, mean, sd in ((LONG, -0.02, 0.01), (SHORT, -0.012, 0.01)):
        for session, ratio in enumerate(sessions(mean, sd, 8).estimate):
            case = f"step/step/tiny/{point}"
            for position, variant in enumerate(("old", "new", "new", "old")):
                value = 100.0 * math.exp(ratio) if variant == "new" else 100.0
                lab.add(case, "step", variant, "step_time", value, session=session, block=0, position=position)
            for variant in ("old", "new"):
                lab.trial(case, variant, session=session)
    [verdict] = decide(suite, Evidence.of([lab.run()])).regimes
    assert verdict.verdict == "inconclusive" and not futile(verdict)
