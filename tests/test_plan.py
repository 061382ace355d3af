"""A plan is what the suite says: same declaration, same hash; another byte anywhere that counts, another hash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.folder import write_checkpoint
from kbench.catalog import Case
from kbench.errors import UsageError
from kbench.plan import Plan, block_orders, estimated_seconds, make_plan, model_label
from kbench.suite import load_suite
from kbench.suite.schema import ModelSettings

SUITE = """schema = "kbench.suite/1"
[claim]
name = "planned"
baseline = "a"
candidate = "b"
[model]
preset = "tiny"
layers = 2
[variants.a]
attention = { prefill = "sdpa", decode = "mine.py:attend" }
page_size = 16
[variants.b]
extends = "a"
attention = { prefill = "sdpa", decode = "blocked" }
[kernel]
ops = ["attention.decode", "attention.prefill"]
points = ["1*1@127", "1@127", "2*64@128", "1*1@64+1*8"]
[step]
points = ["1*1@127", "1*1@64+1*8"]
[workload]
traces = { chat = "chat.parquet" }
costs = { a = "grid.parquet" }
[measure]
blocks = 2
window_ms = 10.0
[[regime]]
id = "r"
trace_class = ["chat"]
points = ["1*1@127"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "superiority"
  min_saving = 0.02
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("def attend(q, kv, batch, spec): ...\n")
    (tmp_path / "chat.parquet").write_bytes(b"trace")
    (tmp_path / "grid.parquet").write_bytes(b"grid")
    path = tmp_path / "suite.toml"
    path.write_text(SUITE)
    return path


def plan_of(path: Path, *edits: tuple[str, str]) -> Plan:
    text = SUITE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return make_plan(load_suite(path))


def test_cases_are_the_points_that_each_level_can_measure(path: Path) -> None:
    assert [str(case) for case in plan_of(path).cases] == [
        "kernel/attention.decode/tiny/1*1@127",
        "kernel/attention.prefill/tiny/2*64@128",
        "step/step/tiny/1*1@127",
        "step/step/tiny/1*1@64+1*8",
        "workload/replay/tiny/chat",
    ]


def test_levels_are_filtered(path: Path) -> None:
    plan = plan_of(path)
    assert {case.level for case in plan.at("step", "kernel")} == {"step", "kernel"}
    assert plan.at() == ()


def test_the_hash_is_the_declarations(path: Path) -> None:
    first = plan_of(path)
    assert plan_of(path).plan_hash == first.plan_hash
    # Comments, order and spelling of keys are no declaration.
    same = plan_of(
        path, ("[model]", "# a remark\n[model]"), ("blocks = 2\nwindow_ms = 10.0", "window_ms = 10\nblocks = 2")
    )
    assert (same.lock_hash, same.plan_hash) == (first.lock_hash, first.plan_hash)


def test_the_hash_is_the_same_in_another_process_and_folder(path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in ("mine.py", "chat.parquet", "grid.parquet", "suite.toml"):
        (elsewhere / file).write_bytes((tmp_path / file).read_bytes())
    code = "import sys, pathlib; from kbench.plan import make_plan; from kbench.suite import load_suite\n"
    code += "print(make_plan(load_suite(pathlib.Path(sys.argv[1]))).plan_hash)\nassert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, str(elsewhere / "suite.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == plan_of(path).plan_hash


@pytest.mark.parametrize(
    "edit",
    [
        ("min_saving = 0.02", "min_saving = 0.021"),
        ('"1*1@127", "1@127"', '"1*1@126", "1@127"'),
        ("page_size = 16", "page_size = 32"),
        ("layers = 2", "layers = 1"),
        ("blocks = 2", "blocks = 3"),
        ('schema = "kbench.suite/1"', 'schema = "kbench.suite/1"\nseed = 2'),
    ],
)
def test_any_edit_of_the_suite_changes_the_lock(path: Path, edit: tuple[str, str]) -> None:
    first = plan_of(path)
    second = plan_of(path, edit)
    assert first.lock_hash != second.lock_hash
    assert first.plan_hash != second.plan_hash


@pytest.mark.parametrize("file", ["chat.parquet", "grid.parquet"])
def test_a_byte_of_a_trace_or_grid_changes_the_lock_and_its_place_does_not(path: Path, file: str) -> None:
    first = plan_of(path)
    (path.parent / file).rename(path.parent / "moved")
    moved = plan_of(path, (file, "moved"))
    assert moved.lock_hash == first.lock_hash
    (path.parent / file).write_bytes((path.parent / "moved").read_bytes() + b"!")
    assert plan_of(path).lock_hash != first.lock_hash


def test_the_code_of_an_arm_changes_the_plan_and_not_the_lock(path: Path) -> None:
    first = plan_of(path)
    (path.parent / "mine.py").write_text("def attend(q, kv, batch, spec): ...  # faster\n")
    second = plan_of(path)
    assert second.lock_hash == first.lock_hash
    assert second.plan_hash != first.plan_hash
    assert {name for name in first.arms if first.arms[name] != second.arms[name]} == {"a"}


def test_a_checkpoint_is_part_of_the_arms(path: Path) -> None:
    folder = path.parent / "weights"
    folder.mkdir()
    edit = ('preset = "tiny"\nlayers = 2', 'checkpoint = "weights"')
    with pytest.raises(UsageError, match="checkpoint"):
        plan_of(path, edit)
    file = write_checkpoint(folder) / "model.safetensors"
    first = plan_of(path, edit)
    assert str(first.cases[0]) == "kernel/attention.decode/weights/1*1@127"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    second = plan_of(path, edit)
    assert (first.lock_hash == second.lock_hash, first.plan_hash == second.plan_hash) == (True, False)


def test_a_model_is_called_by_what_it_is() -> None:
    assert model_label(ModelSettings(preset="tiny")) == "tiny"
    assert model_label(ModelSettings(preset="tiny", layers=2)) == "tiny"
    assert model_label(ModelSettings(preset="tiny", layers=1)) == "tiny-1layers"
    assert model_label(ModelSettings(checkpoint="models/mine")) == "mine"


@given(st.text("0123456789abcdef", min_size=1), st.integers(0, 99), st.integers(0, 40))
def test_the_coin_belongs_to_plan_session_case_and_block(plan_hash: str, session: int, blocks: int) -> None:
    case = Case("step", "step", "tiny", "1*1@127")
    orders = block_orders(plan_hash, f"run/{session}", case, blocks)
    assert set(orders) <= {"ABBA", "BAAB"}
    assert orders == block_orders(plan_hash, f"run/{session}", case, blocks + 3)[:blocks]


def test_the_coin_is_fair() -> None:
    case = Case("step", "step", "tiny", "1*1@127")
    heads = sum(block_orders("p", f"run/{session}", case, 10).count("ABBA") for session in range(400))
    assert abs(heads - 2_000) < 5 * 31.7  # five standard deviations of 4,000 tosses
    other = Case("step", "step", "tiny", "2*1@127")
    assert block_orders("p", "run/0", case, 40) != block_orders("p", "run/0", other, 40)
    assert block_orders("p", "run/0", case, 40) != block_orders("p", "run/1", case, 40)
    assert block_orders("p", "run/0", case, 40) != block_orders("q", "run/0", case, 40)


def test_the_estimate_grows_with_what_there_is_to_do(path: Path) -> None:
    plan = plan_of(path)
    # Four cases in two blocks of four windows of 10 ms, in each of six more sessions.
    assert estimated_seconds(plan, 12) - estimated_seconds(plan, 6) > 6 * 4 * 2 * 4 * 0.01
    longer = plan_of(path, ("window_ms = 10.0", "window_ms = 20.0"))
    assert estimated_seconds(longer, 6) - estimated_seconds(plan, 6) == pytest.approx(6 * 4 * 2 * 4 * 0.01)
