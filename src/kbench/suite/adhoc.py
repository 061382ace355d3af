"""A suite for the development loop, made of options: one operation, two implementations, some points, no rule.

What is measured by it is exploratory: nothing is locked, nothing is evidence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kbench import catalog
from kbench.errors import Problem, UsageError
from kbench.suite import checks
from kbench.suite.checks import PAGED
from kbench.suite.load import LoadedSuite
from kbench.suite.schema import SCHEMA, Suite
from kbench.suite.shapes import expanded

NAME = "adhoc"
SESSIONS = 3
"""Few, because somebody is waiting; a suite with a rule takes more."""
MEASURE: Mapping[str, Any] = MappingProxyType({})
"""Settings of `[measure]` that differ from a suite's."""
DEFAULT_POINTS = {
    "attention.decode": ("1*1@127", "1*1@4096", "32*1@127", "32*1@4096"),
    "attention.prefill": ("1*127", "1*512", "4*33@1024"),
}
BATCHES = ("1*1@1024", "32*1@1024", "1*512")


def adhoc_suite(
    op: str,
    implementation: str,
    baseline: str,
    points: Sequence[str],
    *,
    model: str = "small",
    dtype: str = "float32",
    page_size: int = 16,
    layout: str = "NHD",
    files: Mapping[str, str] = MappingProxyType({}),
    measure: dict[str, Any] | None = None,
    seed: int = 1,
    root: Path | None = None,
) -> LoadedSuite:
    """Raises UsageError where something named does not exist or does not fit.

    `files`: keys of `[kernel]` that name files of shapes; without points and files some of this module's are taken.
    """
    known = catalog.operation(op)
    phase = op.removeprefix("attention.")
    shapes = list(points) or ([] if files else list(DEFAULT_POINTS.get(op, BATCHES)))
    for text in shapes:
        catalog.resolve_shape(op, catalog.parse_shape(text), catalog.model_shape(model))
    here = root or Path.cwd()

    def variant(reference: str) -> dict[str, Any]:
        common: dict[str, Any] = {"page_size": page_size, "layout": layout}
        if op not in PAGED:
            return {**common, "kernels": {op: reference}}
        other = "prefill" if phase == "decode" else "decode"
        return {**common, "attention": {phase: reference, other: "reference"}}

    document = {
        "schema": SCHEMA,
        "seed": seed,
        "claim": {"name": NAME, "baseline": "baseline", "candidate": "candidate"},
        "model": {"preset": model, "dtype": dtype},
        "variants": {"baseline": variant(baseline), "candidate": variant(implementation)},
        "kernel": {"ops": [known.name], "points": shapes, **files},
        "measure": {**MEASURE, **(measure or {})},
        "rule": {"looks": [max(2, SESSIONS)]},
    }
    try:
        suite = Suite.model_validate_json(json.dumps(document))
    except ValueError as error:
        raise UsageError(
            f"these options make no suite: {' '.join(str(error).split())[:200]}", remedy="see kbench kernel --help"
        ) from error
    suite, recorded = expanded(suite, here)
    found = list(checks.problems(suite, here))
    if found:
        raise UsageError(found[0][1], remedy=found[0][2])
    notes = tuple(Problem(note) for note in (recorded.notes if recorded else ()))
    return LoadedSuite(suite, here / f"{NAME}.toml", notes, recorded=recorded)
