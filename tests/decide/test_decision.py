"""Verdicts, exit codes, the ladder, the JSON document, and what must hold for any evidence."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decide_lab import GOODPUT, LATENCY, LONG, OUTPUT, POINTS, PREEMPTIONS, SHORT, STEP, Lab, make_suite, shuffled
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.decide import Evidence, Verdict, decide, level_passes, needs_workload
from kbench.errors import ExitCode
from kbench.record import RunRecord, Sample, SampleTable, SessionMark, Trial

EXEC_GOODPUT = {**GOODPUT, "mode": "exec"}
EXEC_PREEMPTIONS = {**PREEMPTIONS, "mode": "exec"}
ALL = [STEP, EXEC_GOODPUT, EXEC_PREEMPTIONS, OUTPUT]


ENOUGH = 400
"""Equal outputs that bound the share of different ones below 1 % (3/n at 95 %)."""


def good(**how: Any) -> Lab:
    """Evidence that enables the regime `long` under every clause of `ALL`."""
    lab = Lab(**how)
    for point in POINTS:
        lab.timing("kernel", point, 0.2).timing("step", point, 0.08)
    lab.workload("long", "goodput", 0.85, 0.01).workload("long", "preemptions_per_1k", 30.0, -0.5)
    return lab.workload("long", "output_divergence", [0.0] * ENOUGH, 0.0, sd=0.0)


def test_all_clauses_pass_and_the_regime_is_enabled() -> None:
    decision = decide(make_suite({"long": ALL}), Evidence.of([good().run()]))
    assert decision.verdict("long") is Verdict.ENABLE
    assert decision.exit_code is ExitCode.DONE
    assert len(decision.regimes[0].reasons) == len(ALL)


def test_the_chapters_case() -> None:
    """The step gets faster everywhere; goodput regresses where prefixes are shared: a conditional verdict."""
    lab = good()
    lab.workload("chat", "goodput", 0.85, -0.12).workload("chat", "preemptions_per_1k", 30.0, -0.5)
    suite = make_suite(
        {"long-context": [STEP, EXEC_GOODPUT, EXEC_PREEMPTIONS], "prefix-heavy": [STEP, EXEC_GOODPUT]},
        points={"long-context": [LONG], "prefix-heavy": [SHORT, LONG]},
        classes={"long-context": ["long"], "prefix-heavy": ["chat"]},
    )
    decision = decide(suite, Evidence.of([lab.run()]))
    assert decision.verdict("long-context") is Verdict.ENABLE
    assert decision.verdict("prefix-heavy") is Verdict.DISABLE
    assert decision.exit_code is ExitCode.DISABLE
    step, goodput = decision.regimes[1].clauses
    assert (step.status, goodput.status) == ("pass", "fail")
    assert len(decision.regimes[1].reasons) == 1
    assert "goodput" in decision.regimes[1].reasons[0]


@pytest.mark.parametrize(
    ("saving", "replayed", "verdict", "code"),
    [
        (0.08, True, Verdict.ENABLE, 0),
        (0.0, False, Verdict.DISABLE, 1),
        (0.022, False, Verdict.MISSING, 4),
        (0.08, False, Verdict.MISSING, 4),
        (0.022, True, Verdict.INCONCLUSIVE, 3),
    ],
)
def test_fail_before_missing_before_inconclusive(saving: float, replayed: bool, verdict: Verdict, code: int) -> None:
    lab = Lab()
    for point in POINTS:
        lab.timing("step", point, saving)
    if replayed:
        lab.workload("long", "goodput", 0.85, 0.01)
    decision = decide(make_suite({"long": [STEP, EXEC_GOODPUT]}), Evidence.of([lab.run()]))
    assert decision.verdict("long") is verdict
    assert int(decision.exit_code) == code


def test_no_evidence_at_all_is_missing() -> None:
    decision = decide(make_suite({"long": ALL}), Evidence.of([]))
    assert decision.verdict("long") is Verdict.MISSING
    assert len(decision.regimes[0].reasons) == len(ALL)
    assert LONG in json.dumps(decision.to_json()) or SHORT in json.dumps(decision.to_json())


def test_a_suite_without_regimes_gates_nothing() -> None:
    decision = decide(make_suite({}), Evidence.of([good().run()]))
    assert (decision.regimes, decision.exit_code) == ((), ExitCode.DONE)


# ------------------------------------------------------------------------------------------------ ladder


def test_level_three_is_due_once_levels_one_and_two_pass() -> None:
    suite = make_suite({"long": ALL}, stop="when-decided")
    assert needs_workload(suite, Evidence.of([])) == {"long": False}
    assert needs_workload(suite, Evidence.of([good().run()])) == {"long": True}


def test_level_three_is_not_due_without_a_workload_clause_and_forced_where_nothing_stops() -> None:
    assert needs_workload(make_suite({"long": [STEP]}, stop="never"), Evidence.of([])) == {"long": False}
    assert needs_workload(make_suite({"long": ALL}, stop="never"), Evidence.of([])) == {"long": True}


@pytest.mark.parametrize(("kernel", "step", "passes"), [(0.2, 0.08, True), (-0.2, 0.08, False), (0.2, 0.0, False)])
def test_the_ladder(kernel: float, step: float, passes: bool) -> None:
    lab = Lab()
    for point in POINTS:
        lab.timing("kernel", point, kernel).timing("step", point, step)
    suite = make_suite({"long": ALL}, stop="when-decided")
    evidence = Evidence.of([lab.run()])
    assert level_passes(suite, evidence, "kernel", suite.regime[0]) == (kernel > 0)
    assert level_passes(suite, evidence, "step", suite.regime[0]) == (step > 0.02)
    assert needs_workload(suite, evidence) == {"long": passes}


def test_an_unmeasured_or_wrong_cell_stops_the_ladder() -> None:
    suite = make_suite({"long": ALL}, stop="when-decided")
    one = Evidence.of([Lab().timing("kernel", LONG, 0.2).run()])
    assert not level_passes(suite, one, "kernel", suite.regime[0])
    wrong = Evidence.of([good().trial(f"step/step/tiny/{LONG}", "new", status="incorrect").run()])
    assert not level_passes(suite, wrong, "step", suite.regime[0])


# -------------------------------------------------------------------------------------------------- JSON


def test_the_document_has_the_keys_of_the_contract_and_no_nan() -> None:
    suite = make_suite({"long": ALL, "again": [LATENCY]})
    one = Lab(sessions=1).timing("step", LONG, 0.1).timing("step", SHORT, 0.1)
    for evidence in (Evidence.of([]), Evidence.of([one.run()], aborted=1), Evidence.of([good().run()])):
        document = json.loads(json.dumps(decide(suite, evidence).to_json(), allow_nan=False))
        assert {"suite", "plan_hash", "exit_code", "regimes", "runs"} <= set(document)
        assert set(document["runs"]) == {"total", "aborted", "void"}
        for regime in document["regimes"]:
            assert {"regime", "verdict", "clauses", "reasons"} <= set(regime)
            for clause in regime["clauses"]:
                assert {
                    "level", "metric", "test", "mode", "status", "observed", "low", "high", "threshold"
                } <= set(clause)  # fmt: skip
                assert clause["status"] in {"pass", "fail", "inconclusive", "missing"}
                assert clause["mode"] in {None, "virtual", "exec"}


# -------------------------------------------------------------------------------------------- properties

FULL = good().run()
SUITE = make_suite({"long": [LATENCY, *ALL]})
CELLS = sorted({(sample.case, sample.variant, sample.metric, sample.mode) for sample in FULL.samples.rows()})
TRIALS = sorted({(trial.case, trial.variant) for trial in FULL.trials})


def verdict_of(record: RunRecord) -> Verdict:
    return decide(SUITE, Evidence.of([record])).verdict("long")


def with_rows(record: RunRecord, rows: list[Sample]) -> RunRecord:
    return replace(record, samples=SampleTable.of(rows))


def test_the_evidence_of_the_properties_enables() -> None:
    assert verdict_of(FULL) is Verdict.ENABLE


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_removing_any_required_cell_never_enables(cell: tuple[str, str, str, str]) -> None:
    rows = [row for row in FULL.samples.rows() if (row.case, row.variant, row.metric, row.mode) != cell]
    assert verdict_of(with_rows(FULL, rows)) is Verdict.MISSING


@pytest.mark.parametrize("gone", TRIALS, ids=str)
def test_removing_any_required_trial_never_enables(gone: tuple[str, str]) -> None:
    trials = tuple(trial for trial in FULL.trials if (trial.case, trial.variant) != gone)
    assert verdict_of(replace(FULL, trials=trials)) is Verdict.MISSING


@pytest.mark.parametrize("position", range(len(SUITE.regime[0].require)))
def test_a_failing_clause_never_enables(position: int) -> None:
    """Each clause in turn gets a threshold that this evidence is certain to miss."""
    strict = {
        "latency": {"min_saving": 0.9},
        "step_time": {"min_saving": 0.9},
        "goodput": {"test": "superiority", "min_saving": 0.9, "margin": None},
        "preemptions_per_1k": {"test": "superiority", "min_saving": 0.99, "margin": None},
        "output_divergence": {"test": "superiority", "min_saving": 0.5, "margin": None},
    }
    clauses = [clause.model_dump(exclude_none=True) for clause in SUITE.regime[0].require]
    clauses[position] |= strict[clauses[position]["metric"]]
    clauses[position] = {key: value for key, value in clauses[position].items() if value is not None}
    decision = decide(make_suite({"long": clauses}), Evidence.of([FULL]))
    assert decision.regimes[0].clauses[position].status == "fail"
    assert decision.verdict("long") is Verdict.DISABLE


@given(
    place=st.integers(0, len(FULL.samples) - 1),
    bad=st.sampled_from([math.nan, math.inf, -math.inf, -1.0]),
)
@settings(max_examples=40, deadline=None)
def test_a_sample_that_is_no_number_never_enables(place: int, bad: float) -> None:
    value = FULL.samples.value.copy()
    value[place] = bad
    assert verdict_of(replace(FULL, samples=replace(FULL.samples, value=value))) in (Verdict.MISSING, Verdict.DISABLE)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    suite = make_suite({"long": [STEP, EXEC_GOODPUT, OUTPUT]})
    wanted = decide(suite, Evidence.of([FULL])).to_json()
    assert decide(suite, Evidence.of([shuffled(FULL, seed)])).to_json() == wanted


RANK = {Verdict.DISABLE: 0, Verdict.INCONCLUSIVE: 1, Verdict.ENABLE: 2}


@given(
    seed=st.integers(0, 1_000),
    effect=st.floats(-0.1, 0.1),
    metric=st.sampled_from(["step_time", "goodput", "preemptions_per_1k", "ttft_p99", "output_divergence"]),
    test=st.sampled_from(["superiority", "noninferiority", "max_increase", "equivalence"]),
    limits=st.tuples(st.floats(0.001, 0.3), st.floats(0.001, 0.3)),
)
@settings(max_examples=60, deadline=None)
def test_a_laxer_threshold_never_makes_a_verdict_worse(
    seed: int, effect: float, metric: str, test: str, limits: tuple[float, float]
) -> None:
    """A smaller min_saving, a larger margin. Fail bounds are of another error rate, so only the order is asserted."""
    if metric == "step_time":
        record = Lab(seed=seed, blocks=2).timing("step", LONG, effect, session_sd=0.02).run()
    else:
        noisy = {"sd": 0.1, "spread": 0.8} if metric == "preemptions_per_1k" else {"sd": 0.05}
        record = Lab(seed=seed).workload("long", metric, 0.5, effect, **noisy).run()
    evidence = Evidence.of([record])
    ordered = sorted(limits, reverse=test == "superiority")
    verdicts = []
    for limit in ordered:
        clause: dict[str, Any] = {"level": "step" if metric == "step_time" else "workload", "metric": metric}
        clause |= {"test": test, "min_saving" if test == "superiority" else "margin": limit}
        if metric != "step_time":
            clause["mode"] = "exec"
        suite = make_suite({"long": [clause]}, points={"long": [LONG]})
        verdicts.append(RANK[decide(suite, evidence).verdict("long")])
    assert verdicts[0] <= verdicts[1]


@pytest.mark.parametrize("sample", ["step_time", "latency", "goodput", "preemptions_per_1k", "output_divergence"])
def test_no_samples_of_a_metric_are_missing_never_a_pass(sample: str) -> None:
    rows = [row for row in FULL.samples.rows() if row.metric != sample]
    assert verdict_of(with_rows(FULL, rows)) is Verdict.MISSING
    empty = [row for row in FULL.samples.rows() if row.metric != sample or row.variant != "new"]
    assert verdict_of(with_rows(FULL, empty)) is Verdict.MISSING


# --------------------------------------------------------------------------------------- several regimes


def borderline(looks: tuple[int, ...], *others: float) -> Verdict:
    """The verdict of a regime that passes at alpha / 1, not at alpha / 3, beside two others."""
    lab = Lab(sessions=6, blocks=4, seed=3)
    points = [LONG, *(f"{batch}*1@512" for batch in range(2, 2 + len(others)))]
    for point, saving in zip(points, (0.03, *others), strict=True):
        lab.timing("step", point, saving, session_sd=0.005)
    names = [f"r{number}" for number in range(len(points))]
    suite = make_suite(
        {name: [STEP] for name in names}, points=dict(zip(names, ([p] for p in points), strict=True)), looks=looks
    )
    return decide(suite, Evidence.of([lab.run()])).verdict("r0")


def test_with_one_look_what_is_enabled_hands_its_error_on() -> None:
    """Holm: alone it passes; beside two clear wins too; beside two regimes without a saving it does not."""
    assert borderline((6,)) is Verdict.ENABLE
    assert borderline((6,), 0.2, 0.2) is Verdict.ENABLE
    assert borderline((6,), 0.0, 0.0) is Verdict.INCONCLUSIVE


def test_with_several_looks_it_does_not() -> None:
    """The error of the last look cannot be handed to an earlier one."""
    assert borderline((6, 7)) is Verdict.ENABLE
    assert borderline((6, 7), 0.2, 0.2) is Verdict.INCONCLUSIVE


# ------------------------------------------------------------------------------------------------- scale


def test_a_million_samples_are_decided() -> None:
    points = [f"{batch}*1@{context}" for batch in range(1, 26) for context in range(100, 1000, 100)]
    sessions, blocks = 12, 46
    shape = (len(points), sessions, blocks, 4, 2)
    index = np.indices(shape, dtype=np.int64).reshape(len(shape), -1)
    size = index.shape[1]
    assert size > 990_000
    one = np.zeros(size, np.int32)
    variant = np.where((index[3] == 1) | (index[3] == 2), 1, 0).astype(np.int32)
    value = np.where(variant == 1, 900.0, 1000.0) * np.exp(np.random.default_rng(1).normal(0, 0.01, size))
    names = ("case", "level", "variant", "metric", "unit", "scope", "mode", "clock", "flags")
    codes = dict.fromkeys(names, one) | {"case": index[0].astype(np.int32), "variant": variant}
    codes["metric"] = index[4].astype(np.int32)
    values = {name: [""] for name in names} | {"case": [f"step/step/tiny/{point}" for point in points]}
    values |= {"variant": ["old", "new"], "metric": ["step_time", "step_time_max"], "scope": ["window"]}
    whole = {"session": index[1], "block": index[2], "position": index[3], "segment": np.zeros(size, np.int64)}
    trials = tuple(Trial(0, case, variant, "ok") for case in values["case"] for variant in ("old", "new"))
    marks = tuple(SessionMark(number, True) for number in range(sessions))
    record = replace(
        FULL, samples=SampleTable(codes, values, whole, value), trials=trials, sessions=marks, header=FULL.header
    )
    suite = make_suite({"long": [STEP]}, points={"long": points})
    decision = decide(suite, Evidence.of([record]))
    assert decision.verdict("long") is Verdict.ENABLE


def test_deciding_needs_neither_torch_nor_pandas_nor_scipy_stats() -> None:
    code = (
        "import sys, kbench.decide; "
        "print([m for m in ('torch', 'triton', 'pandas', 'scipy.stats', 'pyarrow') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
