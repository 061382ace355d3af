from __future__ import annotations

import functools
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kbench.cli import app
from kbench.run.session import Host

FAKE = (sys.executable, str(Path(__file__).parents[1] / "run" / "fake_worker.py"))
SUITE = """schema = "kbench.suite/1"
[claim]
name = "claim"
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
points = ["1*1@127"]
[workload]
traces = { chat = "chat.parquet" }
[measure]
blocks = 2
[rule]
looks = [2]
[[regime]]
id = "low"
trace_class = ["chat"]
points = ["1*1@127"]
  [[regime.require]]
  level = "kernel"
  metric = "latency"
  test = "noninferiority"
  margin = 9.0
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "noninferiority"
  margin = 9.0
  [[regime.require]]
  level = "workload"
  metric = "goodput"
  test = "noninferiority"
  margin = 0.03
"""


@dataclass(frozen=True, slots=True)
class Said:
    """How a command ended, and what it said where."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout: anything before or after it is an error."""
        document = json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert isinstance(document, dict)
        return document


def kbench(*arguments: object) -> Said:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Said(done.exit_code, done.stdout, done.stderr)


@pytest.fixture(autouse=True)
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbench.run.session.Host", functools.partial(Host, command=FAKE))


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a suite and all evidence of its levels 1 and 2."""
    folder = tmp_path_factory.mktemp("cli")
    shutil.copy(Path(__file__).parents[2] / "traces" / "chat.parquet", folder / "chat.parquet")
    (folder / "suite.toml").write_text(SUITE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kbench.run.session.Host", functools.partial(Host, command=FAKE))
        for level in ("kernel", "step"):
            said = kbench(level, folder / "suite.toml", "--out", folder / "results", "--device", "cpu")
            assert said.code == 0, said.err
    return folder


@pytest.fixture
def folder(measured: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(measured, tmp_path / "copy"))


@pytest.fixture
def fresh(measured: Path, tmp_path: Path) -> Path:
    """The suite and its trace without any evidence."""
    for name in ("suite.toml", "chat.parquet"):
        shutil.copy(measured / name, tmp_path / name)
    return tmp_path
