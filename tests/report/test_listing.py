"""`kbench list` for people: names first, lines that fit, nothing printed that says nothing."""

from __future__ import annotations

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
