"""`kbench decide` and `run` to a CI system: what is written where, and the exit code a gate gets."""

from __future__ import annotations

import json
import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from kbench import env
from kbench.cli import app
from kbench.ledger import Kind, Ledger
from kbench.plan import Plan, make_plan
from kbench.record import RunFolder, Sample, SessionMark, Trial
from kbench.run.history import file_hashes
from kbench.selector import BASELINE, CANDIDATE, load
from kbench.suite import load_suite

ROOT = Path(__file__).parents[2]
SUITE = """schema = "kbench.suite/1"
claim = { name = "gate", baseline = "old", candidate = "new" }
model = { preset = "tiny" }
step = { points = ["1*1@64", "1*1@128", "1*1@256"] }
rule = { looks = [6] }
[variants.old]
attention = { prefill = "sdpa", decode = "sdpa-gather" }
page_size = 16
[variants.new]
extends = "old"
attention = { prefill = "sdpa", decode = "blocked" }
"""
REGIME = """
[[regime]]
id = "{name}"
when = {{ context = [{context}, {context}] }}
points = ["1*1@{context}"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "superiority"
  min_saving = 0.02
"""
REGIMES = {"faster": 64, "slower": 128, "noisy": 256}


class Gate:
    """A suite in a folder of its own, and what is said about it."""

    def __init__(self, folder: Path, *regimes: str) -> None:
        self.folder, self.suite, self.results = folder, folder / "suite.toml", folder / "results"
        self.write(*regimes)

    def write(self, *regimes: str) -> None:
        self.suite.write_text(SUITE + "".join(REGIME.format(name=name, context=REGIMES[name]) for name in regimes))

    @property
    def plan(self) -> Plan:
        return make_plan(load_suite(self.suite))

    def measured(self) -> None:
        """Six sessions in the ledger: one regime saves 20 %, one loses 20 %, one shows nothing."""
        plan, ledger = self.plan, Ledger(self.results / "gate" / "ledger.jsonl")
        body = {"plan_hash": plan.plan_hash, "lock_hash": plan.lock_hash, "declaration": plan.declaration, "arms": {}}
        ledger.append(Kind.PLAN, body)
        ledger.append(Kind.RUN_START, {"run": "r1", "plan_hash": plan.plan_hash, "levels": ["step"]})
        folder = RunFolder.create(self.results / "gate" / "r1", header_of(plan)).open()
        for case in plan.at("step"):
            for session in range(6):
                folder.samples(windows(str(case), session))
                for variant in ("old", "new"):
                    folder.trial(Trial(session, str(case), variant, "ok", facts={}))
        for session in range(6):
            folder.session(SessionMark(session, complete=True, levels=("step",)))
        record = folder.close({"ended": datetime.now(UTC).isoformat()})
        ledger.append(Kind.RUN_END, {"run": "r1", "plan_hash": plan.plan_hash, "files": file_hashes(record.path)})

    def say(self, *options: str, command: str = "decide", **environment: str) -> Result:
        said = {"GITHUB_STEP_SUMMARY": "", "GITHUB_WORKSPACE": str(self.folder), **environment}
        return CliRunner().invoke(app, [command, str(self.suite), "--out", str(self.results), *options], env=said)


def header_of(plan: Plan) -> dict[str, Any]:
    return {
        "suite": plan.name, "plan_hash": plan.plan_hash, "lock_hash": plan.lock_hash, "exploratory": False,
        "levels": ["step"], "device": "cpu", "machine": "m", "kbench": "0.1.0", "environment": env.snapshot(),
        "started": "2026-05-01T08:00:00+00:00", "forced": False, "arms": {}, "warnings": [],
    }  # fmt: skip


def windows(case: str, session: int) -> list[Sample]:
    context = int(case.rpartition("@")[2])
    share = {64: 0.8, 128: 1.2, 256: 1.0 + 0.1 * (session - 2.5)}[context]
    return [
        Sample(
            case, "step", variant, "step_time", "us", (1 if variant == "old" else share) * (100 + 0.01 * session),
            session=session, block=block, position=position,
        )
        for block in range(6)
        for position, variant in enumerate(("old", "new", "new", "old"))
    ]  # fmt: skip


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    made = Gate(tmp_path, "faster", "slower", "noisy")
    made.measured()
    return made


