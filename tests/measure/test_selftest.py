"""The zoo: every cheat is caught by the defence that it names and passes without it; nobody honest is accused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from typer.testing import CliRunner

from kbench.cli import app
from kbench.kernels.defences import ALL, Defences
from kbench.kernels.zoo.kinds import kinds

ON_CPU = kinds("cpu")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = CliRunner().invoke(app, ["selftest", "--device", "cpu", "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == 0, [row for row in document["kinds"] if not (row["caught"] and row["passes_without"])]
    assert isinstance(document, dict)
    return document


def test_names_are_unique_and_every_kind_names_a_defence() -> None:
    assert max(Counter(kind.name for kind in ON_CPU).values()) == 1
    fields = set(Defences.__dataclass_fields__)
    assert {kind.defence for kind in ON_CPU} <= fields
    assert all(getattr(ALL, name) for name in fields), "all defences are on by default"


def test_every_kind_is_caught_and_passes_without_its_defence(report: dict[str, Any]) -> None:
    assert report["caught"] == report["total"] == report["passing_without"] == len(ON_CPU) >= 25
    assert {row["name"] for row in report["kinds"]} == {kind.name for kind in ON_CPU}


def test_nobody_honest_is_accused(report: dict[str, Any]) -> None:
    assert report["false_accusations"] == 0
    assert all(row["status"] == "ok" for row in report["honest"]), report["honest"]
    assert {row["op"].partition(".")[0] for row in report["honest"]} >= {
        "attention",
        "gemm",
        "moe",
        "norm",
        "rope",
        "activation",
        "sampling",
        "kv",
        "quant",
    }


def test_nothing_to_try_is_one_line() -> None:
    done = CliRunner().invoke(app, ["selftest", "--device", "cpu", "-k", "no such kind"])
    assert done.exit_code == 2 and "nothing to try" in done.stderr
