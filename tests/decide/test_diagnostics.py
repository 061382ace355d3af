"""Order, drift and controls: each is found where it was planted, and seldom where it was not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decide_lab import POINTS, SHORT, STEP, Lab, make_suite

from kbench.decide import Evidence, Verdict, decide, explain
from kbench.decide.diagnostics import Diagnostics, diagnostics
from kbench.record import Sample
from kbench.suite.schema import Suite

CASE = f"step/step/tiny/{SHORT}"


def suite_of(*, same_pages: bool = False, contaminated: str = "report") -> Suite:
    suite = make_suite({"long": [STEP]}, points={"long": [SHORT]}, looks=[6])
    rule = suite.rule.model_copy(
        update={"diagnostics": suite.rule.diagnostics.model_copy(update={"contaminated": contaminated})}
    )
    variants = suite.variants
    if same_pages:
        variants = {name: variant.model_copy(update={"page_size": 16}) for name, variant in variants.items()}
    return suite.model_copy(update={"rule": rule, "variants": variants})


def controls(made: Lab, shift: float = 0.0, *, phase: str = "sample", sd: float = 0.01, prefix: str = "phase") -> Lab:
    for session in range(made.sessions):
        for variant in ("old", "new"):
            value = 20.0 * (1 + (shift if variant == "new" else 0.0)) * math.exp(made.rng.normal(0.0, sd))
            made.add(CASE, "step", variant, f"{prefix}.{phase}", value, session=session, scope="session")
    return made


def found(made: Lab, suite: Suite | None = None) -> Diagnostics:
    [one] = diagnostics(suite or suite_of(), Evidence.of([made.run()]))
    return one


def scaled(made: Lab, factor: Any) -> Lab:
    return made.edit(lambda sample: replace(sample, value=sample.value * factor(sample)))


def windows(seed: int = 1, **how: Any) -> Lab:
    return Lab(seed=seed, blocks=10, sessions=8).timing("step", SHORT, 0.05, window_sd=0.002, **how)


def test_a_carry_over_is_found_and_drift_is_not_taken_for_one() -> None:
    """The lab drifts by 1 % a block. A window after the other arm is 2 % slower, in the candidate's case only."""
    clean = found(windows())
    assert clean.carry_over.low < 0.0 < clean.carry_over.high
    made = windows()
    positions: dict[tuple[int, int], dict[int, str]] = {}
    for sample in made.samples:
        positions.setdefault((sample.session, sample.block), {})[sample.position] = sample.variant

    def carried(sample: Sample) -> float:
        before = positions[(sample.session, sample.block)].get(sample.position - 1)
        return 1.02 if sample.variant == "new" and before == "old" else 1.0

    planted = found(scaled(made, carried)).carry_over
    assert planted.low > 0.0 and planted.point == pytest.approx(0.01, abs=0.003)


def test_what_standing_second_costs_is_order_and_biases_nothing() -> None:
    made = scaled(windows(), lambda sample: 1.03 if sample.position % 2 else 1.0)
    shown = found(made)
    assert shown.order.point == pytest.approx(0.03, abs=0.004) and shown.order.low > 0.0
    assert shown.carry_over.low < 0.0 < shown.carry_over.high


def test_drift_is_from_the_first_to_the_last_block() -> None:
    drift = found(windows()).drift
    assert drift.point == pytest.approx(0.09, abs=0.01) and drift.sessions == 8


def test_a_control_that_moves_contaminates_its_cell_and_a_small_shift_does_not() -> None:
    assert not found(controls(windows())).contaminated
    assert not found(controls(windows(), 0.01, sd=0.001)).contaminated
    moved = found(controls(windows(), 0.2))
    assert moved.contaminated and moved.controls == ("sample",)
    assert "+2" in moved.sentence and "none of the candidate's code" in moved.sentence


