"""Every committed run still decides, from its committed suite, as it was reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbench.cli.app import app

ROOT = Path(__file__).parent.parent
LEDGERS = sorted((ROOT / "results").glob("*/*/ledger.jsonl"))
EXIT = {"enable": 0, "disable": 1, "inconclusive": 3, "missing-evidence": 4}


@pytest.mark.parametrize("ledger", LEDGERS, ids=lambda path: f"{path.parent.parent.name}-{path.parent.name}")
def test_a_committed_run_decides_as_it_was_reported(ledger: Path, tmp_path: Path) -> None:
    committed = ledger.parent
    shutil.copytree(committed, tmp_path / committed.name)
    suite = ROOT / "suites" / f"{committed.name}.toml"
    done = CliRunner().invoke(app, ["decide", str(suite), "--out", str(tmp_path), "--json"])
    document = json.loads(done.stdout)
    reported = (committed / "report.md").read_text()
    assert document["regimes"]
    for regime in document["regimes"]:
        assert f"| {regime['regime']} | {regime['verdict']} |" in reported.replace("\\", "")
    assert done.exit_code in {EXIT[regime["verdict"]] for regime in document["regimes"]}
