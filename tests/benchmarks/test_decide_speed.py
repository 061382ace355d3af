"""Deciding stays fast: limits of the benchmark with room for a slow, busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROOM = 10.0
"""A quadratic step in either case costs far more than this factor."""


@pytest.mark.parametrize("name", ["million_samples", "hundred_regimes"])
def test_deciding_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decide_speed

    suite, runs = decide_speed.prepared(name)
    rows = sum(len(run.samples) for run in runs)
    assert rows > (1_000_000 if name == "million_samples" else 40_000)
    assert len(suite.regime) == (1 if name == "million_samples" else 100)
    assert decide_speed.timed(suite, runs, 1)[0] < ROOM * decide_speed.LIMITS_S[name]


def test_the_committed_figures_hold() -> None:
    import json

    document = json.loads((BENCHMARKS.parent / "results/cpu/decide_speed.json").read_text())
    assert all(document[name]["holds"] for name in ("million_samples", "hundred_regimes"))
