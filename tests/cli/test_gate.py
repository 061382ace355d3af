"""`calibrate` and `--gate`: the whole way with workers that measure nothing, and every exit code."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Said, kbench
from kbench import env
from kbench.ledger import Kind, Ledger
from kbench.noise import CaseNoise, NoiseCard, Scatter, key_of, make, store
from kbench.plan import make_plan
from kbench.record import read_run
from kbench.suite import load_suite

SUITE = """schema = "kbench.suite/1"
[claim]
name = "claim"
baseline = "a"
candidate = "b"
[model]
preset = "tiny"
[variants.a]
attention = { prefill = "sdpa", decode = "sdpa-gather" }
page_size = 16
[variants.b]
extends = "a"
attention = { prefill = "sdpa", decode = "blocked" }
[kernel]
points = ["1*1@127"]
[step]
points = ["1*1@127", "2*1@64"]
[measure]
blocks = 3
[gate]
sessions = 2
[rule]
looks = [3]
[[regime]]
id = "all"
points = ["1*1@127"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "superiority"
  min_saving = 0.02
"""
CASES = ("step/step/tiny/1*1@127", "step/step/tiny/2*1@64", "kernel/attention.decode/tiny/1*1@127")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.toml"
    path.write_text(SUITE)
    return path


def gate(suite: Path, *more: object, level: str = "step") -> Said:
    return kbench(level, suite, "--gate", "--json", "--device", "cpu", "--out", suite.parent / "results", *more)


def with_card(suite: Path, *, days: int = 14, age_days: int = 0, sd: float = 0.002) -> NoiseCard:
    """A card of this host whose sessions scatter by about `sd`."""
    plan = make_plan(load_suite(suite))
    key = key_of(env.snapshot(), "cpu", plan.baseline, plan.loaded.suite.measure)
    scatter = Scatter.of([sd * (-1) ** n for n in range(16)], [1e-7] * 16)
    noise = {
        case: CaseNoise(metrics={"latency" if case.startswith("kernel") else "step_time": scatter}) for case in CASES
    }
    card = make(key, noise, "claim/earlier", datetime.now(UTC) - timedelta(days=age_days), days)
    store(suite.parent / "results", card)
    return card


def verdicts(said: Said) -> list[str]:
    return [cell["verdict"] for cell in said.document["cells"]]


# ------------------------------------------------------------------------------------------- calibrate


def test_calibrate_writes_a_card_that_gates_go_by(suite: Path) -> None:
    results = suite.parent / "results"
    said = kbench("calibrate", suite, "--json", "--device", "cpu", "--out", results)
    assert said.code == 0, said.err
    document = said.document
    assert [case["case"] for case in document["cases"]] == [CASES[2], *CASES[:2]]
    assert {case["sessions"] for case in document["cases"]} == {16}
    card = NoiseCard.model_validate_json((results / document["file"]).read_bytes())
    assert card.expires - card.created == timedelta(days=14)
    [entry] = Ledger(results / "claim" / "ledger.jsonl").read()
    assert (entry.kind, entry.body["sessions"]) == (Kind.CALIBRATE, 16)
    assert entry.body["card"] == document["file"] and f"claim/{entry.body['run']}" == card.run
    assert entry.body["expires"][:19] == card.expires.isoformat()[:19]
    judged = {case: "latency" if case.startswith("kernel") else "step_time" for case in CASES}
    assert entry.body["sd"] == {case: card.cases[case].metrics[metric].sd for case, metric in judged.items()}
    record = read_run(results / "claim" / "calibrate" / entry.body["run"])
    assert {trial.variant for trial in record.trials} == {"a", "again"}
    assert record.header["exploratory"]

    found = gate(suite, "--quick")
    assert found.code == 0 and found.document["tier"] == "quick" and found.document["sessions"] == 2
    assert found.document["card"]["file"] == document["file"]

    suite.write_text(SUITE.replace("min_saving = 0.02", "min_saving = 0.03"))
    decided = kbench("decide", suite, "--json", "--out", results)
    assert decided.code == 4 and decided.document["runs"]["total"] == 0


def test_calibrate_goes_on_after_an_interruption(suite: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = suite.parent / "results"
    calls: list[int] = []

    def interrupt(self: Any, *_: Any) -> int:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return 0

    with monkeypatch.context() as patch:
        patch.setattr("kbench.run.loop.Loop._blame", interrupt)
        assert kbench("calibrate", suite, "-k", "2*1@64", "--device", "cpu", "--out", results).code == 6
    assert not (results / "noise").exists()
    assert kbench("calibrate", suite, "-k", "2*1@64", "--resume", "--device", "cpu", "--out", results).code == 0
    [run] = (results / "claim" / "calibrate").iterdir()
    assert len(read_run(run).complete_sessions) == 16


@pytest.mark.parametrize(
    ("arguments", "said"), [(("--sessions", 15), "too few"), (("--days", 0), "at least one"), (("-k", "no"), "no case")]
)
def test_calibrate_refuses_what_cannot_be_meant(suite: Path, arguments: tuple[object, ...], said: str) -> None:
    found = kbench("calibrate", suite, "--device", "cpu", "--out", suite.parent / "results", *arguments)
    assert found.code == 2 and said in found.err


def test_a_baseline_that_fails_makes_no_card(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBENCH_FAKE_STATUS", "a=incorrect")
    found = kbench("calibrate", suite, "-k", "2*1@64", "--device", "cpu", "--out", suite.parent / "results")
    assert found.code == 6 and "no noise card" in found.err
    assert not (suite.parent / "results" / "noise").exists()


# ------------------------------------------------------------------------------------------- the gate


@pytest.mark.parametrize(
    ("factor", "code", "verdict"),
    [("b=1.1", 1, "regressed"), ("b=0.9", 0, "improved"), ("b=1.0", 0, "pass"), ("a=1.1", 0, "improved")],
)
def test_a_quick_gate(suite: Path, monkeypatch: pytest.MonkeyPatch, factor: str, code: int, verdict: str) -> None:
    card = with_card(suite)
    monkeypatch.setenv("KBENCH_FAKE_FACTOR", factor)
    said = gate(suite)
    assert said.code == said.document["exit_code"] == code
    assert said.document["verdict"] == verdict and verdicts(said) == [verdict] * 2
    assert said.document["card"]["run"] == card.run and said.document["no_card"] == ""
    for cell in said.document["cells"]:
        assert cell["change"]["low"] <= cell["change"]["point"] <= cell["change"]["high"]


def test_a_kernel_gate(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(suite)
    monkeypatch.setenv("KBENCH_FAKE_FACTOR", "b=1.1")
    said = gate(suite, level="kernel")
    assert said.code == 1 and [cell["metric"] for cell in said.document["cells"]] == ["latency"]


def test_a_noisy_host_is_inconclusive(suite: Path) -> None:
    with_card(suite, sd=0.05)
    said = gate(suite)
    assert said.code == 3 and verdicts(said) == ["inconclusive"] * 2
    assert len(said.document["reasons"]) == 2


def test_quick_without_a_card_measures_nothing(suite: Path) -> None:
    said = gate(suite, "--quick")
    assert said.code == 3
    assert said.document["reasons"] == ["no noise card for this host: run kbench calibrate"]
    assert not (suite.parent / "results" / "claim").exists()


def test_quick_with_an_expired_card(suite: Path) -> None:
    with_card(suite, age_days=15)
    said = gate(suite, "--quick")
    assert said.code == 3 and "expired" in said.document["reasons"][0]


def test_without_a_card_the_first_look_speaks_for_itself(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBENCH_FAKE_FACTOR", "b=1.1")
    said = gate(suite)
    assert (said.code, said.document["tier"], said.document["sessions"]) == (1, "first-look", 3)
    assert said.document["card"] is None and "run kbench calibrate" in said.document["no_card"]


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        ("b=incorrect", 1, "failed"),
        ("b=out-of-memory", 1, "failed"),
        ("b=unsupported", 4, "missing"),
        ("a=failed", 6, "void"),
    ],
)
def test_trials_that_do_not_end_well(
    suite: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int, verdict: str
) -> None:
    with_card(suite)
    monkeypatch.setenv("KBENCH_FAKE_STATUS", status)
    said = gate(suite)
    assert said.code == code and verdicts(said) == [verdict] * 2


@pytest.mark.parametrize(("variant", "code"), [("b", 1), ("a", 6)])
def test_a_worker_that_crashes(
    suite: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variant: str, code: int
) -> None:
    with_card(suite)
    monkeypatch.setenv("KBENCH_FAKE", f"crash@window:2:{variant}|{tmp_path / 'once'}")
    said = gate(suite)
    assert said.code == code
    assert sorted(verdicts(said)) == sorted(["failed" if variant == "b" else "void", "pass"])


def test_a_gate_locks_nothing_and_says_which_gates_came_before(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(suite)
    monkeypatch.setenv("KBENCH_FAKE_FACTOR", "b=1.1")
    assert gate(suite).document["earlier_gates"] == []
    monkeypatch.setenv("KBENCH_FAKE_FACTOR", "b=1.0")
    said = gate(suite)
    assert [item["verdict"] for item in said.document["earlier_gates"]] == ["regressed"]
    results = suite.parent / "results" / "claim"
    assert not (results / "ledger.jsonl").exists()
    assert json.loads((results / "gate" / said.document["run"] / "gate.json").read_text()) == said.document
    suite.write_text(SUITE.replace("min_saving = 0.02", "min_saving = 0.03"))
    assert kbench("decide", suite, "--json", "--out", suite.parent / "results").code == 4


def test_only_the_named_cases_are_judged(suite: Path) -> None:
    with_card(suite)
    said = gate(suite, "-k", "2*1@64")
    assert [cell["case"] for cell in said.document["cells"]] == ["step/step/tiny/2*1@64"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--exploratory",), "exclude"), (("-k", "nothing"), "no case")],
)
def test_options_that_cannot_be_meant(suite: Path, arguments: tuple[str, ...], said: str) -> None:
    found = gate(suite, *arguments)
    assert found.code == 2 and said in found.err


def test_quick_belongs_to_a_gate(suite: Path) -> None:
    found = kbench("step", suite, "--quick", "--out", suite.parent / "results")
    assert found.code == 2 and "--gate" in found.err


def test_a_gate_is_shown_to_people(suite: Path) -> None:
    with_card(suite)
    said = kbench("step", suite, "--gate", "--device", "cpu", "--out", suite.parent / "results")
    assert said.code == 0 and said.out == ""
    assert "Gate" in said.err and "pass" in said.err


@pytest.mark.parametrize("line", ["sessions = 4", "sessions = 0", "margin = 0.0", "margn = 0.02"])
def test_the_gate_table_is_closed(suite: Path, line: str) -> None:
    suite.write_text(SUITE.replace("sessions = 2", line))
    said = gate(suite)
    assert said.code == 2 and "gate." in said.err


# ------------------------------------------------------------------ what a card means for plan and rule


def test_a_plan_sees_what_the_noise_card_says_before_there_are_sessions(suite: Path) -> None:
    def sight() -> dict[str, Any]:
        [found] = kbench("plan", suite, "--json", "--out", suite.parent / "results").document["sees"]
        assert isinstance(found, dict)
        return found

    assert (sight()["sees"], sight()["source"]) == (None, None) and "noise card" in sight()["sentence"]
    with_card(suite, sd=0.004)
    assert sight()["source"] == "noise card" and 0.02 < sight()["sees"] < 0.1
    assert sight()["sentence"].endswith("with 90 % power (by the noise card)")
    with_card(suite, sd=0.004, age_days=20)
    assert sight()["sees"] is None


EQUIVALENCE = SUITE.replace('test = "superiority"\n  min_saving = 0.02', 'test = "equivalence"\n  margin = 0.001')


def calibrated(suite: Path, *, sd: float, expires: str = "2999-01-01T00:00:00.000Z", card: str = "") -> None:
    """The ledger entry of a calibration whose sessions scattered by `sd`."""
    plan = make_plan(load_suite(suite))
    key = key_of(env.snapshot(), "cpu", plan.baseline, plan.loaded.suite.measure)
    body = {"run": "c1", "plan_hash": "a/a", "card": card or f"noise/{key.name}.json", "sha256": "", "sessions": 16}
    ledger = Ledger(suite.parent / "results" / "claim" / "ledger.jsonl")
    ledger.append(Kind.CALIBRATE, {**body, "expires": expires, "sd": {CASES[0]: sd}})


def decided(suite: Path) -> int:
    """The exit code of the rule after the steps that are due have been measured."""
    place = ("--out", suite.parent / "results")
    assert kbench("step", suite, "--device", "cpu", *place).code == 0
    return kbench("decide", suite, *place).code


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"sd": 0.03}, 0),  # two equal variants may seem 7 % apart here
        ({"sd": 0.01}, 1),
        ({"sd": 0.03, "expires": "2026-01-01T00:00:00.000Z"}, 1),
        ({"sd": 0.03, "card": "noise/another.json"}, 1),
        (None, 1),
    ],
    ids=["noisy host", "quiet host", "expired", "another host", "never"],
)
def test_equivalence_is_no_stricter_than_the_calibrated_host(
    suite: Path, how: dict[str, Any] | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KBENCH_FAKE_FACTOR", "b=1.05")
    suite.write_text(EQUIVALENCE)
    if how is not None:
        calibrated(suite, **how)
    assert decided(suite) == code


def test_a_calibration_after_the_first_run_widens_no_margin(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBENCH_FAKE_FACTOR", "b=1.05")
    suite.write_text(EQUIVALENCE)
    assert decided(suite) == 1
    calibrated(suite, sd=0.03)
    assert decided(suite) == 1
    amended = kbench("ledger", "amend", suite, "--reason", "a noisy host", "--out", suite.parent / "results")
    assert (amended.code, decided(suite)) == (0, 0)
