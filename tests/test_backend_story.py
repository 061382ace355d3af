"""The standard failure story, with real workers: a preferred backend disappears.

With `reject` the run stops at once, with reasons; with a declared fallback it runs and says so; what nobody declared is
exit 5.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MINE = """
import torch, fastlib
from kbench.kernels.declare import implementation
from kbench.kernels.registry import load

@implementation("attention.decode", expects_kernel="aten::{promised}")
class Fast:
    name = "fast"
    def __init__(self):
        self.inner = load("sdpa-gather", "attention.decode")
    def convert(self, kv): return self.inner.convert(kv)
    def plan(self, batch, spec, kv): return self.inner.plan(batch, spec, kv)
    def run(self, q, kv, plan, out): return self.inner.run(q, kv, plan, out)
"""
SUITE = """schema = "kbench.suite/1"
[claim]
name = "story"
baseline = "old"
candidate = "new"
[model]
preset = "nano"
layers = 1
[variants.old]
attention = { prefill = "sdpa", decode = "sdpa-gather" }
page_size = 16
[variants.new]
extends = "old"
attention = { prefill = "sdpa", decode = "mine.py:Fast" }
POLICY
[LEVEL]
points = ["2*1@40"]
[measure]
blocks = 2
window_ms = 1.0
[rule]
looks = [2]
"""
FALLBACK = 'policy = "fallback"\n[[variants.new.fallback]]\nop = "attention.decode"\nuse = "blocked"'


@dataclass(frozen=True, slots=True)
class Said:
    code: int
    document: dict[str, Any]
    err: str

    @property
    def selected(self) -> list[str]:
        return [line for line in self.err.splitlines() if "kbench.select" in line]


@pytest.fixture
def story(tmp_path: Path) -> Any:
    """A claim on a kernel that needs a library which is there; `run` measures one level of it."""

    def run(
        policy: str = "", *, level: str = "step", promised: str = "_scaled_dot_product", gone: bool = False
    ) -> Said:
        (tmp_path / "mine.py").write_text(MINE.replace("{promised}", promised))
        (tmp_path / "suite.toml").write_text(SUITE.replace("POLICY", policy).replace("LEVEL", level))
        library = tmp_path / "lib"
        library.mkdir(exist_ok=True)
        (library / "fastlib.py").write_text("fast = True\n")
        if gone:
            (library / "fastlib.py").unlink()
        command = [sys.executable, "-m", "kbench", level, "suite.toml", "--exploratory", "--json", "--device", "cpu"]
        path = os.pathsep.join((str(library), os.environ.get("PYTHONPATH", "")))
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in done.stderr
        return Said(done.returncode, json.loads(done.stdout or "{}"), done.stderr)

    return run


def record_of(said: Said, variant: str = "new") -> dict[str, Any]:
    [case] = [case for case in said.document["cases"] if case["variant"] == variant]
    selection = case["selection"]
    return dict(selection.get("decode", selection))


def test_with_reject_the_run_stops_at_once_with_reasons(story: Any) -> None:
    said = story(gone=True)
    assert said.code == 2
    [line] = [line for line in said.err.splitlines() if line.startswith("kbench: variant")]
    assert "variant new" in line and "No module named 'fastlib'" in line and "mine.py" in line
    assert "session 1" not in said.err, "nothing was measured"


def test_a_declared_fallback_runs_and_says_so(story: Any) -> None:
    said = story(FALLBACK, level="step", gone=True)
    assert said.code == 0, said.err
    found = record_of(said)
    assert (found["requested"], found["resolved"], found["observed"]) == ("mine.py:Fast", "blocked", "blocked")
    [candidate, taken] = found["candidates"]
    assert candidate["name"] == "mine.py:Fast" and "fastlib" in candidate["reasons"][0]["have"]
    assert taken == {"name": "blocked", "reasons": []}
    [line] = [line for line in said.selected if "requested=mine.py:Fast" in line]
    assert len([line for line in said.selected if "op=attention.decode" in line]) == 2, "one line an arm"
    assert "resolved=blocked" in line and "policy=fallback" in line and "fastlib" in line


def test_a_fallback_that_nobody_declared_is_an_integrity_failure(story: Any) -> None:
    said = story(level="kernel", promised="my_fast_kernel")
    assert said.code == 5
    assert "resolved to mine.py:Fast, but" in said.err and "ran" in said.err
    assert record_of(said, "old")["observed"] == "sdpa-gather", "the other arm was seen, too"
