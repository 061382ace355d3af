from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest

from kbench.errors import Problem, SuiteError
from kbench.suite import LoadedSuite, load_suite

# Line numbers in the tests count from the first line of this text.
SUITE = """schema = "kbench.suite/1"
seed = 1
[claim]
name = "claim"
baseline = "a"
candidate = "b"
[model]
preset = "tiny"
[engine]
kv_tokens = 4096
max_seqs = 16
[variants.a]
attention = { prefill = "sdpa", decode = "sdpa-gather" }
page_size = 16
[variants.b]
extends = "a"
page_size = 64
[variants.b.engine]
max_seqs = 8
[kernel]
points = ["1*1@127"]
[step]
points = ["1*1@127"]
[workload]
traces = { chat = "chat.parquet" }
[rule]
looks = [6, 8]
[[regime]]
id = "first"
trace_class = ["chat"]
points = ["1*1@127"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "superiority"
  min_saving = 0.02
  [[regime.require]]
  level = "workload"
  metric = "goodput"
  test = "noninferiority"
  margin = 0.03
"""


class Edit(Protocol):
    def __call__(self, *edits: tuple[str, str]) -> LoadedSuite: ...


@pytest.fixture
def load(tmp_path: Path) -> Edit:
    """Load the suite with some of its text replaced."""

    def edited(*edits: tuple[str, str]) -> LoadedSuite:
        text = SUITE
        for old, new in edits:
            assert old in text
            text = text.replace(old, new, 1)
        (tmp_path / "chat.parquet").touch()
        path = tmp_path / "suite.toml"
        path.write_text(text, encoding="utf-8")
        return load_suite(path)

    return edited


def problems(load: Edit, *edits: tuple[str, str]) -> list[Problem]:
    with pytest.raises(SuiteError) as caught:
        load(*edits)
    assert caught.value.exit_code == 2
    for problem in caught.value.problems:
        assert problem.file.endswith("suite.toml") and problem.what and problem.remedy
        assert "\n" not in str(problem)
    return list(caught.value.problems)
