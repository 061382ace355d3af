"""docs/rule.md: every TOML block is a suite or part of one, and every key of the rule is documented."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from kbench.suite import load_suite
from kbench.suite.rule_schema import Clause, Diagnostics, Power, Rule, RulePolicy, Tolerance, Validity, VoidCode

PAGE = (Path(__file__).parents[2] / "docs" / "rule.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
WHOLE = next(block for block in BLOCKS if block.startswith("schema"))


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_valid(block: str, tmp_path: Path) -> None:
    """A block without a schema replaces the tables of the whole one that it names."""
    text = block
    if block is not WHOLE:
        named = tomllib.loads(block)
        assert list(named) == ["regime"], "teach this test how to complete the block"
        text = WHOLE[: WHOLE.index("[[regime]]")] + WHOLE_REGIME + block
    path = tmp_path / "suite.toml"
    path.write_text(text, encoding="utf-8")
    loaded = load_suite(path)
    # A weighted clause needs traces, which the page's suite has not; nothing else may be odd.
    assert [one.what for one in loaded.warnings if "shapes to weigh by" not in one.what] == []


WHOLE_REGIME = '[[regime]]\nid = "part"\nwhen = { context = [4096, 4096], batch = [32, 32] }\npoints = ["32*1@4096"]\n'


def test_every_key_of_the_rule_and_every_code_is_named() -> None:
    for key in Rule.model_fields:
        assert f"`{key}`" in PAGE or f"`{key}." in PAGE, key
    for table in (Power, Validity, Diagnostics, RulePolicy):
        for key in table.model_fields:
            assert f".{key}`" in PAGE, key
    for key in Tolerance.model_fields:
        assert f"| `tolerance.DTYPE.{key}` |" in PAGE, key
    for key in Clause.model_fields:
        assert f"`{key}`" in PAGE, key
    for code in get_args(VoidCode):
        assert f"| `{code}` |" in PAGE, code


def test_the_whole_suite_of_the_page_states_every_key() -> None:
    stated = tomllib.loads(WHOLE)["rule"]
    assert set(stated) == set(Rule.model_fields)
    for name, table in (("power", Power), ("validity", Validity), ("diagnostics", Diagnostics), ("policy", RulePolicy)):
        assert set(stated[name]) == set(table.model_fields)
    assert set(stated["tolerance"]["float32"]) == set(Tolerance.model_fields)


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    from kbench.decide import diagnostics, shapes, voids

    assert f"more than {100 * voids.THROTTLED_SHARE:.0f} % of the windows" in PAGE
    assert f"more than {100 * voids.FOREIGN_SHARE:.0f} % of the usable cores" in PAGE
    assert f"more than {100 * diagnostics.LEAST_SHIFT:.0f} % at p < {diagnostics.CONTROL_ALPHA:g}" in PAGE
    assert f"at most a factor of {2**shapes.NEAR:.0f} in sequences" in PAGE and shapes.LEAST_COVERAGE == 0.5


def test_the_tolerances_of_the_page_are_those_of_the_code() -> None:
    from kbench.catalog.tolerances import FLOORS_OF, ROUNDING

    for check, floors in FLOORS_OF.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `tolerance.DTYPE.{check}` |"))
        assert [float(number) for number in re.findall(r"\d[\d.]*e-\d", row)] == [
            floors[dtype] for dtype in ("float32", "float16", "bfloat16")
        ]
    assert "costs 2.4e-8, 2.0e-4 and 1.6e-3" in PAGE and list(ROUNDING.values()) == [2.4e-8, 2.0e-4, 1.6e-3]