def outcomes(file: Path) -> dict[str, str]:
    cases = ElementTree.parse(file).getroot().iter("testcase")
    wanted = ("failure", "error", "skipped")
    return {str(case.get("name")): next((c.tag for c in case if c.tag in wanted), "pass") for case in cases}


def test_every_output_of_one_decision(gate: Gate) -> None:
    summary, junit = gate.folder / "summary.md", gate.folder / "ci" / "junit.xml"
    result = gate.say("--github", "--junit", str(junit), GITHUB_STEP_SUMMARY=str(summary))
    assert result.exit_code == 1, result.output
    lines = gate.suite.read_text().splitlines()
    found = [
        re.match(r"::(\w+) file=suite.toml,line=(\d+),title=kbench gate%2C (\w+)", c)
        for c in result.stdout.splitlines()
    ]
    told = [(match[1], match[3]) for match in found if match]
    assert told == [("error", "slower"), ("warning", "noisy"), ("notice", "faster")]
    for match in found:
        assert match and lines[int(match[2]) - 1] == "[[regime]]"
    assert outcomes(junit) == {"faster": "pass", "slower": "failure", "noisy": "skipped"}
    head = Ledger(gate.results / "gate" / "ledger.jsonl").head
    assert "| slower | disable |" in summary.read_text() and head in summary.read_text()


def test_json_keeps_stdout_to_one_document(gate: Gate) -> None:
    result = gate.say("--github", "--json", "--fail-on", "missing")
    document = json.loads(result.stdout)
    assert document["exit_code"] == result.exit_code == 0
    assert result.stderr.count("::error ") == 1 and document["regimes"][1]["verdict"] == "disable"


@pytest.mark.parametrize(
    ("kinds", "code"),
    [("disable", 1), ("inconclusive", 3), ("missing", 0), ("inconclusive,missing", 3), ("disable,inconclusive", 1)],
)
def test_fail_on_softens_the_exit_code(kinds: str, code: int, gate: Gate) -> None:
    assert gate.say("--fail-on", kinds).exit_code == code


def test_all_is_well_is_said(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "faster")
    gate.measured()
    result = gate.say("--github", "--junit", str(tmp_path / "junit.xml"))
    assert result.exit_code == 0 and result.stdout.startswith("::notice file=suite.toml,line=13,")
    assert outcomes(tmp_path / "junit.xml") == {"faster": "pass"}


def test_missing_evidence_is_an_error_unless_it_may_be_missing(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "faster")
    result = gate.say("--github", "--junit", str(tmp_path / "junit.xml"))
    assert (result.exit_code, result.stdout[:8]) == (4, "::error ")
    assert outcomes(tmp_path / "junit.xml") == {"faster": "error"}
    assert gate.say("--fail-on", "disable").exit_code == 0
    assert not (gate.results / "gate" / "selector.json").exists()


def test_an_edited_rule_is_an_annotation_a_junit_error_and_exit_5(gate: Gate) -> None:
    junit = gate.folder / "junit.xml"
    gate.suite.write_text(gate.suite.read_text().replace("0.02", "0.01"))
    result = gate.say("--github", "--junit", str(junit), "--fail-on", "missing")
    assert result.exit_code == 5
    assert result.stdout.startswith("::error file=suite.toml,title=kbench%3A no verdict::")
    assert outcomes(junit) == {"verdict": "error"}


@pytest.mark.parametrize("command", ["decide", "run"])
def test_a_broken_suite_is_annotated_at_its_line(command: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "faster")
    gate.suite.write_text(gate.suite.read_text() + "  nonsense = 1\n")
    result = gate.say("--github", "--json", "--junit", str(tmp_path / "junit.xml"), command=command)
    assert result.exit_code == 2 and json.loads(result.stdout)["exit_code"] == 2
    lines = len(gate.suite.read_text().splitlines())
    assert f"::error file=suite.toml,line={lines},title=kbench%3A no verdict::" in result.stderr
    assert outcomes(tmp_path / "junit.xml") == {"verdict": "error"}


def test_an_old_junit_file_does_not_speak_for_a_command_that_said_nothing(gate: Gate) -> None:
    junit = gate.folder / "junit.xml"
    junit.write_text("old")
    assert gate.say("--junit", str(junit), "--fail-on", "nothing").exit_code == 2
    assert junit.read_text() == "old"  # a question that could not be asked changes nothing
    assert gate.say("--junit", str(gate.folder)).exit_code == 2
    assert gate.say("--junit", str(gate.suite / "junit.xml")).exit_code == 2


