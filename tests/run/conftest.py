from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from driver import Zygote

SUITE = """
schema = "kbench.suite/1"
[claim]
name = "loop"
baseline = "a"
candidate = "b"
[model]
preset = "tiny"
[variants.a]
attention = { prefill = "sdpa", decode = "sdpa-gather" }
page_size = 16
[variants.b]
extends = "a"
attention = { prefill = "sdpa", decode = "blocked" }
[kernel]
points = ["1*1@127"]
[step]
points = ["1*1@127", "2*1@64"]
[measure]
blocks = 3
trial_timeout_s = 2.0
[rule]
looks = [2]
[[regime]]
id = "all"
points = ["1*1@127"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "superiority"
  min_saving = 0.02
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "loop.toml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    started = Zygote(tmp_path_factory.mktemp("zygote") / "stderr.txt")
    yield started
    started.close()
