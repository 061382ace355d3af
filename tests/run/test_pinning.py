"""Both workers of a session sit on the same cores, so that a busy neighbour is no difference between the arms."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from driver import FAKE

from kbench.plan import make_plan
from kbench.run.execute import execute
from kbench.run.loop import Options
from kbench.run.session import Host
from kbench.run.workers import measuring_cores, worker_threads
from kbench.suite import load_suite

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins nothing")


def test_as_many_cores_as_a_worker_has_threads() -> None:
    usable = os.sched_getaffinity(0)
    assert len(measuring_cores()) == worker_threads() == max(1, len(usable) // 2)
    assert set(measuring_cores()) <= usable


def test_the_workers_of_a_session_share_their_cores(suite: Path, tmp_path: Path) -> None:
    seen: list[set[int]] = []

    def look(event: str, **_: Any) -> None:
        if event == "case_prepared":
            seen.extend(set(child.cpu_affinity()) for child in psutil.Process().children())

    options = Options(levels=("step",), root=tmp_path / "results", host=Host("cpu", FAKE), sessions=1, observe=look)
    execute(make_plan(load_suite(suite)), options)
    assert len(seen) >= 4
    assert all(cores == set(measuring_cores()) for cores in seen)
