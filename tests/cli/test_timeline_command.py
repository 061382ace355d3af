"""`kbench timeline` on a trace file: what it prints, writes, and ends with; and that docs/timeline.md is true."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kbench.cli import app
from kbench.timeline import CLASSES, GAPS

ROOT = Path(__file__).parents[2]
VLLM = ROOT / "tests" / "data" / "vllm-cpu-steps.json.gz"
SMALL = ROOT / "tests" / "data" / "h200-steps.json.gz"
PAGE = (ROOT / "docs" / "timeline.md").read_text()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["timeline", *map(str, arguments)])


def one_line(result: Result, code: int) -> str:
    assert (result.exit_code, result.stdout) == (code, "")
    [line] = result.stderr.strip().splitlines()
    return line


def test_the_page_names_every_class_and_gap_and_its_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*CLASSES, *GAPS):
        assert name in PAGE
    monkeypatch.chdir(tmp_path)
    shutil.copy(VLLM, "trace.json.gz")
    [toml] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    Path("mine.toml").write_text(toml)
    [block] = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    codes = [run(*shlex.split(line)[2:]).exit_code for line in block.splitlines()]
    assert codes == [0, 1, 0, 0]  # the model has no experts
    assert Path("seen.json.gz").exists()


def test_json_is_one_document_with_the_callers_class() -> None:
    found = json.loads(run(VLLM, "--json", "--class", "gemm", "--expected-saving", 0.1).stdout)
    assert found["saved_class"] == "gemm"
    assert found["largest_saving_us"] == pytest.approx(0.1 * found["classes"]["gemm"]["us"], rel=1e-3)
    assert found["named_share"] >= 0.95


@pytest.mark.parametrize(("share", "code"), [(0.1, 0), (0.3, 1)])
def test_a_share_that_is_not_reached_is_exit_1(share: float, code: int) -> None:
    result = run(VLLM, "--min-share", share)
    assert result.exit_code == code
    assert ("attention takes 16" in result.stderr) == (code == 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--class", "magic"), "no class 'magic'"),
        (("--min-share", 15), "not a share"),
        (("--expected-saving", 22), "expected_saving is 22"),
        (("--classes", "gone.toml"), "gone.toml: cannot read the classes"),
        (("-o", "gone/out.json"), "gone/out.json: cannot write the trace"),
    ],
)
def test_bad_options_are_one_line(
    options: tuple[object, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in one_line(run(SMALL, *options), 2)


@pytest.mark.parametrize("cut", [1, 10_000, 160_000])
def test_a_trace_that_is_cut_off_or_garbage_is_one_line(tmp_path: Path, cut: int) -> None:
    raw = VLLM.read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(raw[:-cut])
    assert "cut off or damaged" in one_line(run(tmp_path / "cut.json.gz"), 2)
    (tmp_path / "cut.json").write_bytes(gzip.decompress(raw)[:-cut])
    assert "cut off" in one_line(run(tmp_path / "cut.json"), 2)
    flipped = bytearray(raw)
    flipped[-cut % len(raw)] ^= 0xFF
    (tmp_path / "flipped.json.gz").write_bytes(flipped)
    result = run(tmp_path / "flipped.json.gz")
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    (tmp_path / "noise.json").write_bytes(bytes(range(256)) * 4)
    assert "noise.json" in one_line(run(tmp_path / "noise.json"), 2)
