"""The table of the engine's step: its floor against figures worked out apart from it, and a whole run on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kbench.catalog import model_shape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FLOORS_MS = {"1*1@127": 3.55, "1*1@4096": 3.68, "32*1@127": 3.74, "32*1@4096": 7.68}
"""At 4,230 GB/s, as published beside vLLM's figures, whose steps have some 70 tokens more context on average."""


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("point", FLOORS_MS)
def test_the_floor_is_weights_and_cache_once(point: str) -> None:
    import engine_step

    moved = engine_step.floor_bytes(model_shape("llama-3-8b"), point, 2)
    assert moved / 4_230e9 * 1e3 == pytest.approx(FLOORS_MS[point], rel=0.02)
    assert set(engine_step.VLLM_MS) == set(FLOORS_MS)


def test_a_run_writes_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import engine_step

    out, md = tmp_path / "step.json", tmp_path / "step.md"
    words = ["--device", "cpu", "--preset", "tiny", "--points", "1*1@33", "3*1@20", "--rounds", "1", "--no-profile"]
    monkeypatch.setattr(sys, "argv", ["engine_step.py", *words, "--out", str(out), "--md", str(md)])
    engine_step.main()
    document = json.loads(out.read_text())
    first, second = document["columns"]
    assert (first["point"], first["mode"], first["padded_tokens"], first["vllm_ms"]) == ("1*1@33", "padded", 0, None)
    assert (second["padded_tokens"], second["same_tokens"]) == (1, True)
    assert all(item[name] > 0 for item in (first, second) for name in ("graph_ms", "eager_ms", "overlapped_ms"))
    assert md.read_text() in capsys.readouterr().out
    assert "| 3\\*1@20 |" in md.read_text()
