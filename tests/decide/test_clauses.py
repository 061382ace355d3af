"""Each kind of clause: pass, fail, inconclusive, missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from decide_lab import GOODPUT, LATENCY, LONG, OUTPUT, PREEMPTIONS, SHORT, STEP, Lab, make_suite
from scipy import stats as scipy_stats

from kbench.decide import Cell, ClauseResult, Decision, Evidence, Verdict, decide
from kbench.errors import ExitCode, IntegrityError, UsageError


def decided(lab: Lab, clause: Mapping[str, Any], **how: Any) -> Decision:
    counts = {name: how.pop(name) for name in ("aborted", "aa_floors", "weights") if name in how}
    return decide(make_suite({"long": [clause]}, **how), Evidence.of([lab.run()], **counts))


def judged(lab: Lab, clause: Mapping[str, Any], **how: Any) -> ClauseResult:
    return decided(lab, clause, **how).regimes[0].clauses[0]


def steps(saving_short: float, saving_long: float | None = None, **how: Any) -> Lab:
    lab = Lab(**how)
    return lab.timing("step", SHORT, saving_short).timing(
        "step", LONG, saving_short if saving_long is None else saving_long
    )


# ---------------------------------------------------------------------------------------------- timings


@pytest.mark.parametrize(("saving", "status"), [(0.08, "pass"), (0.0, "fail"), (0.021, "inconclusive")])
def test_superiority(saving: float, status: str) -> None:
    found = judged(steps(saving), STEP)
    assert found.status == status
    assert found.low < found.observed < found.high
    assert found.observed == pytest.approx(saving, abs=0.006)
    assert found.threshold == 0.02


def test_the_worst_cell_decides_and_is_named() -> None:
    found = judged(steps(0.08, 0.0), STEP)
    assert (found.status, found.cell) == ("fail", LONG)
    assert LONG in found.detail
    assert [cell.status for cell in found.cells] == ["pass", "fail"]


@pytest.mark.parametrize(("saving", "status"), [(0.01, "pass"), (-0.12, "fail"), (-0.05, "inconclusive")])
def test_noninferiority_of_a_time(saving: float, status: str) -> None:
    clause = {"level": "step", "metric": "step_time", "test": "noninferiority", "margin": 0.05}
    found = judged(steps(saving), clause)
    assert found.status == status
    assert found.observed == pytest.approx(-saving, abs=0.01)


def test_equivalence_of_a_time_is_no_stricter_than_one_percent_or_the_noise_of_the_host() -> None:
    clause = {"level": "step", "metric": "step_time", "test": "equivalence", "margin": 0.001}
    lab = Lab(sessions=12).timing("step", SHORT, 0.0).timing("step", LONG, 0.0)
    assert judged(lab, clause).status == "pass"
    off = Lab(sessions=12).timing("step", SHORT, 0.03).timing("step", LONG, 0.0)
    assert judged(off, clause).status == "fail"
    assert judged(off, clause, aa_floors={Cell("step", "step", SHORT): 0.06}).status == "pass"
    assert judged(off, clause, aa_floors={Cell("step", "step", LONG): 0.06}).status == "fail"


def test_the_slowest_step_of_a_window_stands_for_its_p99() -> None:
    clause = {"level": "step", "metric": "step_time_p99", "test": "noninferiority", "margin": 0.05}
    lab = Lab()
    for point in (SHORT, LONG):
        lab.timing("step", point, 0.0, metric="step_time_max")
    assert judged(lab, clause).status == "pass"


@pytest.mark.parametrize(("new", "status"), [(10.0, "pass"), (300.0, "fail")])
def test_conversion_is_taken_once_a_session(new: float, status: str) -> None:
    clause = {"level": "step", "metric": "conversion_time", "test": "max_increase", "margin": 0.10}
    lab = steps(0.05)
    for point in (SHORT, LONG):
        lab.once(point, "conversion_time", 10.0, new, sd=0.1)
    assert judged(lab, clause).status == status


@pytest.mark.parametrize(("new", "status"), [(0.0, "pass"), (0.05, "pass"), (30.0, "fail")])
def test_a_baseline_without_conversion_allows_the_margin_of_one_microsecond(new: float, status: str) -> None:
    clause = {"level": "step", "metric": "conversion_time", "test": "max_increase", "margin": 0.10}
    lab = steps(0.05)
    for point in (SHORT, LONG):
        lab.once(point, "conversion_time", 0.0, new)
    assert judged(lab, clause).status == status


def test_kernel_cells_are_the_points_that_an_operation_serves() -> None:
    points = {"long": ("1*1@4096", "512", "2*512+30*1@1024")}
    ops = ("attention.decode", "attention.prefill")
    lab = Lab().timing("kernel", "1*1@4096", 0.1).timing("kernel", "512", 0.1, op="attention.prefill")
    found = judged(lab, LATENCY, points=points, ops=ops)
    assert found.status == "pass"
    assert [cell.cell for cell in found.cells] == ["attention.decode at 1*1@4096", "attention.prefill at 1*512"]


def test_a_kernel_clause_without_a_cell_is_missing() -> None:
    assert judged(Lab(), LATENCY, points={"long": ("512",)}).status == "missing"


def test_weighted_cells_are_judged_as_one() -> None:
    clause = {**STEP, "across": "weighted"}
    lab = steps(0.0, 0.10)
    assert judged(lab, clause).status == "missing"
    mostly_long = judged(lab, clause, weights={SHORT: 0.1, LONG: 0.9})
    assert mostly_long.status == "pass"
    assert mostly_long.observed == pytest.approx(0.09, abs=0.01)
    assert judged(lab, clause, weights={SHORT: 0.9, LONG: 0.1}).status != "pass"


# ------------------------------------------------------------------------------------- sessions and looks


def test_too_few_sessions_are_missing_evidence_and_say_how_many_are_needed() -> None:
    found = judged(steps(0.2, sessions=5), STEP)
    assert found.status == "missing"
    assert "needs 6 sessions, has 5" in found.detail


def test_only_the_sessions_of_the_look_enter() -> None:
    """Sessions 7 and 8 save nothing, but with looks at 6 and 12 only the first six count."""
    early = Lab(sessions=6, name="1").timing("step", SHORT, 0.08).timing("step", LONG, 0.08).run()
    late = Lab(sessions=2, name="2").timing("step", SHORT, -0.5).timing("step", LONG, -0.5).run()
    suite = make_suite({"long": [STEP]}, looks=(6, 12))
    alone = decide(suite, Evidence.of([early])).regimes[0].clauses[0]
    pooled = decide(suite, Evidence.of([late, early])).regimes[0].clauses[0]
    assert alone == pooled
    at_eight = decide(make_suite({"long": [STEP]}, looks=(6, 8)), Evidence.of([early, late]))
    assert at_eight.regimes[0].clauses[0].status != "pass"


def test_an_earlier_look_a_further_regime_and_an_aborted_run_leave_less_error() -> None:
    lab = steps(0.03)
    one = decided(lab, STEP, looks=(6,))
    aborted = decided(lab, STEP, looks=(6,), aborted=1)
    assert aborted.alpha_per_regime == pytest.approx(one.alpha_per_regime / 2)
    two = decide(make_suite({"a": [STEP], "b": [STEP]}, looks=(6,)), Evidence.of([lab.run()]))
    assert two.alpha_per_regime == pytest.approx(0.025)
    single, first = one.regimes[0].clauses[0], judged(lab, STEP, looks=(6, 12))
    assert first.cells[0].slack < single.cells[0].slack


def test_looks_that_do_not_increase_are_refused() -> None:
    with pytest.raises(UsageError, match="looks"):
        decided(steps(0.1), STEP, looks=(8, 6))


def test_inconclusive_says_how_many_sessions_would_settle_it() -> None:
    found = judged(steps(0.024), STEP)
    assert found.status == "inconclusive"
    assert "more sessions" in found.detail


def test_one_session_that_scatters_with_the_process_does_not_pass() -> None:
    """Six sessions with an offset of 5 % each: pooled blocks would be significant, sessions are not."""
    lab = Lab(sessions=6)
    for point in (SHORT, LONG):
        lab.timing("step", point, 0.04, session_sd=0.05, window_sd=0.001)
    assert judged(lab, STEP).status == "inconclusive"


# ------------------------------------------------------------------------------------------------ trials


CASE = f"step/step/tiny/{LONG}"


@pytest.mark.parametrize("status", ["failed", "incorrect", "crashed", "hung", "out-of-memory"])
def test_a_candidate_that_breaks_once_fails_however_fast_it_is(status: str) -> None:
    found = judged(steps(0.2).trial(CASE, "new", session=99, status=status, message="NaN in\nrow 3"), STEP)
    assert found.status == "fail"
    assert "NaN in row 3" in found.detail


@pytest.mark.parametrize("status", ["failed", "incorrect", "crashed", "hung", "out-of-memory"])
def test_a_baseline_that_breaks_voids_its_session(status: str) -> None:
    lost = steps(0.2).trial(CASE, "old", session=2, status=status, message="gone")
    assert judged(lost, STEP).status == "missing"
    assert "gone" in judged(lost, STEP).detail
    spare = steps(0.2, sessions=7).trial(CASE, "old", session=2, status=status)
    assert judged(spare, STEP).status == "pass"


@pytest.mark.parametrize("status", ["unsupported", "non-discriminating", "something new"])
@pytest.mark.parametrize("variant", ["old", "new"])
def test_what_was_not_measured_or_shows_nothing_is_missing(status: str, variant: str) -> None:
    lab = steps(0.2)
    lab.trials = [
        replace(trial, status=status, message="page_size: wants 48")
        if (trial.case, trial.variant) == (CASE, variant)
        else trial
        for trial in lab.trials
    ]
    found = judged(lab, STEP)
    assert found.status == "missing"
    assert "page_size: wants 48" in found.detail


def test_samples_without_a_trial_are_missing() -> None:
    lab = steps(0.2)
    lab.trials = [trial for trial in lab.trials if trial.variant == "old"]
    assert judged(lab, STEP).status == "missing"


# --------------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize(("change", "status"), [(0.0, "pass"), (-0.10, "fail"), (-0.03, "inconclusive")])
def test_goodput(change: float, status: str) -> None:
    found = judged(Lab().workload("long", "goodput", 0.85, change), {**GOODPUT, "mode": "exec"})
    assert (found.status, found.mode) == (status, "exec")
    assert found.observed == pytest.approx(change, abs=0.01)


def test_a_clause_is_not_judged_by_another_mode() -> None:
    assert judged(Lab().workload("long", "goodput", 0.85, 0.0, mode="exec"), GOODPUT).status == "missing"


def test_twenty_segments_are_needed() -> None:
    clause = {**GOODPUT, "mode": "exec"}
    assert judged(Lab().workload("long", "goodput", 0.85, 0.1, segments=20), clause).status == "pass"
    found = judged(Lab().workload("long", "goodput", 0.85, 0.1, segments=19), clause)
    assert found.status == "missing"
    assert "has 19" in found.detail


def test_every_trace_class_must_hold() -> None:
    clause = {**GOODPUT, "mode": "exec"}
    classes = {"long": ("long", "chat")}
    lab = Lab().workload("long", "goodput", 0.85, 0.0)
    assert judged(lab, clause, classes=classes).status == "missing"
    found = judged(lab.workload("chat", "goodput", 0.85, -0.2), clause, classes=classes)
    assert found.status == "fail"
    assert "chat" in found.cell


def test_a_baseline_that_serves_nothing_is_missing() -> None:
    lab = Lab().workload("long", "goodput", [0.0] * 24, 0.0, sd=0.0)
    assert judged(lab, {**GOODPUT, "mode": "exec"}).status == "missing"


@pytest.mark.parametrize(("change", "status"), [(0.0, "pass"), (0.5, "fail")])
def test_a_latency_must_not_grow(change: float, status: str) -> None:
    clause = {"level": "workload", "mode": "exec", "metric": "ttft_p99", "test": "noninferiority", "margin": 0.1}
    assert judged(Lab().workload("long", "ttft_p99", 5e4, change), clause).status == status


def test_a_latency_can_be_required_to_shrink() -> None:
    clause = {"level": "workload", "mode": "exec", "metric": "tpot_p50", "test": "superiority", "min_saving": 0.05}
    found = judged(Lab().workload("long", "tpot_p50", 5e3, -0.2), clause)
    assert found.status == "pass"
    assert found.observed == pytest.approx(0.2, abs=0.02)
    assert found.low < found.observed < found.high


@pytest.mark.parametrize(("change", "status"), [(0.0, "pass"), (0.8, "fail"), (0.10, "inconclusive")])
def test_a_counter_must_not_increase(change: float, status: str) -> None:
    clause = {**PREEMPTIONS, "mode": "exec"}
    assert judged(Lab().workload("long", "preemptions_per_1k", 40.0, change), clause).status == status


@pytest.mark.parametrize(("new", "status"), [(0.0, "pass"), (5.0, "fail")])
def test_a_counter_that_the_baseline_does_not_move(new: float, status: str) -> None:
    clause = {**PREEMPTIONS, "mode": "exec"}
    found = judged(Lab().workload("long", "preemptions_per_1k", [0.0] * 24, new, sd=0.0), clause)
    assert found.status == status
    assert "in units of 1" in found.detail


@pytest.mark.parametrize(("change", "status"), [(0.0, "pass"), (0.2, "fail")])
def test_outputs_diverge_no_more_than_the_baseline_from_itself(change: float, status: str) -> None:
    lab = Lab().workload("long", "output_divergence", 0.05, change, segments=400, sd=0.004, spread=0.0)
    assert judged(lab, OUTPUT).status == status


def diverged(new: list[float], old: list[float], *gone: int) -> Lab:
    """Outputs compared as a run does it: on the slice, recorded under the real replay's name."""
    lab = Lab()
    for variant, values in (("new", new), ("old", old)):
        for request, value in enumerate(values):
            if variant == "old" or request not in gone:
                lab.add(
                    "workload/replay/tiny/long", "workload", variant, "output_divergence", value,
                    scope="segment", segment=request, mode="exec",
                )  # fmt: skip
        for op in ("slice", "divergence"):
            lab.trial(f"workload/{op}/tiny/long", variant)
    return lab


