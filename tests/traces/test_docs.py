"""Every command of docs/traces.md works as it stands there, in the order in which it stands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbench.cli import app

from .samples import AZURE, BURSTGPT, MOONCAKE, OTEL, QWEN, SERVEGEN_DATASET, SERVEGEN_TRACE, TRACELAB_CSV

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL) for line in block.splitlines()]


def sources(folder: Path) -> None:
    """What a reader has: files of the published formats, and their own."""
    clean = b"\n".join(line for line in OTEL.splitlines() if b"usage" not in line)
    (folder / "m-small").mkdir()
    [mine] = re.findall(r"```json\n(.*?)```", DOCS, re.DOTALL)
    files = {
        "AzureLLMInferenceTrace_conv.csv": AZURE,
        "conversation_trace.jsonl": MOONCAKE,
        "qwen_traceA_blksz_16.jsonl": QWEN,
        "BurstGPT_1.csv": BURSTGPT + b"50,GPT-4,12,0,12,API log\n",
        "m-small/chunk-0-trace.csv": SERVEGEN_TRACE,
        "m-small/chunk-0-dataset.json": SERVEGEN_DATASET,
        "multi_session_example.csv": TRACELAB_CSV,
        "spans.json": clean,
        "mine.jsonl": mine.encode(),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)


def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources(tmp_path)
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        program, *arguments = shlex.split(command, comments=True)
        done = CliRunner().invoke(app, arguments)
        assert program == "kbench" and done.exit_code == 0, f"{command}\n{done.output}{done.exception}"
        if "--json" in arguments:
            assert json.loads(done.stdout)["infinite_cache_hit_ratio"].keys() == {"16", "64"}
    assert (tmp_path / "mix.parquet").is_file()


def test_the_page_names_every_format_and_preset() -> None:
    from kbench.traces.importers import IMPORTERS

    for kind in IMPORTERS:
        assert f"| `{kind}` |" in DOCS and f"kbench trace import {kind} " in DOCS
