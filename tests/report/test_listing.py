"""`kbench list` for people: names first, lines that fit, nothing printed that says nothing."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from kbench import catalog
from kbench.catalog.arguments import ARGUMENTS
from kbench.cli import app
from kbench.ops.registry import load_op
from kbench.report.listing import WIDTH


def listed(topic: str) -> list[str]:
    done = CliRunner().invoke(app, ["list", topic])
    assert done.exit_code == 0
    return str(done.stdout).splitlines()


@pytest.mark.parametrize("topic", ["ops", "kernels", "models"])
def test_every_entry_begins_a_line_and_every_line_fits(topic: str) -> None:
    lines = listed(topic)
    first = [line.split()[0] for line in lines if not line.startswith(" ")]
    known = {
        "ops": list(catalog.OPS),
        "kernels": [found.name for found in catalog.implementations()],
        "models": list(catalog.MODELS),
    }
    assert first == known[topic]
    assert max(map(len, lines)) <= WIDTH and not any(line.endswith(" ") for line in lines)
    assert not any(word in "\n".join(lines) for word in ("False", "()", "None"))


def test_an_operation_says_what_a_function_of_it_takes() -> None:
    assert "fn(x, weight, eps)" in " ".join(listed("ops"))


def test_the_arguments_are_those_that_the_operations_declare() -> None:
    assert {op: tuple(load_op(op).arguments) for op in catalog.OPS} == dict(ARGUMENTS)


def test_models_say_what_the_engine_hosts_and_what_it_lacks_of_the_others() -> None:
    text = "\n".join(listed("models"))
    entries = {entry.split()[0]: " ".join(entry.split()) for entry in re.split(r"\n(?=\S)", text)}
    for name, shape in catalog.MODELS.items():
        assert ("runs at all levels" in entries[name]) == (not shape.foreign)
    assert "level 1 only, the engine lacks: multi-head latent attention" in entries["deepseek-v3"]
    assert "layers in turn: window 128, sinks / full, sinks" in entries["gpt-oss-20b"]
    assert "60 experts, 4 a token, of 1,408 and a shared one of 5,632" in entries["qwen1.5-moe-a2.7b"]
    done = CliRunner().invoke(app, ["list", "models", "--json"])
    rows = {row["name"]: row for row in json.loads(done.stdout)["models"]}
    assert {name for name, row in rows.items() if not row["hosted"]} == {
        "deepseek-v3",
        "kimi-k2",
        "llama-4-scout",
        "gemma-2-9b",
        "gemma-3-27b",
        "falcon-7b",
    }
