"""Void codes: what raises each, that the arm is never looked at, and that a void excuses only what it explains."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from decide_lab import LONG, POINTS, STEP, Lab, make_suite

from kbench.decide import Evidence, Verdict, decide
from kbench.decide.voids import Event, codes_of, void_sessions
from kbench.record import RunRecord, SessionMark
from kbench.suite.rule_schema import VoidCode
from kbench.suite.schema import Suite

CODES = ("baseline_crash", "throttle", "ecc", "gpu_lost", "wrong_backend", "host_contention")
CASE = f"step/step/tiny/{LONG}"
ECC = "CUDA error: uncorrectable ECC error encountered"
LOST = "NVML: GPU is lost"
WRONG = {"selection": {"decode": {"requested": "new", "resolved": "old", "observed": ""}}}


def with_rule(suite: Suite, **rule: Any) -> Suite:
    return suite.model_copy(update={"rule": suite.rule.model_copy(update=rule)})


def lab(saving: float = 0.08, **how: Any) -> Lab:
    made = Lab(**how)
    for point in POINTS:
        made.timing("step", point, saving)
    return made


def marked(run: RunRecord, session: int, **conditions: Any) -> RunRecord:
    marks = tuple(replace(mark, conditions=conditions) if mark.session == session else mark for mark in run.sessions)
    return replace(run, sessions=marks)


def throttled(made: Lab, session: int, variant: str, share: int = 2) -> Lab:
    made.samples = [
        replace(sample, flags=("THROTTLED",))
        if (sample.session, sample.variant, sample.case) == (session, variant, CASE) and sample.block % share == 0
        else sample
        for sample in made.samples
    ]
    return made


def raised(code: str, variant: str, session: int = 2) -> RunRecord:
    """A run in which `code` occurred once, in one arm where it can belong to one."""
    made = lab(sessions=7)
    if code == "throttle":
        return throttled(made, session, variant).run()
    if code in ("ecc", "gpu_lost"):
        return made.trial(CASE, variant, session=session, status="failed", message=ECC if code == "ecc" else LOST).run()
    if code == "wrong_backend":
        return made.trial(CASE, variant, session=session, facts=WRONG).run()
    return marked(made.run(), session, foreign_cpu_share=0.6)


def test_every_code_of_the_schema_can_be_raised() -> None:
    from typing import get_args

    assert set(CODES) == set(get_args(VoidCode))


@pytest.mark.parametrize("code", [code for code in CODES if code != "baseline_crash"])
def test_a_code_voids_its_session_whichever_arm_it_came_from(code: str) -> None:
    found = {variant: void_sessions(raised(code, variant), CODES) for variant in ("old", "new")}
    assert found["old"] == found["new"] == {2: (code,)}
    for variant in ("old", "new"):
        evidence = Evidence.of([raised(code, variant)], void_codes=[code])
        assert evidence.sessions == 6
        assert [(void.session, void.codes) for void in evidence.voids] == [(2, (code,))]
        for point in POINTS:
            cells = [cell for cell in evidence.cells("step") if cell.point == point]
            for arm in ("old", "new"):
                assert set(evidence.series(cells[0], "step_time", arm).session.tolist()) == set(range(6))


@pytest.mark.parametrize("code", [code for code in CODES if code != "baseline_crash"])
def test_a_code_that_was_not_declared_voids_nothing(code: str) -> None:
    others = [other for other in CODES if other != code]
    assert void_sessions(raised(code, "new"), others) == {}
    assert Evidence.of([raised(code, "new")], void_codes=others).sessions == 7


def test_an_event_has_no_field_that_names_an_arm() -> None:
    assert {item.name for item in fields(Event)} == {"message", "mismatched", "throttled", "conditions"}


def test_exchanging_the_arms_changes_no_void() -> None:
    for code in CODES:
        run = raised(code, "new")
        exchange = {"old": "new", "new": "old"}
        trials = tuple(replace(trial, variant=exchange[trial.variant]) for trial in run.trials)
        names = {**run.samples.values, "variant": [exchange[name] for name in run.samples.values["variant"]]}
        exchanged = replace(run, trials=trials, samples=replace(run.samples, values=names))
        assert void_sessions(exchanged, CODES) == void_sessions(run, CODES)


@pytest.mark.parametrize(
    ("event", "codes"),
    [
        (Event(), set()),
        (Event(message="CUDA error: an illegal memory access was encountered"), set()),
        (Event(message="RuntimeError: device-side assert triggered"), set()),
        (Event(message="no CUDA-capable device is detected"), {"gpu_lost"}),
        (Event(message="GPU 0000:1A has fallen off the bus"), {"gpu_lost"}),
        (Event(throttled=0.04), set()),
        (Event(throttled=0.06), {"throttle"}),
        (Event(conditions={"ecc_uncorrected": [0, 0], "gpus": [1, 1], "foreign_cpu_share": 0.2}), set()),
        (Event(conditions={"ecc_uncorrected": [3, 4]}), {"ecc"}),
        (Event(conditions={"ecc_uncorrected": [None, 4], "gpus": "two"}), set()),
        (Event(conditions={"gpus": [2, 1]}), {"gpu_lost"}),
        (Event(conditions={"foreign_cpu_share": 0.3}), {"host_contention"}),
    ],
)
def test_what_is_evidence_of_a_code(event: Event, codes: set[str]) -> None:
    assert codes_of(event) == codes


def test_a_failure_that_the_code_explains_is_excused_and_no_other() -> None:
    suite = make_suite({"long": [STEP]}, looks=[6])
    lost = raised("gpu_lost", "new")
    assert decide(suite, Evidence.of([lost])).verdict("long") is Verdict.DISABLE
    excused = with_rule(suite, void_codes=("gpu_lost",))
    assert decide(excused, Evidence.of([lost], void_codes=("gpu_lost",))).verdict("long") is Verdict.ENABLE
    wrong = lab(sessions=7).trial(CASE, "new", session=2, status="incorrect", message="wrong by 3e-1").run()
    contended = marked(wrong, 2, foreign_cpu_share=0.9)
    declared = with_rule(suite, void_codes=("host_contention",))
    evidence = Evidence.of([contended], void_codes=("host_contention",))
    assert evidence.sessions == 6
    assert decide(declared, evidence).verdict("long") is Verdict.DISABLE


def test_a_wrong_backend_that_is_no_void_is_an_integrity_failure() -> None:
    suite = make_suite({"long": [STEP]}, looks=[6])
    run = raised("wrong_backend", "new")
    assert decide(suite, Evidence.of([run])).verdict("long") is Verdict.INVALID
    declared = Evidence.of([run], void_codes=("wrong_backend",))
    assert decide(with_rule(suite, void_codes=("wrong_backend",)), declared).verdict("long") is Verdict.ENABLE
    # What the traced pass saw belongs to no session: it stays an integrity failure.
    traced = lab().trial(CASE, "new", session=99, facts=WRONG).run()
    evidence = Evidence.of([traced], void_codes=("wrong_backend",))
    assert decide(suite, evidence).verdict("long") is Verdict.INVALID


def test_a_crash_of_the_baseline_needs_its_code() -> None:
    suite = make_suite({"long": [STEP]}, looks=[6])
    run = lab(sessions=7).trial(CASE, "old", session=3, status="crashed", message="segmentation fault").run()
    assert decide(suite, Evidence.of([run])).verdict("long") is Verdict.ENABLE
    undeclared = decide(with_rule(suite, void_codes=()), Evidence.of([run]))
    assert undeclared.verdict("long") is Verdict.MISSING
    assert "names no code" in undeclared.regimes[0].reasons[0]


def void_run(voids: int, sessions: int = 12) -> RunRecord:
    run = lab(sessions=sessions).run()
    for session in range(voids):
        run = marked(run, session, foreign_cpu_share=0.9)
    return run


@pytest.mark.parametrize(("voids", "verdict"), [(1, Verdict.ENABLE), (2, Verdict.INCONCLUSIVE)])
def test_more_voids_than_the_rule_allows_enable_nothing(voids: int, verdict: Verdict) -> None:
    suite = with_rule(make_suite({"long": [STEP]}, looks=[6]), void_codes=("host_contention",), max_void_fraction=0.1)
    decision = decide(suite, Evidence.of([void_run(voids)], void_codes=suite.rule.void_codes))
    found = decision.regimes[0]
    assert found.verdict is verdict
    assert len(decision.voids) == voids == len(decision.to_json()["void_sessions"])
    if verdict is Verdict.INCONCLUSIVE:
        assert found.reasons[0].startswith("2 of 12 sessions are void or lost (16.67 %)")
        assert "amend" in found.action
        assert all(clause.status == "pass" for clause in found.clauses)


def test_lost_sessions_count_as_void_and_interrupted_ones_do_not() -> None:
    suite = with_rule(make_suite({"long": [STEP]}, looks=[6]), max_void_fraction=0.1)
    run = lab(sessions=8, partial=(0, 1)).run()
    for reason, lost, verdict in (("old: killed", 2, Verdict.INCONCLUSIVE), ("interrupted", 0, Verdict.ENABLE)):
        marks = tuple(replace(mark, reason="" if mark.complete else reason) for mark in run.sessions)
        evidence = Evidence.of([replace(run, sessions=marks)])
        assert evidence.lost == lost
        assert decide(suite, evidence).verdict("long") is verdict


def test_a_void_turns_no_fail_into_anything_else() -> None:
    suite = with_rule(make_suite({"long": [STEP]}, looks=[6]), max_void_fraction=0.0)
    run = lab(saving=-0.05, sessions=8, partial=(0,)).run()
    marks = tuple(replace(mark, reason="" if mark.complete else "old: killed") for mark in run.sessions)
    decision = decide(suite, Evidence.of([replace(run, sessions=marks)]))
    assert decision.verdict("long") is Verdict.DISABLE
    assert "void or lost" in decision.regimes[0].reasons[-1]


@pytest.mark.parametrize(("total", "verdict"), [(2, Verdict.ENABLE), (3, Verdict.INCONCLUSIVE)])
def test_more_runs_than_the_rule_allows_are_no_confirmation(total: int, verdict: Verdict) -> None:
    suite = with_rule(make_suite({"long": [STEP]}, looks=[6]), max_runs=2)
    decision = decide(suite, Evidence.of([lab().run()], total=total))
    assert decision.verdict("long") is verdict
    if verdict is Verdict.INCONCLUSIVE:
        assert "3 runs of this plan, more than rule.max_runs 2" in decision.regimes[0].reasons[0]


def test_marks_of_before_conditions_were_read_are_read() -> None:
    old = {"session": 1, "complete": True, "levels": ["step"], "reason": ""}
    assert SessionMark.from_json(old) == SessionMark(1, True, ("step",))
