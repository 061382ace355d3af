"""The simulation of error rates: its noise is what it says, its gates end as they must, and it is reproducible."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def error_rates() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import error_rates
    finally:
        sys.path.remove(str(BENCHMARKS))
    yield error_rates


def enabled(module: ModuleType, gates: int = 10, scale: float = 1.0, **truth: object) -> int:
    scenario = module.Scenario("test", **{"profile": "quiet", **truth})
    return module.simulate(scenario, scale, 1, 0, gates)[0]


def test_gates_end_as_their_truth_says(error_rates: ModuleType) -> None:
    assert enabled(error_rates, saving=0.0) == 0
    assert enabled(error_rates, saving=0.06) == 10
    assert enabled(error_rates, step=False, goodput="margin", regimes=1, scale=1.15) == 0
    assert enabled(error_rates, step=False, goodput="margin", regimes=1, scale=0.95) == 10


def test_a_rerun_is_pooled(error_rates: ModuleType) -> None:
    truth = {"saving": 0.06, "regimes": 1, "sessions": 3, "looks": (6,), "goodput": "none"}
    assert enabled(error_rates, **truth) == 0
    assert enabled(error_rates, **truth, reruns=2) == 10


def test_the_noise_is_as_declared(error_rates: ModuleType) -> None:
    quiet = replace(error_rates.PROFILES["quiet"], wander_sd=0.0, outliers=0.0)
    times, candidate = error_rates.step_log_times(np.random.default_rng(1), quiet, 4_000, 6, 0.1, 0.003)
    ratios = np.where(candidate, times, -times).mean(axis=(1, 2)) * 2.0
    assert ratios.mean() == pytest.approx(np.log(0.9), abs=3e-4)
    assert ratios.std() == pytest.approx(np.hypot(0.003 * 2**0.5, 0.005 / 12**0.5 * 2**0.5), rel=0.05)


def test_the_queue_is_lindleys(error_rates: ModuleType) -> None:
    from gate_noise import _waits

    rng = np.random.default_rng(2)
    gaps, service = rng.exponential(1.0, (1, 300)), rng.exponential(0.8, (1, 300))
    waited, expected = 0.0, []
    for place in range(300):
        waited = max(0.0, waited + service[0, place - 1] - gaps[0, place]) if place else 0.0
        expected.append(waited)
    assert _waits(gaps, service)[0] == pytest.approx(expected)


def test_the_margin_is_where_goodput_truly_is(error_rates: ModuleType) -> None:
    profile = error_rates.PROFILES["shared"]
    scale = error_rates.scale_for(profile, -0.05, 20)
    new, old = error_rates.goodput(np.random.default_rng(99), profile, 600, 20, scale)
    assert new.mean() / old.mean() == pytest.approx(0.95, abs=0.003)


def test_the_document_and_the_exit_code(error_rates: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--gates", "12", "--only", "rerun", "--seed", "3"]
    codes, documents = [], []
    for _ in range(2):
        codes.append(error_rates.main(arguments))
        documents.append(json.loads(capsys.readouterr().out))
    assert codes[0] == (0 if documents[0]["holds"] else 1)
    figures = [document["rerun_enabled"] for document in documents]
    assert figures[0]["n"] == 12
    assert figures[0]["k"] == figures[1]["k"]


@pytest.mark.parametrize(
    ("name", "k", "n", "holds"),
    [
        ("boundary", 61, 1_000, True),
        ("boundary", 62, 1_000, False),
        ("aa", 1, 1_000, True),
        ("aa", 2, 1_000, False),
        ("aa", 1, 100, False),
        ("power", 949, 1_000, False),
        ("power", 91, 100, True),
        ("ni", 60, 1_000, True),
    ],
)
def test_limits(error_rates: ModuleType, name: str, k: int, n: int, holds: bool) -> None:
    assert error_rates.limited(name, k, n)["holds"] is holds


def test_the_committed_figures_hold() -> None:
    document = json.loads((BENCHMARKS.parent / "results/cpu/error_rates.json").read_text())
    assert document["holds"]
    assert document["settings"]["gates"] >= 1_000
    for figure in ("aa_enabled", "boundary_enabled", "power", "ni_false_accept", "rerun_enabled"):
        assert document[figure]["holds"]