SAME = [0.0] * 400


def test_outputs_are_those_of_the_slice() -> None:
    assert judged(diverged(SAME, SAME), OUTPUT).status == "pass"
    assert judged(diverged([0.5] * 40, [0.0] * 40), OUTPUT).status == "fail"
    lost = diverged(SAME, SAME).trial("workload/slice/tiny/long", "new", status="hung")
    assert judged(lost, OUTPUT).status == "fail"


def test_a_few_unfinished_requests_have_no_output_but_not_many() -> None:
    assert judged(diverged(SAME, SAME, 3), OUTPUT).status == "pass"
    assert judged(diverged(SAME, SAME, *range(30)), OUTPUT).status == "missing"


@pytest.mark.parametrize(("requests", "status"), [(40, "inconclusive"), (298, "inconclusive"), (299, "pass")])
def test_equal_outputs_prove_no_more_than_their_number(requests: int, status: str) -> None:
    """The rule of three: 1 - 0.05^(1/n) is below 1 % from 299 requests on."""
    found = judged(diverged([0.0] * requests, [0.0] * requests), OUTPUT)
    assert found.status == status
    if requests == 40:
        assert "more requests" in found.detail


def test_few_different_outputs_are_counted() -> None:
    """3 of 400 that differ: the exact upper bound of the share is 1.93 % at 95 %, as scipy's binomial test has it."""
    found = judged(diverged([1.0] * 3 + SAME[3:], SAME), {**OUTPUT, "margin": 0.0195})
    assert found.status == "pass"
    limit = scipy_stats.binomtest(3, 400, alternative="less").proportion_ci(0.95).high
    assert 0.019 < limit < 0.0195
    assert judged(diverged([1.0] * 3 + SAME[3:], SAME), {**OUTPUT, "margin": limit - 1e-4}).status == "inconclusive"


