"""The whole path with real workers on a tiny claim: measure, decide, report; and a parent that is killed outright."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from kbench.plan import make_plan
from kbench.run.history import History
from kbench.suite import load_suite

SUITE = """schema = "kbench.suite/1"
[claim]
name = "tiny"
baseline = "page16"
candidate = "page64"
expected_saving = 0.2
[model]
preset = "nano"
layers = 1
[variants.page16]
attention = { prefill = "sdpa", decode = "sdpa-gather" }
page_size = 16
[variants.page64]
extends = "page16"
attention = { prefill = "sdpa", decode = "blocked" }
page_size = 64
[kernel]
points = ["1*1@127"]
[step]
points = ["1*1@127"]
[measure]
blocks = 2
window_ms = 5.0
[rule]
looks = [2]
[rule.policy]
stop = "never"
[[regime]]
id = "measured"
points = ["1*1@127"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "noninferiority"
  margin = 9.0
[[regime]]
id = "not-measured"
points = ["1*1@127", "1*1@64"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "noninferiority"
  margin = 9.0
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SUITE)
    return path


def command(*arguments: str, suite: Path) -> list[str]:
    return [sys.executable, "-m", "kbench", arguments[0], str(suite), "--out", str(suite.parent / "r"), *arguments[1:]]


def kbench(*arguments: str, suite: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, suite=suite), capture_output=True, text=True, timeout=240, check=False, cwd=suite.parent
    )


def test_from_a_suite_to_a_verdict(suite: Path) -> None:
    ran = kbench("run", "--device", "cpu", "--json", suite=suite)
    document = json.loads(ran.stdout)
    verdicts = {regime["regime"]: regime["verdict"] for regime in document["regimes"]}
    assert verdicts["not-measured"] == "missing-evidence"
    assert verdicts["measured"] in ("enable", "inconclusive")
    assert ran.returncode == document["exit_code"] == 4
    assert document["runs"] == {"total": 1, "aborted": 0, "void": 0}
    assert "missing" in (suite.parent / "r" / "tiny" / "report.md").read_text()

    decided = kbench("decide", "--json", suite=suite)
    assert (decided.returncode, json.loads(decided.stdout)["regimes"]) == (4, document["regimes"])

    [record], _, _ = History.read(suite.parent / "r", "tiny").evidence(make_plan(load_suite(suite)))
    for trial in record.trials:
        assert trial.status == "ok", trial
    kernels = [trial.facts for trial in record.trials if trial.case.startswith("kernel/")]
    checked = [facts["correctness"] for facts in kernels if "correctness" in facts]
    assert len(checked) == 4
    assert all(facts["rel_l2"] <= facts["limit"] for facts in checked)
    # Null models are run once, in the first session of each arm.
    thorough = [facts for facts in checked if "null_models" in facts]
    assert len(thorough) == 2
    assert all(facts["null_models_killed"] == facts["null_models"] > 0 for facts in thorough)
    assert {trial.case for trial in record.trials} >= {
        "kernel/attention.decode/nano-1layers/1*1@127",
        "step/step/nano-1layers/1*1@127",
        "timeline/step/nano-1layers/all",
    }
    seen = suite.parent / "seen.json"
    timeline = json.loads(kbench("timeline", "--device", "cpu", "--json", "-o", str(seen), suite=suite).stdout)
    assert timeline["named_share"] >= 0.95
    titles = {event["args"]["name"] for event in json.loads(seen.read_text())["traceEvents"] if event.get("ph") == "M"
              and event["name"] == "thread_name"}  # fmt: skip
    assert titles >= {"steps", "phases", "classes of work", "gaps by cause"}
    assert {"classes", "gaps", "limit", "largest_saving_us"} <= timeline.keys()
    assert {"us", "share"} <= timeline["classes"]["attention"].keys()


@pytest.mark.slow
def test_a_killed_parent_takes_its_workers_along_and_resumes(suite: Path) -> None:
    parent = subprocess.Popen(
        command("step", "--device", "cpu", suite=suite), stderr=subprocess.PIPE, text=True, cwd=suite.parent
    )
    assert parent.stderr is not None
    for line in parent.stderr:
        if "session 2  " in line:  # its first trial is done
            break
    workers = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.communicate(timeout=60)
    assert parent.returncode == -9
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    resumed = kbench("step", "--device", "cpu", "--resume", "--json", suite=suite)
    assert resumed.returncode == 0, resumed.stderr
    [record], aborted, _ = History.read(suite.parent / "r", "tiny").evidence(make_plan(load_suite(suite)))
    assert aborted == 0
    assert len(record.complete_sessions) == 2
    rows = [row for row in record.samples.rows() if row.scope == "window" and row.metric == "step_time"]
    seen = Counter((row.session, row.case, row.variant, row.block, row.position) for row in rows)
    assert set(seen.values()) == {1}
    for session in record.complete_sessions:
        assert sum(number == session for number, *_ in seen) == 2 * 4
