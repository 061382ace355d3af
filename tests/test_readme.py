"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbench.catalog import Case
from kbench.cli import app
from kbench.measure.kernel import KernelTrial
from kbench.protocol import Status
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

README = Path(__file__).parents[1] / "README.md"


def test_the_kernel_of_the_readme_is_right(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    arm = Arm(
        name="mine",
        model=ModelSettings(preset="nano"),
        engine=EngineSettings(),
        prefill="sdpa",
        decode="mine.py:decode",
        page_size=16,
        layout="NHD",
        seed=1,
        root=str(tmp_path),
    )
    trial = KernelTrial(Case("kernel", "attention.decode", "nano", "3*1@127"), arm, "cpu", Measure(), 1)
    outcome = trial.prepare()
    assert outcome.status is Status.OK, outcome.message
    assert outcome.facts["correctness"]["null_models_killed"] == 5


def test_the_kernel_command_of_the_readme_measures_the_kernel_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned, not measured: the names in the command are those in the code below it."""
    text = README.read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [command] = re.findall(r"^kbench (kernel .*)$", text, re.MULTILINE)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*shlex.split(command), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "attention.decode" in done.output
