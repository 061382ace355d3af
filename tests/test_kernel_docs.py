"""docs/kernel.md is true: its files are written, its commands run in order, what it says of their end is so."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kbench.cli import app
from kbench.report.explain import GLOSSARY, STATES
from kbench.suite.schema import Measure

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "kernel.md").read_text()
FILES = dict(re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]
SHORT = {"blocks": 2, "window_ms": 1.0}
"""Windows of a test: the commands are the page's, only their clock is shorter."""


def run(line: str) -> Result:
    if line.startswith("git "):
        subprocess.run(line, shell=True, check=True, capture_output=True)
        return Result(CliRunner(), b"", b"", b"", None, 0, None)
    _, *words = shlex.split(line)
    return CliRunner().invoke(app, words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (made / name).write_text(text)
    (made / "RUN").mkdir()
    [steps] = ROOT.glob("results/cpu/practice/*/steps.parquet")
    for name in ("steps.parquet", "costs.parquet"):
        shutil.copy(steps.with_name(name), made / "RUN" / name)
    shutil.copy(ROOT / "traces" / "chat.parquet", made / "trace.parquet")
    return made


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Result]:
    """Every command of the page, in its order, in one folder."""
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr("kbench.suite.adhoc.MEASURE", SHORT)
        patch.setattr("kbench.suite.adhoc.SESSIONS", 1)
        patch.setattr("kbench.cli.drift.MOST_BUCKETS", 2)
        return {line: run(line) for line in COMMANDS}


def only(said: dict[str, Result], text: str) -> Result:
    [found] = [result for line, result in said.items() if text in line]
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_ends_as_the_page_says(said: dict[str, Result], line: str) -> None:
    from kbench.env import gpus

    result = said[line]
    wanted = 2 if "--device cuda" in line and not gpus() else 0
    assert result.exit_code == wanted, result.output[-2_000:]
    if wanted == 2:
        assert "no CUDA device on this machine" in result.stderr


def test_the_wrong_function_is_caught_as_the_page_says(said: dict[str, Result]) -> None:
    text = " ".join(only(said, "wrong.py").stderr.split())
    assert "incorrect" in text and "random: output: relative L2 error 5.70e-06" in text and "32 of 32 rows fail" in text


def test_the_commands_say_what_the_page_promises(said: dict[str, Result]) -> None:
    document = only(said, "-k 64").stdout
    assert all(f'"{key}"' in document for key in ("cases", "comparisons", "summary"))
    assert "64*1@127" in document and "32*1@127" not in document
    assert "speed-up by" in " ".join(only(said, "--shapes").stderr.split())
    assert "paged" not in only(said, "explain").stdout and "x / rms(x)" in only(said, "explain").stdout
    assert only(said, "repro norm.toml").stdout.startswith("kbench kernel norm.toml")
    assert "1 of 1 kinds caught" in only(said, "selftest").output
    assert "0 honest implementations accused" in only(said, "selftest").output


def test_every_file_is_short_enough_for_a_newcomer() -> None:
    for name in ("mine.py", "fast.py", "packed.py"):
        code = [line for line in FILES[name].splitlines() if line.strip() and not line.startswith(("import", "from"))]
        assert len(code) <= 15, name


def test_the_triton_kernel_is_right_in_the_interpreter(folder: Path) -> None:
    pytest.importorskip("triton")
    check = """
import sys, torch
from pathlib import Path
from kbench.catalog import parse_shape, resolve_shape
from kbench.kernels.registry import load
from kbench.kernels.verify import verify
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
torch.set_num_threads(1)
shape = resolve_shape("norm.rmsnorm", parse_shape("rows=5,hidden=96"), None)
where = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), 3)
found = verify(load("fast.py:rms", "norm.rmsnorm", Path()), load_op("norm.rmsnorm"), shape, where)
sys.exit(f"{found.status} {found.message}" if found.message else 0)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_the_entry_point_of_the_page_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    implementations = importlib.import_module("kbench.catalog.implementations")
    [block] = [text for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "entry-points" in text]
    [(group, named)] = tomllib.loads(block)["project"]["entry-points"].items()
    [(name, value)] = named.items()
    shipped = {found.name for found in implementations.SHIPPED.of()}
    monkeypatch.setattr(implementations, "entry_points", lambda group: [EntryPoint(name, value, group)])
    known = {found.name for found in implementations.registry.__wrapped__().of()}
    assert (group, known - shipped) == (implementations.ENTRY_POINTS, {"fast-norm"})


def test_the_glossary_is_whole() -> None:
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE)) == set(GLOSSARY)
    words = set(re.findall(r"`([a-z-]+)`", PAGE))
    timers = {*Measure.model_fields["timer"].annotation.__args__}
    assert {*STATES, *timers} <= words