def test_a_real_replay_has_one_look() -> None:
    """A second run that looks better changes nothing; a modelled replay is pooled."""
    bad = Lab(name="1").workload("long", "goodput", 0.85, -0.03, sd=0.03)
    better = Lab(name="2").workload("long", "goodput", 0.85, 0.5, sd=0.03)
    suite = make_suite({"long": [{**GOODPUT, "mode": "exec"}]})
    first = decide(suite, Evidence.of([bad.run()])).regimes[0].clauses[0]
    both = decide(suite, Evidence.of([bad.run(), better.run()])).regimes[0].clauses[0]
    assert (first.status, both.status) == ("inconclusive", "inconclusive")
    assert both.observed == first.observed


def test_segments_must_be_able_to_carry_the_error() -> None:
    """At an error of 1 in 100,000 nothing simulated says what 20 segments can miss."""
    clause = {**GOODPUT, "mode": "exec"}
    lab = Lab().workload("long", "goodput", 0.85, 0.1, segments=20)
    found = judged(lab, clause, alpha=0.00001)
    assert found.status == "inconclusive"
    assert "cannot carry" in found.detail


# -------------------------------------------------------------------------------------------- modelled


def modelled(**calibration: Any) -> Lab:
    return Lab().workload("long", "goodput", 0.85, 0.0, mode="virtual", sd=0.002).calibration("long", **calibration)


