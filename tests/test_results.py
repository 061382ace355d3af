"""Every committed run still decides, from its committed suite, as it was reported.

A run whose suite or arms have changed since is evidence for what they were; that is skipped, and says so.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbench.cli.app import app
from kbench.plan import make_plan
from kbench.suite import load_suite

ROOT = Path(__file__).parent.parent
LEDGERS = sorted((ROOT / "results").glob("*/*/ledger.jsonl"))
EXIT = {"enable": 0, "disable": 1, "inconclusive": 3, "missing-evidence": 4}


@pytest.mark.parametrize("ledger", LEDGERS, ids=lambda path: f"{path.parent.parent.name}-{path.parent.name}")
def test_a_committed_run_decides_as_it_was_reported(ledger: Path, tmp_path: Path) -> None:
    committed = ledger.parent
    measured = {json.loads(path.read_text())["plan_hash"] for path in committed.glob("*/run.json")}
    plan = make_plan(load_suite(ROOT / "suites" / f"{committed.name}.toml"))
    if plan.plan_hash not in measured:
        pytest.skip("its suite or arms have changed since it was measured")
    shutil.copytree(committed, tmp_path / committed.name)
    done = CliRunner().invoke(
        app, ["decide", str(ROOT / "suites" / f"{committed.name}.toml"), "--out", str(tmp_path), "--json"]
    )
    document = json.loads(done.stdout)
    reported = (committed / "report.md").read_text()
    assert document["regimes"]
    for regime in document["regimes"]:
        assert f"| {regime['regime']} | {regime['verdict']} |" in reported.replace("\\", "")
    assert done.exit_code in {EXIT[regime["verdict"]] for regime in document["regimes"]}
