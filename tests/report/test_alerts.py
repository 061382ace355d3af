"""The shipped alert rules: Prometheus' schema, expressions that parse, and only metrics and labels that are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kbench.report.prometheus import exposition

from .conftest import NEW, OLD, STEP, Bench

FILE = Path(__file__).parents[2] / "docs" / "alerts" / "kbench-backends.yaml"
DOCUMENT: dict[str, Any] = yaml.safe_load(FILE.read_text())
RULES = [rule for group in DOCUMENT["groups"] for rule in group["rules"]]


def written(tmp_path: Path, **changes: Any) -> dict[str, set[str]]:
    """Metric → its labels, of a run with one selection."""
    bench = Bench(tmp_path)
    for variant in (OLD, NEW):
        record = {"op": "attention.decode", "requested": variant, "resolved": variant, "observed": "", **changes}
        bench.ended(STEP, variant, session=0, facts={"selection": {"decode": record}})
    page = exposition("claim", [bench.run()]).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_file_is_a_rule_file() -> None:
    assert set(DOCUMENT) == {"groups"} and len({rule["alert"] for rule in RULES}) == len(RULES) >= 1
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert {"summary"} <= set(rule["annotations"])
    assert any("kbench_backend_drift" in rule["expr"] for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_expressions_parse_and_speak_of_what_is_written(rule: dict[str, Any], tmp_path: Path) -> None:
    promql.parse(rule["expr"])
    metrics = written(tmp_path)
    named = re.findall(r"kbench_\w+", rule["expr"])
    assert named and set(named) <= set(metrics)
    labels = set(re.findall(r"by \(([^)]*)\)", rule["expr"])[0].replace(" ", "").split(","))
    assert labels <= metrics[named[0]]
    for text in rule["annotations"].values():
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
        assert set(re.findall(r"kbench_\w+", text)) <= set(metrics)


def test_a_run_that_selected_nothing_writes_names_alone() -> None:
    page = exposition("claim", []).decode()
    assert "# TYPE kbench_backend_info gauge" in page
    assert not [line for line in page.splitlines() if line and not line.startswith("#")]