def test_a_modelled_result_gates_with_a_calibration_and_says_so() -> None:
    found = judged(modelled(), GOODPUT)
    assert (found.status, found.mode) == ("pass", "virtual")
    assert "modelled" in found.detail


def test_the_models_error_widens_the_interval_on_both_sides() -> None:
    tight, wide = judged(modelled(bias=0.0, half_width=0.0), GOODPUT), judged(modelled(half_width=0.05), GOODPUT)
    assert wide.status == "inconclusive"
    assert wide.low < tight.low < tight.high < wide.high
    assert "calibrate with a longer exec slice" in wide.detail
    assert judged(modelled(bias=-0.05), GOODPUT).status == "inconclusive"
    far = Lab().workload("long", "goodput", 0.85, -0.10, mode="virtual", sd=0.002)
    assert judged(far.calibration("long", bias=0.1), GOODPUT).status == "inconclusive"


@pytest.mark.parametrize(
    "calibration",
    [
        {"usable": False, "exec_attainment": 1.0},
        {"bias": math.nan},
        {"half_width": math.inf},
        {"half_width": -1.0},
        {"exec_attainment": 0.0},
        {"bias": None},
    ],
)
def test_without_a_usable_calibration_it_is_missing(calibration: dict[str, Any]) -> None:
    found = judged(modelled(**calibration), GOODPUT)
    assert found.status == "missing"
    assert "no usable calibration of old" in found.detail


