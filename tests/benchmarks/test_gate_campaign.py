"""The campaign's resume logic and the arithmetic of its summary; nothing is measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def campaign() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import gate_campaign
    finally:
        sys.path.remove(str(BENCHMARKS))
    yield gate_campaign


def record(index: int, kind: str, verdict: str) -> dict[str, Any]:
    change = {"point": 0.01 * index, "low": -0.1, "high": 0.1, "sessions": 3}
    return {"kind": "gate", "time": "t", "index": index, "gate": kind, "verdict": verdict, "change": change,
            "seconds": float(index), "card": "c"}  # fmt: skip


def whole(campaign: ModuleType, *, aa: int = 10, late: bool = True, saving: int = 36, slowdown: int = 36) -> list[Any]:
    """A complete campaign: so many false alarms (late: none in the first 40), so many plants found."""
    records: list[Any] = [{"kind": "start", "time": "t", "rules": {"gates": campaign.GATES}}]
    seen = dict.fromkeys(campaign.GATES, 0)
    hits = {"aa": aa, "saving": saving, "slowdown": slowdown}
    words = {"aa": "regressed", "saving": "improved", "slowdown": "regressed"}
    for index, kind in enumerate(campaign.schedule(campaign.GATES)):
        place = seen[kind]
        seen[kind] += 1
        hit = place >= campaign.GATES[kind] - hits[kind] if late else place < hits[kind]
        records.append(record(index, kind, words[kind] if hit else "pass"))
        if kind == "aa":
            p = 0.01 if place % 2 else 0.5
            records.append({"kind": "sequential", "time": "t", "index": index, "mann_whitney_p": p, "welch_p": 0.9,
                            "benchstat_p": 0.049, "seconds": 5.0})  # fmt: skip
    return records


def test_the_schedule_is_a_fixed_random_order(campaign: ModuleType) -> None:
    order = campaign.schedule(campaign.GATES)
    assert order == campaign.schedule(campaign.GATES) != sorted(order)
    assert {kind: order.count(kind) for kind in campaign.GATES} == campaign.GATES
    assert campaign.schedule(campaign.GATES, seed=2) != order


def test_resume_goes_on_where_gates_are_missing(campaign: ModuleType) -> None:
    order = ["aa", "saving", "aa", "slowdown"]
    done = [record(0, "aa", "pass"), {"kind": "error", "index": 1}, record(2, "aa", "pass")]
    assert list(campaign.remaining(order, done)) == [(1, "saving"), (3, "slowdown")]


def test_the_state_survives_a_kill_in_the_middle_of_a_line(campaign: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "gates.jsonl"
    state = campaign.State(path)
    state.append("gate", index=0)
    state.append("gate", index=1)
    path.write_bytes(path.read_bytes() + b'{"kind":"gate","ind')
    again = campaign.State(path)
    assert [item["index"] for item in again.of("gate")] == [0, 1]
    again.append("gate", index=2)
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_campaign_that_began_under_other_rules_is_refused(campaign: ModuleType, tmp_path: Path) -> None:
    state = campaign.State(tmp_path / "gates.jsonl")
    bench = campaign.Bench(tmp_path, None)
    campaign.begin(state, bench, campaign.GATES)
    campaign.begin(campaign.State(tmp_path / "gates.jsonl"), bench, campaign.GATES)
    assert len(state.of("start")) == 1
    with pytest.raises(SystemExit, match="gates changed"):
        campaign.begin(state, bench, {"aa": 1, "saving": 1, "slowdown": 1})
    with pytest.raises(SystemExit, match="priority changed"):
        campaign.begin(state, campaign.Bench(tmp_path, -5), campaign.GATES)


def test_the_summary_counts(campaign: ModuleType) -> None:
    found = campaign.summary(whole(campaign, aa=16, saving=40, slowdown=36))
    assert found["complete"] and found["missed"] == []
    assert {key: found["aa"][key] for key in ("k", "n")} == {"k": 16, "n": 200}
    assert found["aa_false_alarms"] == {"k": 0, "n": 40}
    assert found["sequential"]["mann_whitney"] == {"k": 100, "n": 200}
    assert found["sequential"]["welch"] == {"k": 0, "n": 200}
    assert found["sequential"]["benchstat"] == {"k": 200, "n": 200}
    assert (found["planted_saving"]["found"], found["planted_slowdown"]["found"]) == (40, 36)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"aa": 17}, "17 of 200"),
        ({"aa": 5, "late": False}, "5 false alarms in the first 40"),
        ({"saving": 35}, "planted saving: 35 of 40"),
        ({"slowdown": 35}, "planted slowdown: 35 of 40"),
    ],
)
def test_a_missed_figure_is_named(campaign: ModuleType, changes: dict[str, Any], said: str) -> None:
    [missed] = campaign.summary(whole(campaign, **changes))["missed"]
    assert said in missed


def test_a_part_of_a_campaign_reaches_no_figure(campaign: ModuleType) -> None:
    for records in ([], whole(campaign)[:50]):
        found = campaign.summary(records)
        assert not found["complete"] and len(found["missed"]) == 4


def test_the_wrong_direction_is_not_found(campaign: ModuleType) -> None:
    records = whole(campaign)
    for item in records:
        if item.get("gate") == "saving":
            item["verdict"] = "regressed"
    assert campaign.summary(records)["planted_saving"]["found"] == 0


def test_a_new_card_at_every_fixed_number_of_gates(campaign: ModuleType, tmp_path: Path) -> None:
    state = campaign.State(tmp_path / "gates.jsonl")
    for number in range(2):
        state.append("card", number=number)
    campaign.refresh(state, None, None, 2 * campaign.REFRESH - 1)
    with pytest.raises(AttributeError):  # it would calibrate, and there is nothing to do it with
        campaign.refresh(state, None, None, 2 * campaign.REFRESH)


def test_sequential_tests_are_those_of_scipy(campaign: ModuleType) -> None:
    from scipy.stats import mannwhitneyu, ttest_ind

    a, b = [1.0 + 0.01 * (n % 7) for n in range(100)], [1.01 + 0.01 * (n % 5) for n in range(100)]
    found = campaign.judge_sequential(a, b)
    assert found["mann_whitney_p"] == pytest.approx(mannwhitneyu(a, b).pvalue)
    assert found["welch_p"] == pytest.approx(ttest_ind(a, b, equal_var=False).pvalue)
    shifted = campaign.judge_sequential(a, [2.0 + value for value in a])
    assert max(shifted["benchstat_p"], shifted["welch_p"], shifted["mann_whitney_p"]) < 1e-3


def test_what_is_planted_stands_in_one_arm(campaign: ModuleType, tmp_path: Path) -> None:
    bench = campaign.Bench(tmp_path, None)
    plans = {where: bench.plan(where, 1234) for where in ("a", "b")}
    assert (plans["a"].baseline.decode, plans["a"].candidate.decode) == ("plant.py:Slower", "sdpa-gather")
    assert (plans["b"].baseline.decode, plans["b"].candidate.decode) == ("sdpa-gather", "plant.py:Slower")
    same = bench.plan()
    assert same.baseline.decode == same.candidate.decode == "sdpa-gather"
    assert same.arms["a"] == same.arms["b"]