def test_controls_are_fewer_where_the_candidate_changes_pages() -> None:
    made = controls(controls(windows(), 0.2), 0.2, phase="schedule")
    assert found(made).controls == ("sample",)
    assert found(made, suite_of(same_pages=True)).controls == ("schedule", "sample")


def test_the_device_s_own_time_of_a_phase_counts_where_there_is_one() -> None:
    """The host's time of a phase on a device holds the wait for what was queued before it."""
    made = controls(controls(windows(), -0.7), 0.0, prefix="phase_device")
    assert not found(made).contaminated


@pytest.mark.parametrize(("policy", "verdict"), [("report", Verdict.ENABLE), ("inconclusive", Verdict.INCONCLUSIVE)])
def test_the_suite_says_what_a_contaminated_cell_does(policy: str, verdict: Verdict) -> None:
    suite = suite_of(contaminated=policy)
    evidence = Evidence.of([controls(windows(), 0.2).run()])
    decision = explain(decide(suite, evidence), suite, evidence)
    regime = decision.regimes[0]
    assert regime.verdict is verdict
    assert len(regime.contaminated) == 1
    assert regime.clauses[0].status == "pass"
    assert decision.to_json()["diagnostics"][0]["contaminated"] is True
    if verdict is Verdict.INCONCLUSIVE:
        assert regime.reasons[0].startswith("contaminated: ") and regime.action


def test_a_contaminated_cell_excuses_no_failure() -> None:
    suite = suite_of(contaminated="inconclusive")
    made = controls(Lab().timing("step", SHORT, -0.05), 0.5)
    assert decide(suite, Evidence.of([made.run()])).verdict("long") is Verdict.DISABLE


def test_explaining_changes_no_verdict_and_no_order_of_rows_matters() -> None:
    suite = suite_of()
    evidence = Evidence.of([controls(windows(), 0.2).run()])
    decision = decide(suite, evidence)
    explained = explain(decision, suite, evidence)
    assert [item.verdict for item in explained.regimes] == [item.verdict for item in decision.regimes]
    made = controls(windows(), 0.2)
    made.samples.reverse()
    again = Evidence.of([made.run()])
    assert explain(decide(suite, again), suite, again).to_json() == explained.to_json()


def test_cells_without_windows_or_with_broken_ones_are_not_diagnosed() -> None:
    suite = suite_of()
    assert diagnostics(suite, Evidence.of([Lab().run()])) == ()
    made = scaled(windows(), lambda sample: math.nan if sample.session else 1.0)
    [one] = diagnostics(suite, Evidence.of([made.run()]))
    assert math.isnan(one.drift.p) and not one.contaminated


def test_of_equal_arms_few_cells_are_called_contaminated() -> None:
    """6 sessions, a heavy-tailed control: 1 in 100 by its nominal error, simulated over 400 cells."""
    rng = np.random.default_rng(7)
    contaminated = 0
    for _ in range(400):
        made = Lab(sessions=6, blocks=2)
        for session in range(6):
            for variant in ("old", "new"):
                made.add(CASE, "step", variant, "step_time", 1000.0, session=session)
                value = 20.0 * math.exp(float(rng.standard_t(3)) * 0.05)
                made.add(CASE, "step", variant, "phase.sample", value, session=session, scope="session")
        [one] = (item for item in (_control_of(made),))
        contaminated += one
    assert contaminated <= 10  # P(more than 10 of 400 at 1 %) is 0.003


def _control_of(made: Lab) -> bool:
    from kbench.decide.diagnostics import diagnose

    evidence = Evidence.of([made.run()])
    [cell] = evidence.cells("step")
    return diagnose(suite_of(), evidence, cell).contaminated


def test_every_point_is_diagnosed() -> None:
    made = Lab()
    for point in POINTS:
        made.timing("step", point, 0.0).timing("kernel", point, 0.0)
    assert len(diagnostics(suite_of(), Evidence.of([made.run()]))) == 4