def test_both_arms_need_a_calibration() -> None:
    lab = modelled()
    lab.trials = [trial for trial in lab.trials if (trial.variant, "calibrate" in trial.case) != ("new", True)]
    assert "no usable calibration of new" in judged(lab, GOODPUT).detail


def test_a_candidate_that_breaks_in_the_real_slice_fails_though_the_gate_is_modelled() -> None:
    lab = modelled().trial("workload/slice/tiny/long", "new", status="crashed", message="signal 11")
    decision = decided(lab, GOODPUT)
    assert decision.verdict("long") is Verdict.DISABLE
    assert "signal 11" in decision.regimes[0].reasons[0]


@pytest.mark.parametrize("case", ["workload/calibrate/tiny/long", "workload/replay/tiny/long;mode=virtual"])
def test_a_model_that_fails_is_missing_evidence_and_nobodys_crash(case: str) -> None:
    lab = modelled()
    lab.trials = [
        replace(trial, status="failed", message="no such file")
        if (trial.case, trial.variant) == (case, "new")
        else trial
        for trial in lab.trials
    ]
    found = judged(lab, GOODPUT)
    assert found.status == "missing"
    assert "no such file" in found.detail


def test_a_replay_that_could_not_start_says_what_its_setup_said() -> None:
    lab = Lab().trial("workload/setup/tiny/all", "old", status="failed", message="no cost grid was measured")
    assert "no cost grid was measured" in judged(lab, GOODPUT).detail


