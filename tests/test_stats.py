"""The formulas against scipy.stats and statsmodels, published constants, and the book's arithmetic."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.proportion import proportion_confint
from statsmodels.tsa.stattools import acf

from kbench import stats

steady = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SKEWED = [0.012, -0.031, 0.004, 0.055, -0.008, 0.021, 0.094, -0.017, 0.0, 0.033, 0.041, -0.002]
SHORT = st.lists(st.floats(-100, 100, allow_nan=False), min_size=1, max_size=14)


def normal(n: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.02, 0.01, size=n)


# Hodges–Lehmann and its interval


@steady
@given(SHORT)
def test_hodges_lehmann_is_the_median_of_all_pairwise_means(values: list[float]) -> None:
    means = [(a + b) / 2 for i, a in enumerate(values) for b in values[i:]]
    assert stats.hodges_lehmann(values) == pytest.approx(float(np.median(means)), abs=1e-12)


def test_hodges_lehmann_ignores_one_wild_value() -> None:
    quiet = normal(24)
    wild = quiet.copy()
    wild[3] = 50.0
    assert abs(stats.hodges_lehmann(wild) - stats.hodges_lehmann(quiet)) < 0.002


def test_rows_agree_with_single_calls() -> None:
    rows = np.random.default_rng(1).normal(size=(40, 24))
    assert stats.hodges_lehmann_rows(rows).tolist() == [stats.hodges_lehmann(row) for row in rows]


@pytest.mark.parametrize("n", [6, 7, 8, 12, 20])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_signed_rank_interval_holds_what_wilcoxon_does_not_reject(n: int, confidence: float) -> None:
    sample = normal(n)
    interval = stats.signed_rank_interval(sample, confidence)

    def p_value(centre: float) -> float:
        return float(scipy.stats.wilcoxon(sample - centre, mode="exact").pvalue)

    step = 1e-9
    assert p_value(interval.low + step) > 1 - confidence >= p_value(interval.low - step)
    assert p_value(interval.high - step) > 1 - confidence >= p_value(interval.high + step)
    assert interval.point == stats.hodges_lehmann(sample)


def test_signed_rank_interval_is_unbounded_where_no_limit_reaches_the_confidence() -> None:
    assert not stats.signed_rank_interval(normal(5)).bounded  # the best that 5 values can do is 93.75 %
    assert stats.signed_rank_interval(normal(5), 0.9375).bounded
    assert stats.signed_rank_interval(normal(6)).bounded


@steady
@given(SHORT, st.floats(-10, 10))
def test_signed_rank_interval_moves_with_the_data(values: list[float], shift: float) -> None:
    there = stats.signed_rank_interval(np.array(values) + shift)
    here = stats.signed_rank_interval(values)
    assert there.low == pytest.approx(here.low + shift, abs=1e-9)
    assert there.high == pytest.approx(here.high + shift, abs=1e-9)


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_autocorrelation_is_that_of_statsmodels(lag: int) -> None:
    walk = np.cumsum(normal(30))
    assert stats.autocorrelation(walk, lag) == pytest.approx(acf(walk, nlags=lag)[lag])


def test_effective_sample_factor_is_one_without_positive_autocorrelation() -> None:
    assert stats.effective_sample_factor([1.0, -1.0] * 10) == 1.0
    assert stats.effective_sample_factor([0.1] * 20) == 1.0
    assert stats.effective_sample_factor([1.0, 2.0, 3.0]) == 1.0
    assert stats.effective_sample_factor(np.arange(20.0)) < 0.2


def test_effective_sample_factor_finds_a_known_autoregression() -> None:
    noise = np.random.default_rng(3).normal(size=4000)
    series = np.zeros(4000)
    for i in range(1, 4000):
        series[i] = 0.5 * series[i - 1] + noise[i]
    assert stats.effective_sample_factor(series) == pytest.approx((1 - 0.5) / (1 + 0.5), rel=0.12)


# t over sessions


@pytest.mark.parametrize("df", [1, 2, 5, 11, 200])
@pytest.mark.parametrize("p", [0.0007, 0.025, 0.5, 0.95, 0.9999])
def test_t_is_that_of_scipy(df: int, p: float) -> None:
    assert stats.t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df))
    assert stats.t_cdf(stats.t_quantile(p, df), df) == pytest.approx(p)


@pytest.mark.parametrize("n", [2, 6, 12])
def test_session_interval_is_the_t_interval(n: int) -> None:
    sample = normal(n)
    expected = scipy.stats.ttest_1samp(sample, 0.0).confidence_interval(0.95)
    interval = stats.session_interval(sample)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert interval.n == n
    assert interval.point in interval


def test_bounds_are_the_one_sided_t_test() -> None:
    sample = normal(8)
    bound = stats.lower_bound(sample, 0.0142)
    assert scipy.stats.ttest_1samp(sample, bound, alternative="greater").pvalue == pytest.approx(0.0142)
    above = stats.upper_bound(sample, 0.025)
    assert scipy.stats.ttest_1samp(sample, above, alternative="less").pvalue == pytest.approx(0.025)


def test_one_session_bounds_nothing() -> None:
    assert stats.session_interval([0.03]) == stats.Interval(0.03, -math.inf, math.inf, 1)
    assert stats.lower_bound([0.03], 0.05) == -math.inf
    assert stats.upper_bound([0.03], 0.05) == math.inf


def test_a_calibrated_host_bounds_a_single_session() -> None:
    interval = stats.plug_in_interval([0.03], session_sd=0.003, card_sessions=16)
    half = scipy.stats.t.ppf(0.975, 15) * 0.003
    assert (interval.low, interval.high) == pytest.approx((0.03 - half, 0.03 + half))
    four = stats.plug_in_interval([0.03] * 4, session_sd=0.003, card_sessions=16)
    assert four.high - four.point == pytest.approx(half / 2)


@pytest.mark.parametrize("sessions", [2, 3, 6, 12, 40])
@pytest.mark.parametrize(("alpha", "power"), [(0.05, 0.95), (0.0083, 0.9)])
def test_detectable_effect_is_that_of_statsmodels(sessions: int, alpha: float, power: float) -> None:
    effect = stats.minimum_detectable_effect(0.003, sessions, alpha, power)
    oracle = TTestPower().power(effect / 0.003, nobs=sessions, alpha=alpha, alternative="larger")
    assert oracle == pytest.approx(power, abs=1e-6)
    assert stats.detection_power(effect, 0.003, sessions, alpha) == pytest.approx(power)


def test_sessions_needed_is_the_first_number_that_detects_the_effect() -> None:
    needed = stats.sessions_needed(0.004, 0.003, 0.05, 0.95)
    assert needed is not None
    assert stats.minimum_detectable_effect(0.003, needed, 0.05, 0.95) <= 0.004
    assert stats.minimum_detectable_effect(0.003, needed - 1, 0.05, 0.95) > 0.004
    assert stats.sessions_needed(1e-6, 0.003, 0.05, 0.95, at_most=50) is None


def test_detectable_effect_at_the_ends() -> None:
    assert stats.minimum_detectable_effect(0.003, 1, 0.05, 0.9) == math.inf
    assert stats.minimum_detectable_effect(0.0, 6, 0.05, 0.9) == 0.0
    with pytest.raises(ValueError, match="power"):
        stats.minimum_detectable_effect(0.003, 6, 0.05, 0.05)


# studentised bootstrap


def test_bootstrap_of_many_normal_values_is_the_t_interval() -> None:
    sample = np.random.default_rng(5).normal(size=300)
    assert stats.effective_sample_factor(sample) == pytest.approx(1.0, abs=0.03)  # nothing to widen for
    expected = scipy.stats.ttest_1samp(sample, 0.0).confidence_interval(0.95)
    interval = stats.studentised_bootstrap(sample, seed=1)
    half = (expected.high - expected.low) / 2
    assert interval.low == pytest.approx(expected.low, abs=0.05 * half)
    assert interval.high == pytest.approx(expected.high, abs=0.05 * half)


def test_bootstrap_follows_the_definition_step_by_step() -> None:
    sample, seed, draws = np.array(SKEWED), 11, 999
    indices = np.random.default_rng(seed).integers(0, len(sample), size=(draws, len(sample)))
    error = sample.std(ddof=1) / math.sqrt(len(sample))
    statistics = []
    for row in indices:
        again = sample[row]
        statistics.append((again.mean() - sample.mean()) / (again.std(ddof=1) / math.sqrt(len(sample))))
    statistics.sort()
    widened = error / math.sqrt(stats.effective_sample_factor(sample))
    interval = stats.studentised_bootstrap(sample, seed=seed, confidence=0.9, resamples=draws)
    assert interval.low == pytest.approx(sample.mean() - statistics[950 - 1] * widened)
    assert interval.high == pytest.approx(sample.mean() - statistics[50 - 1] * widened)


def test_bootstrap_is_deterministic_and_scales() -> None:
    interval = stats.studentised_bootstrap(SKEWED, seed=3)
    assert interval == stats.studentised_bootstrap(SKEWED, seed=3)
    assert interval != stats.studentised_bootstrap(SKEWED, seed=4)
    scaled = stats.studentised_bootstrap(4 * np.array(SKEWED), seed=3)
    assert (scaled.low, scaled.high) == pytest.approx((4 * interval.low, 4 * interval.high))


def test_bootstrap_sides_share_the_tail() -> None:
    both = stats.studentised_bootstrap(SKEWED, seed=3, confidence=0.95)
    lower = stats.studentised_bootstrap(SKEWED, seed=3, confidence=0.975, side="lower")
    upper = stats.studentised_bootstrap(SKEWED, seed=3, confidence=0.975, side="upper")
    assert (lower.low, lower.high) == (both.low, math.inf)
    assert (upper.low, upper.high) == (-math.inf, both.high)


def test_bootstrap_widens_where_neighbours_resemble_each_other() -> None:
    ordered = np.sort(normal(20))
    mixed = np.random.default_rng(0).permutation(ordered)

    def width(values: np.ndarray) -> float:
        interval = stats.studentised_bootstrap(values, seed=2)
        return interval.high - interval.low

    assert width(ordered) > 2 * width(mixed)


def test_bootstrap_holds_its_error_on_skewed_segments() -> None:
    generator = np.random.default_rng(20)
    accepted = {"t": 0, "bootstrap": 0}
    for _ in range(400):  # mean 0, skew -1.8, as goodput differences are
        values = math.exp(0.125) - np.exp(0.5 * generator.normal(size=20))
        bootstrap = stats.studentised_bootstrap(values, seed=1, confidence=0.975, side="lower", resamples=999)
        accepted["bootstrap"] += bootstrap.low > 0
        accepted["t"] += stats.lower_bound(values, 0.025) > 0
    assert accepted["bootstrap"] <= 0.06 * 400
    assert accepted["bootstrap"] < accepted["t"]


def test_bootstrap_of_one_or_of_equal_values() -> None:
    assert not stats.studentised_bootstrap([0.1], seed=0).bounded
    equal = stats.studentised_bootstrap([0.1] * 20, seed=0)
    assert equal.low == equal.high == pytest.approx(0.1)
    two = stats.studentised_bootstrap([0.1, 0.2], seed=0)
    assert two.low == -math.inf and two.high == math.inf  # half of all resamples of two values have no spread


# proportions


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10), (42, 1000), (1, 1)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_proportions_are_those_of_statsmodels(hits: int, trials: int, confidence: float) -> None:
    exact = stats.clopper_pearson(hits, trials, confidence)
    expected = proportion_confint(hits, trials, 1 - confidence, method="beta")
    assert (exact.low, exact.high) == pytest.approx(expected, abs=1e-12)
    score = stats.wilson(hits, trials, confidence)
    expected = proportion_confint(hits, trials, 1 - confidence, method="wilson")
    assert (score.low, score.high) == pytest.approx(expected, abs=1e-12)


def test_one_sided_proportion_is_the_limit_at_the_whole_error() -> None:
    assert stats.clopper_pearson(3, 50, 0.95, "upper").high == stats.clopper_pearson(3, 50, 0.9).high
    assert stats.clopper_pearson(3, 50, 0.95, "upper").low == 0.0
    assert stats.wilson(3, 50, 0.95, "lower").high == 1.0


# multiplicity


@settings(steady, max_examples=15)  # statsmodels collects garbage at every call
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_that_of_statsmodels(p_values: list[float]) -> None:
    rejected, adjusted, _, _ = multipletests(p_values, alpha=0.05, method="holm")
    result = stats.holm(p_values, 0.05)
    assert result.adjusted == pytest.approx(adjusted.tolist())
    assert [p <= 0.05 for p in result.adjusted] == list(result.rejected)
    for ours, theirs, p in zip(result.rejected, rejected, adjusted, strict=True):
        assert ours == theirs or p == pytest.approx(0.05)


def test_spending_has_the_published_boundaries() -> None:
    looks = stats.obf_spending(0.025, [1, 2, 3, 4, 5])
    assert [look.z for look in looks] == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=5e-4)
    assert looks[-1].spent == pytest.approx(0.025)
    assert [look.information for look in looks] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("counts", [(6, 8, 12), (4, 6, 8, 12)])
def test_spending_crosses_with_exactly_the_declared_error(counts: tuple[int, ...]) -> None:
    """The chance never to cross, from an integration nobody here wrote: the multivariate normal of scipy."""
    looks = stats.obf_spending(0.05, counts)
    t = np.array(counts) / counts[-1]
    covariance = np.sqrt(np.minimum.outer(t, t) / np.maximum.outer(t, t))
    for k in range(1, len(counts) + 1):
        law = scipy.stats.multivariate_normal(cov=covariance[:k, :k], abseps=1e-9, releps=1e-9, seed=0)
        assert 1 - law.cdf([look.z for look in looks[:k]]) == pytest.approx(looks[k - 1].spent, abs=2e-6)
    assert all(look.nominal_alpha == pytest.approx(scipy.stats.norm.sf(look.z)) for look in looks)


def test_spending_of_one_look_is_the_plain_test() -> None:
    (look,) = stats.obf_spending(0.05, [6])
    assert look.nominal_alpha == pytest.approx(0.05)


def test_a_later_look_leaves_earlier_boundaries_alone() -> None:
    short = stats.obf_spending(0.05, [6, 8], final=12)
    whole = stats.obf_spending(0.05, [6, 8, 12])
    assert [look.z for look in short] == pytest.approx([look.z for look in whole[:2]])
    added = stats.obf_spending(0.05, [6, 7, 8, 12])
    assert added[0].z == pytest.approx(whole[0].z)
    assert added[2].nominal_alpha < whole[1].nominal_alpha  # a look that was taken in between has to be paid for


def test_spending_with_many_looks_stays_within_its_error() -> None:
    looks = stats.obf_spending(0.05, range(1, 25))
    assert all(a.z > b.z for a, b in itertools.pairwise(looks))
    assert looks[-1].spent == pytest.approx(0.05)


# the two readings of "22 % faster"


def test_the_chapter_read_as_time() -> None:
    result = stats.amdahl_saving_us(step_us=5000.0, part_us=2000.0, part_saving=0.22, extra_us=300.0)
    assert result.bound_us == pytest.approx(440.0)
    assert result.actual_us == pytest.approx(140.0)
    assert result.actual_share == pytest.approx(0.028)


def test_the_chapter_read_as_rate() -> None:
    reading = stats.faster_readings(0.22)
    assert reading.as_time == 0.22
    result = stats.amdahl_saving_us(5000.0, 2000.0, reading.as_rate, 300.0)
    assert result.bound_us == pytest.approx(360.0, abs=1.0)
    assert result.actual_us == pytest.approx(60.0, abs=1.0)
    assert result.actual_share == pytest.approx(0.012, abs=2e-4)


@steady
@given(st.floats(-5, 0.99))
def test_savings_and_rates_convert_back(share: float) -> None:
    assert stats.saving_from_rate(stats.rate_from_saving(share)) == pytest.approx(share, abs=1e-9)
    assert stats.saving(stats.log_ratio(share)) == pytest.approx(share, abs=1e-9)


def test_a_saving_interval_turns_round() -> None:
    interval = stats.saving_interval(stats.Interval(math.log(0.9), math.log(0.8), math.inf, 6))
    assert (interval.point, interval.low, interval.high) == pytest.approx((0.1, -math.inf, 0.2))


def test_conversion_may_eat_the_whole_saving() -> None:
    assert stats.amdahl_saving_us(5000.0, 2000.0, 0.1, 300.0).actual_us == pytest.approx(-100.0)


# bad input

LISTS: list[tuple[str, Callable[[list[float]], object]]] = [
    ("values", stats.hodges_lehmann),
    ("values", stats.signed_rank_interval),
    ("values", stats.autocorrelation),
    ("values", stats.effective_sample_factor),
    ("values", lambda values: stats.studentised_bootstrap(values, seed=0)),
    ("session_estimates", stats.session_interval),
    ("session_estimates", lambda values: stats.plug_in_interval(values, 0.01, 16)),
    ("estimates", lambda values: stats.lower_bound(values, 0.05)),
    ("estimates", lambda values: stats.upper_bound(values, 0.05)),
    ("p_values", lambda values: stats.holm(values, 0.05)),
    ("looks", lambda values: stats.obf_spending(0.05, values)),
]


@pytest.mark.parametrize(("name", "function"), LISTS)
@pytest.mark.parametrize("bad", [[], [0.1, math.nan, 0.3], [0.1, 0.2, math.inf], [-math.inf, 0.2, 0.3]])
def test_lists_must_be_finite_and_not_empty(
    name: str, function: Callable[[list[float]], object], bad: list[float]
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        function(bad)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rows", lambda: stats.hodges_lehmann_rows(np.array([[1.0, math.nan]]))),
        ("rows", lambda: stats.hodges_lehmann_rows(np.array([1.0]))),
        ("values", lambda: stats.hodges_lehmann(np.ones((2, 2)))),
        ("alpha", lambda: stats.lower_bound([1.0, 2.0], math.nan)),
        ("alpha", lambda: stats.obf_spending(1.5, [6])),
        ("looks", lambda: stats.obf_spending(0.05, [8, 6])),
        ("looks", lambda: stats.obf_spending(0.05, [6, 8], final=7)),
        ("confidence", lambda: stats.session_interval([1.0, 2.0], 95)),
        ("side", lambda: stats.wilson(1, 2, 0.95, "both")),
        ("seed", lambda: stats.studentised_bootstrap([1.0, 2.0], seed=-1)),
        ("resamples", lambda: stats.studentised_bootstrap([1.0, 2.0], seed=1, resamples=10)),
        ("resamples", lambda: stats.studentised_bootstrap([1.0, 2.0], seed=1, resamples=99, confidence=0.999)),
        ("trials", lambda: stats.wilson(0, 0)),
        ("successes", lambda: stats.clopper_pearson(3, 2)),
        ("successes", lambda: stats.clopper_pearson(True, 2)),
        ("p_values", lambda: stats.holm([0.1, 1.1], 0.05)),
        ("session_sd", lambda: stats.minimum_detectable_effect(math.nan, 6, 0.05, 0.9)),
        ("effect", lambda: stats.detection_power(math.inf, 0.1, 6, 0.05)),
        ("card_sessions", lambda: stats.plug_in_interval([0.1], 0.1, 1)),
        ("df", lambda: stats.t_quantile(0.5, 0)),
        ("t", lambda: stats.t_cdf(math.nan, 5)),
        ("lag", lambda: stats.autocorrelation([1.0, 2.0], 0)),
        ("log_ratio", lambda: stats.saving(math.nan)),
        ("saving", lambda: stats.log_ratio(1.0)),
        ("saving", lambda: stats.rate_from_saving(math.nan)),
        ("rate", lambda: stats.saving_from_rate(0.0)),
        ("faster", lambda: stats.faster_readings(22.0)),
        ("part_us", lambda: stats.amdahl_saving_us(5.0, 6.0, 0.2)),
        ("step_us", lambda: stats.amdahl_saving_us(math.nan, 1.0, 0.2)),
        ("part_saving", lambda: stats.amdahl_saving_us(5.0, 1.0, 22.0)),
        ("extra_us", lambda: stats.amdahl_saving_us(5.0, 1.0, 0.2, math.nan)),
    ],
)
def test_arguments_out_of_range_are_named(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        call()


def test_import_is_light() -> None:
    program = "import sys, kbench.stats; print(sorted({'scipy', 'pandas', 'torch', 'statsmodels'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_no_formula_imports_scipy_stats() -> None:
    program = (
        "import sys\nfrom kbench import stats\n"
        "stats.session_interval([1.0, 2.0]); stats.obf_spending(0.05, [6, 12]); stats.wilson(1, 2)\n"
        "stats.clopper_pearson(1, 2); stats.detection_power(1.0, 1.0, 6, 0.05)\n"
        "stats.studentised_bootstrap([1.0, 2.0], seed=0)\n"
        "print('scipy.stats' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