def test_no_junit_file_is_left_where_the_command_was_interrupted(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    junit = gate.folder / "junit.xml"
    junit.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kbench.run.history.History.read", interrupted)
    assert gate.say("--junit", str(junit)).exit_code == 6
    assert not junit.exists()


def test_an_unwritable_summary_costs_only_the_summary(gate: Gate) -> None:
    result = gate.say("--github", GITHUB_STEP_SUMMARY=str(gate.folder))
    assert result.exit_code == 1 and "cannot write the step summary" in result.stderr


@pytest.mark.parametrize("option", ["--github", "--junit=j.xml"])
@pytest.mark.parametrize("kind", ["--exploratory", "--dry-run"])
def test_what_reaches_no_verdict_tells_none(option: str, kind: str, tmp_path: Path) -> None:
    result = Gate(tmp_path, "faster").say(option, kind, command="run")
    assert result.exit_code == 2 and "this command reaches none" in result.stderr


def here(gate: Gate) -> dict[str, object]:
    document = json.loads((gate.results / "gate" / "selector.json").read_text())
    backends = {f"{phase}_backend": name for phase, name in document["assert_backend"].items()}
    return {**document["valid_for"], **backends, "phase": "decode", "batch": 1}


def test_decide_writes_a_selector_that_obeys_the_verdicts(gate: Gate) -> None:
    gate.say()
    file = gate.results / "gate" / "selector.json"
    assert json.loads(file.read_text())["ledger_head"] == Ledger(file.with_name("ledger.jsonl")).head
    choices = load(file).bind(**here(gate))
    used = {name: choices.choose(context=context).use for name, context in REGIMES.items()}
    assert used == {"faster": CANDIDATE, "slower": BASELINE, "noisy": BASELINE}
    assert choices.choose(context=100).reason == "no regime covers this"


def test_a_new_plan_without_evidence_takes_the_selector_back(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.say()
    file = gate.results / "gate" / "selector.json"
    assert '"use": "candidate"' in file.read_text()
    monkeypatch.setattr("kbench.plan.__version__", "9.9.9")  # the arms' code changed
    assert gate.say().exit_code == 4
    assert '"use": "candidate"' not in file.read_text()
    assert json.loads(file.read_text())["plan_hash"] == gate.plan.plan_hash


def test_an_exploratory_decision_writes_no_selector(gate: Gate) -> None:
    from kbench.cli.decide import decide_and_show
    from kbench.cli.outputs import Outputs
    from kbench.record import read_run

    told = Outputs.of(gate.suite, True, None, False, None)
    decide_and_show(gate.plan, gate.results, True, told, exploratory=read_run(gate.results / "gate" / "r1"))
    assert not (gate.results / "gate" / "selector.json").exists()


def action() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    return loaded


def test_no_input_of_the_action_becomes_part_of_a_script() -> None:
    steps = action()["runs"]["steps"]
    assert action()["runs"]["using"] == "composite"
    for step in steps:
        assert "${{" not in step.get("run", "")
        assert ("run" in step) != ("uses" in step) and ("run" not in step or step["shell"] == "bash")
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == action()["inputs"].keys()


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("fail_on", ["", "disable"])
def test_the_action_runs_kbench_with_hostile_inputs(code: int, fail_on: str, tmp_path: Path) -> None:
    (tmp_path / "kbench").write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word"; done > words\nexit {code}\n')
    (tmp_path / "kbench").chmod(0o755)
    step = next(step for step in action()["runs"]["steps"] if step.get("id") == "run")
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "KBENCH_SUITE": "-$(touch pwned); .toml",
        "KBENCH_OUT": "a b",
        "KBENCH_DEVICE": "auto",
        "KBENCH_FAIL_ON": fail_on,
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False)
    words = (tmp_path / "words").read_text().splitlines()
    assert done.returncode == code and (tmp_path / "output").read_text() == f"exit-code={code}\n"
    options = ["--github", "--junit", "a b/junit.xml", "--out", "a b", "--device", "auto", "--resume"]
    wanted = [*options, *(["--fail-on", fail_on] if fail_on else []), "--", "-$(touch pwned); .toml"]
    assert words == ["run", *wanted]
    assert not (tmp_path / "pwned").exists()
    known = {name for option in typer.main.get_command(app).commands["run"].params for name in option.opts}
    assert {word for word in wanted if word.startswith("--")} - {"--"} <= known
