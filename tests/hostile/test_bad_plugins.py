"""Plug-ins that are malformed, keep an old answer, or ask for what cannot be: never an enable, no lost run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kbench.catalog import Case
from kbench.errors import MeasurementError, UsageError
from kbench.measure.boundary import failure
from kbench.measure.step import StepTrial
from kbench.plan import make_plan
from kbench.protocol import Request, Status
from kbench.run.execute import execute
from kbench.run.history import History
from kbench.run.loop import Options
from kbench.run.preflight import check_backends
from kbench.run.session import Host
from kbench.suite import load_suite
from kbench.worker import Dispatcher

STALE = """
import torch
from kbench.kernels.registry import load
kept = {}
def fn(q, kv, batch, spec):
    if q.shape not in kept:
        right = load("sdpa-gather", "attention.decode")
        kept[q.shape] = right.run(q, kv, right.plan(batch, spec, kv), torch.empty_like(q)).clone()
    return kept[q.shape]
"""


def with_plugin(write: Callable[..., Path], text: str) -> Path:
    path = write('"blocked"', '"mine.py:fn"')
    (path.parent / "mine.py").write_text(text)
    return path


def test_a_step_that_keeps_an_old_answer_is_incorrect(write: Callable[..., Path]) -> None:
    suite = load_suite(with_plugin(write, STALE))
    trial = StepTrial(Case.parse("step/step/nano-1layers/1*1@127"), suite.candidate, "cpu", suite.suite.measure, 1)
    assert trial.prepare().status is Status.OK
    trial.window()
    outcome = trial.finish()
    assert outcome.status is Status.INCORRECT
    assert "with new K and V" in outcome.message


def test_a_malformed_plugin_costs_no_run(write: Callable[..., Path], tmp_path: Path) -> None:
    plan = make_plan(load_suite(with_plugin(write, "import nosuchmodule_xyz as fn\n")))
    options = Options(levels=("kernel",), root=tmp_path / "out", host=Host("cpu"))
    with pytest.raises(UsageError, match=r"variant b: .*mine\.py: plug-in cannot be imported: ModuleNotFoundError"):
        execute(plan, options)
    assert History.read(tmp_path / "out", "hostile").entries == ()


def test_a_plugin_that_crashes_when_imported_is_left_to_the_measurement(write: Callable[..., Path]) -> None:
    plan = make_plan(load_suite(with_plugin(write, "import os\nos._exit(7)\nfn = None\n")))
    check_backends(plan, Host("cpu"), ("kernel", "step"))


def test_what_its_user_can_mend_is_no_failure_of_the_candidate() -> None:
    assert failure(UsageError("a point beyond the memory")).status is Status.UNSUPPORTED
    assert failure(MeasurementError("something else")).status is Status.FAILED

    class Asked(Dispatcher):
        def _dispatch(self, request: Request) -> object:  # type: ignore[override]
            raise UsageError("no such thing", remedy="name another")

    outcome = Asked().answer(Request(1, "job"))
    assert (outcome.status, outcome.message) == (Status.UNSUPPORTED, "no such thing (name another)")


def test_the_clock_is_taken_before_any_code_under_test_runs() -> None:
    code = (
        "import sys, time, kbench.worker as worker; worker._use_torch(); real = time.perf_counter_ns;"
        "time.perf_counter_ns = None; import kbench.measure.step as step, kbench.clock.wall as wall;"
        "assert step.perf_counter_ns is real and wall.perf_counter_ns is real"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
