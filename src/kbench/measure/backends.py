"""Resolve and load everything that an arm must serve, before anything is measured: what is missing, said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kbench.catalog import Case
from kbench.engine.arms import arm_shape, capability_of
from kbench.kernels.registry import Loader
from kbench.measure.boundary import guarded
from kbench.protocol import Outcome
from kbench.suite.choices import registry_of
from kbench.suite.demands import demands, served
from kbench.suite.schema import Arm


def resolve_all(arm: Arm, device: str, args: dict[str, Any]) -> Outcome:
    """`args`: cases (ids) and levels that will be measured. Facts: the record of every resolution."""
    return guarded(lambda: _resolve_all(arm, device, list(args["cases"]), list(args["levels"])))


def _resolve_all(arm: Arm, device: str, cases: list[str], levels: list[str]) -> Outcome:
    asked = [Case.parse(case) for case in cases]
    loader = Loader(Path(arm.root), registry_of(arm), strict=arm.policy == "reject")
    wanted = demands(arm, arm_shape(arm), asked, levels, device, capability_of(device))
    return Outcome(facts={"selections": [served(arm, demand, loader).to_json() for demand in wanted]})
