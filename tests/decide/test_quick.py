"""The gate's statistics against scipy, the Holm step against statsmodels, and what each cell is told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from decide_lab import LONG, MODEL, SHORT, Lab, make_suite
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests

from kbench.decide import Evidence
from kbench.decide.evidence import Cell, cell_of
from kbench.decide.quick import GateCell, GateVerdict, judge_gate, observe, scatter_of
from kbench.decide.reading import alone, estimate_variance, plug_in
from kbench.noise import CaseNoise, Scatter
from kbench.suite.rule_schema import Gate

RNG = np.random.default_rng(3)
WITHIN = tuple(4e-6 * (1 + 0.1 * (n % 5)) for n in range(16))
CARD = Scatter.of(RNG.normal(0.0, 0.003, 16).tolist(), WITHIN)
CASES = {f"step/step/{MODEL}/{point}": Cell("step", "step", point) for point in (SHORT, LONG)}


def judged(
    lab: Lab, card: Scatter | None = CARD, *, margin: float = 0.02, cases: dict[str, Cell] = CASES
) -> list[GateCell]:
    suite = make_suite().model_copy(update={"gate": Gate(margin=margin)})
    noise = {} if card is None else dict.fromkeys(cases, CaseNoise(metrics={"step_time": card}))
    return list(judge_gate(suite, Evidence.of([lab.run()]), cases, noise))


def lab(short: float = 0.0, long: float = 0.0, *, sessions: int = 2, window_sd: float = 0.004) -> Lab:
    made = Lab(sessions=sessions, blocks=10)
    for point, saving in ((SHORT, short), (LONG, long)):
        made.timing("step", point, saving, session_sd=0.0005, window_sd=window_sd)
    return made


# ------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("within", [[1e-7], [9e-5, 3e-5], [1e-6, 1e-6, 1e-6]])
def test_plug_in_is_the_formula_with_students_t(within: list[float]) -> None:
    estimates = [0.01, 0.012, 0.009][: len(within)]
    reading = plug_in(estimates, within, CARD)
    variance = np.var(CARD.estimates, ddof=1) - np.mean(WITHIN) + max(np.mean(WITHIN), np.mean(within))
    error = math.sqrt(variance / len(within))
    expected = scipy_stats.t(15, loc=np.mean(estimates), scale=error)
    interval = reading.interval(0.05)
    assert (interval.low, interval.high) == pytest.approx(expected.interval(0.95))
    assert reading.p == pytest.approx(2 * scipy_stats.t.sf(np.mean(estimates) / error, 15))


def test_quieter_windows_than_the_cards_narrow_nothing() -> None:
    assert plug_in([0.01], [1e-12], CARD).error == pytest.approx(CARD.sd)
    assert plug_in([0.01], [1e-4], CARD).error > 2 * CARD.sd


def test_sessions_that_speak_for_themselves() -> None:
    values = [0.01, 0.02, 0.015, 0.012, 0.018, 0.011]
    interval = alone(values).interval(0.05)
    expected = scipy_stats.ttest_1samp(values, 0.0)
    assert alone(values).p == pytest.approx(expected.pvalue)
    assert (interval.low, interval.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert alone([0.5]).p == 1.0 and not alone([0.5]).interval(0.05).bounded


def test_the_variance_of_a_centre_is_about_that_of_its_replications() -> None:
    rows = np.random.default_rng(1).normal(0.0, 0.01, (2000, 20))
    centres = [float(np.median([(a + b) / 2 for i, a in enumerate(row) for b in row[i:]])) for row in rows[:300]]
    claimed = np.mean([estimate_variance(row.tolist()) for row in rows[:300]])
    assert claimed == pytest.approx(np.var(centres), rel=0.25)


def test_one_interrupted_block_does_not_blow_the_variance_up() -> None:
    rows = np.random.default_rng(2).normal(0.0, 0.01, 20).tolist()
    assert estimate_variance([*rows[:-1], 3.0]) < 2 * estimate_variance(rows)
    assert estimate_variance([0.0, 0.02]) == pytest.approx(np.var([0.0, 0.02], ddof=1) / 2)
    assert estimate_variance([0.1]) == 0.0


def test_equal_arms_are_told_apart_one_time_in_twenty() -> None:
    """The whole plug-in, card and all, over normal sessions: nominal 5 %."""
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(2000):
        within = 1e-6 * rng.chisquare(30, 19) / 30
        sessions = rng.normal(0.0, math.sqrt(3e-6), 19)
        card = Scatter.of(sessions[:16].tolist(), within[:16].tolist())
        hits += plug_in(sessions[16:].tolist(), within[16:].tolist(), card).p <= 0.05
    assert 0.03 <= hits / 2000 <= 0.06


def test_the_scatter_test_is_an_f_test() -> None:
    each = 2 * np.mean(WITHIN) ** 2 / np.var(WITHIN, ddof=1)
    limit = scipy_stats.f.isf(0.01, 2 * each, 16 * each) * np.mean(WITHIN)
    assert plug_in([0.0, 0.0], [0.99 * limit] * 2, CARD).noise == ""
    assert "noisier now" in plug_in([0.0, 0.0], [1.01 * limit] * 2, CARD).noise
    assert plug_in([0.0, 0.0], [0.5 * limit] * 2, CARD).noise == ""
    silent = Scatter.of(CARD.estimates, [0.0] * 16)
    assert "noisier now" in plug_in([0.0], [1e-9], silent).noise
    assert plug_in([0.0], [0.0], silent).noise == ""


# ------------------------------------------------------------------------------------------- verdicts


def test_the_four_verdicts() -> None:
    slower, faster = judged(lab(-0.05, 0.05))
    assert (slower.verdict, faster.verdict) == (GateVerdict.REGRESSED, GateVerdict.IMPROVED)
    assert (
        slower.change is not None and slower.change.low > 0.0 and slower.change.point == pytest.approx(0.05, abs=0.01)
    )
    assert faster.change is not None and faster.change.high < 0.0
    assert [cell.verdict for cell in judged(lab())] == [GateVerdict.PASS] * 2
    assert [cell.verdict for cell in judged(lab(), margin=0.001)] == [GateVerdict.INCONCLUSIVE] * 2


def test_noisy_windows_make_it_inconclusive_and_say_so() -> None:
    for cell in judged(lab(window_sd=0.2)):
        assert cell.verdict is GateVerdict.INCONCLUSIVE
        assert "noisier now" in cell.reason


def test_holm_is_that_of_statsmodels() -> None:
    cells = judged(lab(-0.009, -0.05), cases=CASES)
    rejected, adjusted, *_ = multipletests([cell.p for cell in cells], 0.05, method="holm")
    assert [cell.p_adjusted for cell in cells] == pytest.approx(adjusted)
    assert [cell.verdict is GateVerdict.REGRESSED for cell in cells] == rejected.tolist()


@pytest.mark.parametrize("saving", [-0.004, -0.006, -0.007, -0.008, -0.009, -0.012])
def test_the_interval_that_is_shown_is_the_one_that_decided(saving: float) -> None:
    for cell in judged(lab(saving, saving / 2)):
        assert cell.change is not None
        beyond_zero = cell.change.low > 0.0 or cell.change.high < 0.0
        assert beyond_zero == (cell.p_adjusted <= 0.05)
        assert beyond_zero == (cell.verdict in (GateVerdict.REGRESSED, GateVerdict.IMPROVED))


def test_one_cell_alone_has_the_plain_interval() -> None:
    evidence = lab(0.004, 0.0)
    [case, *_] = CASES
    [cell] = judged(evidence, cases={case: CASES[case]})
    found = observe(Evidence.of([evidence.run()]), CASES[case], "step_time", "new", "old")
    assert not isinstance(found, str) and cell.change is not None
    expected = plug_in(found.sessions.estimate.tolist(), found.within, CARD).interval(0.05)  # type: ignore[union-attr]
    assert cell.change.low == pytest.approx(math.expm1(expected.low))
    assert cell.change.high == pytest.approx(math.expm1(expected.high))


def test_without_a_card_two_sessions_can_hardly_tell() -> None:
    [cell, _] = judged(lab(-0.002, sessions=1), None)
    assert cell.verdict is GateVerdict.INCONCLUSIVE
    assert cell.change is not None and not math.isfinite(cell.change.high)
    assert cell.to_json()["change"]["high"] is None
    [cell, _] = judged(lab(-0.05, sessions=6), None)
    assert cell.verdict is GateVerdict.REGRESSED


@pytest.mark.parametrize(
    ("variant", "status", "verdict"),
    [
        ("new", "incorrect", GateVerdict.FAILED),
        ("new", "crashed", GateVerdict.FAILED),
        ("new", "unsupported", GateVerdict.MISSING),
        ("new", "non-discriminating", GateVerdict.MISSING),
        ("old", "crashed", GateVerdict.VOID),
    ],
)
def test_trials_that_failed(variant: str, status: str, verdict: GateVerdict) -> None:
    made = Lab(sessions=1)
    made.timing("step", SHORT, 0.0)
    case = f"step/step/{MODEL}/{LONG}"
    for name in ("old", "new"):
        made.trial(case, name, status=status if name == variant else "ok", message="because")
    _, cell = judged(made)
    assert cell.verdict is verdict
    assert cell.change is None


def test_what_was_not_measured_is_void_and_never_a_pass() -> None:
    made = Lab(sessions=1)
    made.timing("step", SHORT, 0.0)
    _, cell = judged(made)
    assert cell.verdict is GateVerdict.VOID


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_value_that_is_no_time_is_no_pass(value: float) -> None:
    made = lab()
    sample = made.samples[3]
    made.add(sample.case, "step", "new", "step_time", value, session=1, block=4, position=3)
    assert judged(made)[0].verdict is GateVerdict.VOID


# ------------------------------------------------------------------------------------------- the card's numbers


def test_what_a_calibration_says_about_a_cell() -> None:
    made = Lab(sessions=16, blocks=8)
    made.timing("step", SHORT, 0.0)
    made.once(SHORT, "phase.forward", 100.0, 100.0, sd=1.0)
    made.once(SHORT, "conversion_time", 0.0, 0.0)
    evidence = Evidence.of([made.run()])
    cell, _ = cell_of(f"step/step/{MODEL}/{SHORT}")
    found = scatter_of(evidence, cell, "step_time", "new", "old", 16)
    assert isinstance(found, CaseNoise)
    assert set(found.metrics) == {"step_time", "phase.forward"}
    assert len(found.metrics["step_time"].within) == 16
    assert found.metrics["step_time"].sd == pytest.approx(0.003, rel=0.5)
    short = scatter_of(evidence, cell, "step_time", "new", "old", 17)
    assert "16 of 17 sessions" in short.why  # type: ignore[union-attr]


def test_components_are_shown_with_the_cards_interval() -> None:
    made = lab()
    made.once(SHORT, "phase.forward", 100.0, 120.0)
    [case, *_] = CASES
    noise = {case: CaseNoise(metrics={"step_time": CARD, "phase.forward": Scatter.of(CARD.estimates)})}
    suite = make_suite()
    [cell, _] = judge_gate(suite, Evidence.of([made.run()]), CASES, noise)
    [component] = cell.components
    assert component.point == pytest.approx(0.2)
    half = scipy_stats.t.ppf(0.975, 15) * CARD.sd / math.sqrt(2)
    assert (component.low, component.high) == pytest.approx((0.2 - half, 0.2 + half))
