"""Sampling's share of a step: the benchmark runs, and its committed table is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_benchmark_tells_the_phases_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sampling_share

    words = "sampling_share --preset tiny --batches 2 --contexts 40 --rounds 1 --threads 1 --json"
    monkeypatch.setattr("sys.argv", words.split())
    sampling_share.main()
    document = json.loads(capsys.readouterr().out)
    assert [row["sampling"] for row in document["rows"]] == list(sampling_share.WAYS)
    for row in document["rows"]:
        assert 0 < row["sample_us"] < row["phased_step_us"]
        assert row["sample_share"] == pytest.approx(row["sample_us"] / row["phased_step_us"])
        assert row["logits_copy_us"] > 0
    assert "| 2 × 40 | topkp | eager |" in sampling_share.table(document)


def test_the_committed_table_is_whole() -> None:
    document = json.loads((BENCHMARKS.parent / "results/cpu/sampling_share.json").read_text())
    places = {(row["batch"], row["context"], row["sampling"]) for row in document["rows"]}
    assert len(places) == len(document["rows"]) == 27
    assert all(0 < row["sample_share"] < 1 and row["step_us"] > 0 for row in document["rows"])
    assert 0 < document["cpus_used"] <= document["threads"] + 0.05
