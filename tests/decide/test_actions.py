"""Each verdict says the failing clause, the number, the bound, the threshold and what to do next."""

from __future__ import annotations

import math
from typing import Any

import pytest
from decide_lab import GOODPUT, LONG, OUTPUT, POINTS, SHORT, STEP, Lab, make_suite

from kbench.decide import Evidence, RegimeVerdict, Verdict, decide
from kbench.suite.schema import Suite

EXEC = {**GOODPUT, "mode": "exec"}


def judged(made: Lab, *clauses: dict[str, Any], looks: tuple[int, ...] = (6, 8, 12), **how: Any) -> RegimeVerdict:
    suite: Suite = make_suite({"long": list(clauses or (STEP,))}, looks=looks, **how)
    return decide(suite, Evidence.of([made.run()])).regimes[0]


def lab(saving: float, **how: Any) -> Lab:
    made = Lab(**how)
    for point in POINTS:
        made.timing("step", point, saving)
    return made


def test_enable_says_where_to_go() -> None:
    found = judged(lab(0.08))
    assert found.verdict is Verdict.ENABLE and found.decisive is None
    assert "selector.json" in found.action
    [clause] = found.clauses
    assert clause.threshold < clause.bound < clause.observed


def test_disable_names_clause_bound_and_threshold() -> None:
    found = judged(lab(-0.03), STEP, EXEC)
    assert found.verdict is Verdict.DISABLE and found.decisive is found.clauses[0]
    clause = found.clauses[0]
    assert clause.observed < clause.bound < clause.threshold == 0.02
    assert "keep the baseline" in found.action
    assert found.to_json()["decisive"]["bound"] == pytest.approx(clause.bound)


def test_a_wrong_candidate_is_to_be_mended() -> None:
    made = lab(0.08).trial(f"step/step/tiny/{LONG}", "new", session=1, status="incorrect", message="off by 0.3")
    found = judged(made)
    assert found.verdict is Verdict.DISABLE and "mend the candidate" in found.action


def test_inconclusive_says_how_many_sessions_more() -> None:
    found = judged(lab(0.023))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.action.startswith("about ") and "more sessions" in found.action
    clause = found.clauses[0]
    assert clause.bound < clause.threshold


@pytest.mark.parametrize(
    ("made", "clauses", "action"),
    [
        (Lab().timing("step", SHORT, 0.1), [STEP], "no evidence at context 4,096, batch 32 (step): kbench run SUITE"),
        (lab(0.1, sessions=4), [STEP], "2 more sessions: kbench run SUITE"),
        (lab(0.1), [STEP, EXEC], "no evidence at trace class 'long': kbench run SUITE measures it"),
        (lab(0.1).workload("long", "goodput", 0.8, 0.0, segments=12), [STEP, EXEC], "lengthen the replay by 8 seg"),
        (lab(0.1).workload("long", "goodput", 0.8, 0.0, mode="virtual"), [STEP, GOODPUT], "calibrate: "),
    ],
)  # fmt: skip
def test_missing_evidence_says_where(made: Lab, clauses: list[dict[str, Any]], action: str) -> None:
    found = judged(made, *clauses)
    assert found.verdict is Verdict.MISSING
    assert found.action.startswith(action), found.action


def test_invalid_says_to_measure_again() -> None:
    facts = {"selection": {"requested": "new", "resolved": "old"}}
    found = judged(lab(0.1).trial(f"step/step/tiny/{LONG}", "new", facts=facts))
    assert found.verdict is Verdict.INVALID and "measure again" in found.action


@pytest.mark.parametrize("saving", [-0.05, 0.0, 0.021, 0.05])
@pytest.mark.parametrize("change", [-0.2, -0.03, 0.02])
def test_whatever_is_no_enable_has_an_action_a_bound_and_a_threshold(saving: float, change: float) -> None:
    made = lab(saving).workload("long", "goodput", 0.8, change).workload("long", "output_divergence", [0.0] * 50, 0.0)
    found = judged(made, STEP, EXEC, OUTPUT)
    for clause in found.clauses:
        assert math.isfinite(clause.threshold) and math.isfinite(clause.bound) and math.isfinite(clause.observed)
        assert bool(clause.action) == (clause.status != "pass")
        # The bound lies on the side of the observed value that the status says.
        low, high = min(clause.low, clause.high), max(clause.low, clause.high)
        assert low - 1e-9 <= clause.observed <= high + 1e-9
    assert found.action


def test_looks_and_the_error_that_they_spent() -> None:
    suite = make_suite({"a": [STEP], "b": [STEP]}, looks=[6, 8, 12])
    for sessions, used in ((5, 0), (6, 1), (8, 2), (12, 3)):
        decision = decide(suite, Evidence.of([lab(0.05, sessions=sessions).run()]))
        assert decision.looks.used == used
        assert (decision.looks.spent > 0.0) is (used > 0)
    assert decision.looks.spent == pytest.approx(0.025)
    assert decision.to_json()["looks"] == {"at": [6, 8, 12], "used": 3, "alpha_spent_per_regime": pytest.approx(0.025)}
