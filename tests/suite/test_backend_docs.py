"""docs/backends.md: every key, reason and metric is documented, its suite is valid, and its commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbench.cli import app
from kbench.record.selected import COLUMNS
from kbench.report.prometheus import exposition
from kbench.suite import load_suite
from kbench.suite.schema import Fallback, Variant

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"^```\n(kbench .*?)^```$", PAGE, re.S | re.M) for line in block.splitlines()]


def test_every_key_of_a_selection_is_documented() -> None:
    keys = {info.alias or name for name, info in Variant.model_fields.items()}
    for key in keys - {"extends", "page_size", "layout", "engine"}:
        assert f"| `{key}` |" in PAGE, key
    for key in (*Fallback.model_fields, *COLUMNS):
        assert f"`{key}`" in PAGE, key


def test_every_field_of_a_reason_is_documented() -> None:
    table = PAGE[PAGE.index("| field of a reason |") : PAGE.index("## Policies")]
    files = ("selection/query.py", "selection/policy.py", "kernels/registry.py")
    source = "".join((ROOT / "src" / "kbench" / file).read_text() for file in files)
    fields = set(re.findall(r'Reason\("(\w+)"', source)) | set(re.findall(r'\.want\([^"]*?"(\w+)", ', source, re.S))
    assert {"op", "capability", "package", "import", "presence", "graph"} <= fields
    assert {field for field in fields if f"`{field}`" not in table} == set()


def test_every_metric_is_documented() -> None:
    for name in re.findall(r"# TYPE (\w+)", exposition("claim", []).decode()):
        assert f"| `{name}` |" in PAGE, name


def test_its_variant_is_part_of_a_valid_suite(tmp_path: Path) -> None:
    [block] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.S | re.M)
    text = (ROOT / "suites" / "practice.toml").read_text().replace("../traces", str(ROOT / "traces"))
    start = text.index("[variants.page64]")
    (tmp_path / "suite.toml").write_text(text[:start] + block + text[text.index("[kernel]") :])
    candidate = load_suite(tmp_path / "suite.toml").candidate
    assert (candidate.policy, candidate.fallback[0].use) == ("fallback", "sdpa-gather")


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, *arguments = shlex.split(command)
    if arguments[0] != "backends":
        arguments.append("--dry-run")  # it would measure
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
