"""The types of a suite document themselves, are frozen, and know the metrics of each level."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from kbench.suite import fields, schema
from suite.conftest import Edit


def tables() -> list[type[fields.Strict]]:
    return fields.Strict.__subclasses__()


def test_every_metric_belongs_to_a_level() -> None:
    named = [metric for metrics in fields.METRICS_OF_LEVEL.values() for metric in metrics]
    assert sorted(named) == sorted(get_args(fields.Metric))
    assert set(fields.METRICS_OF_LEVEL) == set(get_args(fields.Level))


@pytest.mark.parametrize("table", tables(), ids=lambda table: table.__name__)
def test_every_table_is_closed_and_frozen(table: type[fields.Strict]) -> None:
    assert table.model_config["extra"] == "forbid"
    assert table.model_config["frozen"]
    assert table.model_config["strict"]


def test_an_override_has_exactly_the_keys_of_the_engine() -> None:
    engine, override = schema.EngineSettings.model_fields, schema.EngineOverride.model_fields
    assert set(engine) == set(override)
    assert all(field.default is None for field in override.values())


def test_a_loaded_suite_cannot_be_changed(load: Edit) -> None:
    suite = load().suite
    with pytest.raises(ValidationError):
        suite.seed = 2  # type: ignore[misc]


def test_an_arm_crosses_a_pipe_unchanged(load: Edit) -> None:
    arm = load().candidate
    assert schema.Arm.model_validate_json(arm.model_dump_json()) == arm


@pytest.mark.parametrize("name", ["", "-x", "a/b", "../x", "a b", "x" * 65, ".hidden"])
def test_a_name_can_name_a_folder(load: Edit, name: str) -> None:
    with pytest.raises(Exception, match=r"claim\.name"):
        load(('name = "claim"', f'name = "{name}"'))
