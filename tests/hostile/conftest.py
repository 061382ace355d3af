from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SUITE = """
schema = "kbench.suite/1"
[claim]
name = "hostile"
baseline = "a"
candidate = "b"
[model]
preset = "nano"
layers = 1
[variants.a]
attention = { prefill = "sdpa", decode = "sdpa-gather" }
page_size = 16
[variants.b]
extends = "a"
attention = { prefill = "sdpa", decode = "blocked" }
[kernel]
points = ["1*1@127"]
[step]
points = ["1*1@127"]
[measure]
blocks = 2
window_ms = 1.0
trial_timeout_s = 8.0
[rule]
looks = [2]
[[regime]]
id = "all"
points = ["1*1@127"]
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "noninferiority"
  margin = 5.0
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write the suite with one text replaced, and return its path."""

    def written(old: str = "", new: str = "") -> Path:
        assert old in SUITE
        path = tmp_path / "hostile.toml"
        path.write_text(SUITE.replace(old, new, 1) if old else SUITE + new)
        return path

    return written