@pytest.mark.parametrize("share", [0.5, None, math.nan])
def test_too_many_extrapolated_steps_are_missing(share: float | None) -> None:
    lab = Lab().workload("long", "goodput", 0.85, 0.0, mode="virtual", facts={"extrapolated_fraction": share})
    found = judged(lab.calibration("long"), GOODPUT)
    assert found.status == "missing"
    assert "cost grid" in found.detail


# --------------------------------------------------------------------------------------------- implied


def test_a_wrong_kernel_disables_though_no_clause_names_it() -> None:
    lab = steps(0.2).trial(f"kernel/attention.decode/tiny/{LONG}", "new", status="incorrect", message="rel L2 0.3")
    decision = decided(lab, STEP)
    assert decision.verdict("long") is Verdict.DISABLE
    implied = decision.regimes[0].clauses[-1]
    assert (implied.implied, implied.level, implied.status) == (True, "kernel", "fail")
    assert "rel L2 0.3" in decision.regimes[0].reasons[0]


def test_a_wrong_kernel_elsewhere_does_not_concern_the_regime() -> None:
    lab = steps(0.2).trial("kernel/attention.decode/tiny/8*1@64", "new", status="incorrect")
    assert decided(lab, STEP).verdict("long") is Verdict.ENABLE


def test_a_slower_kernel_disables_where_the_suite_stops_early() -> None:
    lab = steps(0.2).timing("kernel", LONG, -0.2)
    assert decided(lab, STEP, stop="never").verdict("long") is Verdict.ENABLE
    stopped = decided(lab, STEP, stop="when-decided")
    assert stopped.verdict("long") is Verdict.DISABLE
    assert "level 3 is not due" in stopped.regimes[0].reasons[0]


def test_a_candidate_that_breaks_in_the_cost_grid_fails() -> None:
    lab = steps(0.2).trial("step/costs/tiny/grid", "new", status="crashed")
    assert decided(lab, STEP).verdict("long") is Verdict.DISABLE


# -------------------------------------------------------------------------------------------- integrity


@pytest.mark.parametrize(
    ("facts", "valid"),
    [
        ({"selection": {"requested": "a", "resolved": "a", "observed": ""}}, True),
        ({"selection": {"requested": "a", "resolved": "a", "observed": "a"}}, True),
        ({"selection": {"requested": "a", "resolved": "a", "observed": "b"}}, False),
        ({"selection": {"decode": {"requested": "a", "resolved": "a", "observed": "b"}, "prefill": {}}}, False),
        ({"selection": {"decode": {"requested": "a", "resolved": "b", "observed": ""}}}, False),
    ],
)
def test_what_ran_must_be_what_was_asked_for(facts: dict[str, Any], valid: bool) -> None:
    decision = decided(steps(0.2).trial(CASE, "new", facts=facts), STEP)
    assert (decision.verdict("long") is Verdict.ENABLE) == valid
    if not valid:
        assert decision.verdict("long") is Verdict.INVALID
        assert decision.exit_code is ExitCode.INTEGRITY


def test_the_callers_integrity_problems_make_everything_invalid() -> None:
    evidence = Evidence.of([steps(0.2).run()], integrity=["ledger line 4 is gone"])
    decision = decide(make_suite({"long": [STEP]}), evidence)
    assert decision.verdict("long") is Verdict.INVALID
    assert "ledger line 4 is gone" in decision.regimes[0].reasons[0]


def test_evidence_of_another_plan_is_refused() -> None:
    evidence = Evidence.of([steps(0.2).run()])
    assert decide(make_suite(), evidence, plan_hash="abc").plan_hash == "abc"
    with pytest.raises(IntegrityError, match="not of"):
        decide(make_suite(), evidence, plan_hash="other")
