"""A changed field of rule, suite, trace, cost grid or seed is exit 5; a changed arm is a new plan without evidence."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from kbench.cli import app
from kbench.errors import ExitCode, IntegrityError
from kbench.ledger import Kind, Ledger
from kbench.plan import Plan, make_plan
from kbench.run.history import History
from kbench.suite import load_suite
from kbench.suite.rule_schema import Regime, Rule

PLUGIN = """
def make():
    raise NotImplementedError
"""
SUITE = """schema = "kbench.suite/1"
seed = 3
[claim]
name = "claim"
baseline = "a"
candidate = "b"
expected_saving = 0.2
changes_shared_state = true
[model]
preset = "tiny"
layers = 2
dtype = "bfloat16"
[engine]
kv_tokens = 8192
max_batched_tokens = 256
max_seqs = 16
prefix_caching = false
chunked_prefill = false
watermark = 0.1
[variants.a]
attention = { prefill = "sdpa", decode = "sdpa-gather" }
page_size = 16
layout = "NHD"
[variants.a.engine]
max_seqs = 8
[variants.b]
extends = "a"
attention = { prefill = "sdpa", decode = "mine.py:make" }
page_size = 64
[kernel]
ops = ["attention.decode"]
points = ["1*1@127", "2*1@64"]
[step]
points = ["1*1@127", "2*1@64"]
[workload]
traces = { chat = "chat.parquet", long = "long.parquet" }
mode = "exec"
rate = "0.8x"
slo = { ttft = "4x", tpot = "2x" }
segments = 30
warmup = 0.2
max_extrapolated = 0.1
costs = { a = "a.parquet" }
exec_s = 2.0
[measure]
blocks = 4
window_steps = 5
window_ms = 20.0
trial_timeout_s = 60.0
[rule]
alpha = 0.04
looks = [4, 8]
void_codes = ["ecc", "throttle"]
max_void_fraction = 0.2
max_runs = 5
[rule.power]
target = 0.8
at_saving = 0.1
[rule.validity]
gpu = "NVIDIA H200*"
driver = ">=570"
torch = ">=2.9"
kbench = ">=0.1"
[rule.tolerance.bfloat16]
kernel = 3e-3
attention = 1e-2
logits = 6e-3
[rule.diagnostics]
contaminated = "inconclusive"
[rule.policy]
stop = "never"
selector_ttl_days = 30
[[regime]]
id = "chat"
trace_class = ["chat"]
points = ["1*1@127"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "superiority"
  min_saving = 0.02
  across = "weighted"
  [[regime.require]]
  level = "workload"
  metric = "goodput"
  test = "noninferiority"
  margin = 0.03
  mode = "virtual"
[[regime]]
id = "long"
trace_class = ["long"]
points = ["2*1@64"]
  [[regime.require]]
  level = "kernel"
  metric = "latency"
  test = "equivalence"
  margin = 0.05
"""
FILES = ("chat.parquet", "long.parquet", "a.parquet")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "mine.py").write_text(PLUGIN)
    path = tmp_path / "suite.toml"
    path.write_text(SUITE)
    return path


def plan_of(path: Path, **options: Any) -> Plan:
    return make_plan(load_suite(path, **options))


def announce(path: Path, verdict: str | None = None) -> Plan:
    """The ledger of a plan that has evidence, as a run begins it."""
    plan = plan_of(path)
    ledger = Ledger(path.parent / "results" / plan.name / "ledger.jsonl")
    body = {"plan_hash": plan.plan_hash, "lock_hash": plan.lock_hash, "declaration": plan.declaration}
    ledger.append(Kind.PLAN, {**body, "arms": plan.arms})
    ledger.append(Kind.RUN_START, {"run": f"run{len(ledger.read())}", "plan_hash": plan.plan_hash, "levels": ["step"]})
    if verdict:
        ledger.append(Kind.DECIDE, {"plan_hash": plan.plan_hash, "verdicts": {"chat": verdict}, "runs": []})
    return plan


def history(path: Path) -> History:
    return History.read(path.parent / "results", "claim")


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield place
        return
    for key, inner in items:
        yield from leaves(inner, (*place, key))


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}'"


def test_every_leaf_of_the_declaration_is_locked(suite: Path) -> None:
    plan = announce(suite)
    unchanged = history(suite)
    unchanged.require_unchanged(plan)
    places = list(leaves(plan.declaration))
    assert len(places) > 80
    for place in places:
        declaration = copy.deepcopy(plan.declaration)
        inner = declaration
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = changed(inner[place[-1]])
        with pytest.raises(IntegrityError) as caught:
            unchanged.require_unchanged(replace(plan, declaration=declaration))
        assert caught.value.exit_code is ExitCode.INTEGRITY
        assert len(caught.value.problems) == 2, place
        assert str(place[-1]) in caught.value.problems[1].what


def test_the_suite_of_this_test_states_every_key_of_the_rule_away_from_its_default(suite: Path) -> None:
    """So that the declaration that is mutated above holds every field of rule and regimes that there is."""
    free = {("rule", "require_committed"), ("regime", "when")}  # without git; and regimes are trace classes here
    declared = plan_of(suite).declaration["suite"]
    for place in (*fields_of(Rule, ("rule",)), *fields_of(Regime, ("regime",))):
        if place not in free:
            assert present(declared, place), place


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("alpha = 0.04\n", "", "rule.alpha: 0.04 → 0.05"),
        ("looks = [4, 8]", "looks = [4]", "rule.looks: [4, 8] → [4]"),
        ("max_runs = 5\n", "", "rule.max_runs: 5 → (absent)"),
        ('[rule.policy]\nstop = "never"\n', "[rule.policy]\n", 'rule.policy.stop: "never" → "when-decided"'),
        ("kernel = 3e-3\n", "", "rule.tolerance.bfloat16.kernel: 0.003 → (absent)"),
        ('metric = "goodput"', 'metric = "ttft_p99"', 'regime[0].require[1].metric: "goodput" → "ttft_p99"'),
        ("[measure]\nblocks = 4\n", "[measure]\n", "measure.blocks: 4 → 6"),
        ("[variants.a.engine]\nmax_seqs = 8", "[variants.a.engine]", "variants.a.engine.max_seqs: 8 → (absent)"),
    ],
)
def test_a_change_from_or_to_a_default_shows_both_values(suite: Path, old: str, new: str, said: str) -> None:
    announce(suite)
    assert old in SUITE
    suite.write_text(SUITE.replace(old, new))
    with pytest.raises(IntegrityError) as caught:
        history(suite).require_unchanged(plan_of(suite))
    assert [problem.what for problem in caught.value.problems[1:]] == [said]


def fields_of(table: type[BaseModel], place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, info in table.model_fields.items():
        own = (*place, info.alias or name)
        inner = list(tables(info.annotation))
        if not inner:
            yield own
        for one in inner:
            yield from fields_of(one, own) if own[-1] != "when" else iter([own])


def tables(annotation: Any) -> Iterator[type[BaseModel]]:
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        for part in get_args(annotation):
            yield from tables(part)


def present(value: Any, place: tuple[str, ...]) -> bool:
    """Whether any branch of lists and tables by name holds the field."""
    if not place:
        return True
    if isinstance(value, list):
        return any(present(item, place) for item in value)
    if not isinstance(value, dict):
        return False
    if place[0] in value:
        return present(value[place[0]], place[1:])
    return any(present(inner, place) for inner in value.values() if isinstance(inner, dict))


@pytest.mark.parametrize("name", FILES)
def test_another_byte_of_a_trace_or_a_cost_grid_is_refused(name: str, suite: Path) -> None:
    announce(suite)
    (suite.parent / name).write_bytes(b"changed")
    with pytest.raises(IntegrityError, match="declaration changed"):
        history(suite).require_unchanged(plan_of(suite))


def test_moving_a_trace_is_no_change(suite: Path) -> None:
    announce(suite)
    (suite.parent / "long.parquet").rename(suite.parent / "moved.parquet")
    suite.write_text(SUITE.replace('"long.parquet"', '"moved.parquet"'))
    history(suite).require_unchanged(plan_of(suite))


@pytest.mark.parametrize(
    ("command", "edit"),
    [
        ("decide", ("alpha = 0.04", "alpha = 0.05")),
        ("plan", ("min_saving = 0.02", "min_saving = 0.01")),
        ("report", ("max_runs = 5\n", "")),
        ("decide", ('contaminated = "inconclusive"', 'contaminated = "report"')),
        ("decide", ('void_codes = ["ecc", "throttle"]', 'void_codes = ["throttle", "ecc"]')),
        ("decide", ("seed = 3", "seed = 4")),
    ],
)
def test_every_command_refuses_an_edit_and_shows_it(command: str, edit: tuple[str, str], suite: Path) -> None:
    announce(suite)
    assert edit[0] in SUITE
    suite.write_text(SUITE.replace(*edit))
    out = ["--out", str(suite.parent / "results"), "--json"]
    found = CliRunner().invoke(app, [command, str(suite), *out])
    assert found.exit_code == 5
    said = json.loads(found.stdout)["errors"]
    assert "declaration changed after evidence was measured" in said[0] and "→" in said[1]


def test_another_seed_on_the_command_line_is_an_edit(suite: Path) -> None:
    announce(suite)
    with pytest.raises(IntegrityError):
        history(suite).require_unchanged(plan_of(suite, seed=9))


def test_a_changed_arm_is_a_new_plan_that_lists_the_earlier_ones(suite: Path) -> None:
    first = announce(suite, "disable")
    (suite.parent / "mine.py").write_text(PLUGIN + "# another kernel\n")
    second = plan_of(suite)
    assert second.lock_hash == first.lock_hash and second.plan_hash != first.plan_hash
    history(suite).require_unchanged(second)
    found = CliRunner().invoke(app, ["decide", str(suite), "--out", str(suite.parent / "results"), "--json"])
    assert found.exit_code == 4
    document = json.loads(found.stdout)
    assert {regime["verdict"] for regime in document["regimes"]} == {"missing-evidence"}
    [earlier] = document["earlier_plans"]
    assert (earlier["plan_hash"], earlier["verdicts"], earlier["pilot"]) == (
        first.plan_hash,
        {"chat": "disable"},
        False,
    )


def test_after_an_amendment_the_old_plan_is_a_pilot_on_the_list(suite: Path) -> None:
    first = announce(suite, "inconclusive")
    out = ["--out", str(suite.parent / "results"), "--json"]
    suite.write_text(SUITE.replace("alpha = 0.04", "alpha = 0.03"))
    amended = CliRunner().invoke(app, ["ledger", "amend", str(suite), "--reason", "a pilot", *out])
    assert amended.exit_code == 0, amended.stdout
    history(suite).require_unchanged(plan_of(suite))
    found = CliRunner().invoke(app, ["decide", str(suite), *out])
    assert found.exit_code == 4
    [earlier] = json.loads(found.stdout)["earlier_plans"]
    assert (earlier["plan_hash"], earlier["pilot"]) == (first.plan_hash, True)
    assert earlier["verdicts"] == {"chat": "inconclusive"}
    # The pilot's own verdict is no other plan's: a later decision of the new plan does not overwrite it.
    announce(suite, "enable")
    [earlier] = history(suite).earlier_plans(plan_of(suite))
    assert earlier["verdicts"] == {"chat": "inconclusive"}
