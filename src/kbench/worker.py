"""The child process that hosts one variant: reads requests from a pipe, measures, answers.

Started by name (`python -m kbench.worker`), imported by nobody. It owns the trial boundary: whatever an implementation
does wrong inside a trial becomes a status and one line, and the worker goes on. torch is imported when a trial needs,
so that modelled replays run without.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kbench.catalog import Case
from kbench.errors import KbenchError, MeasurementError, UsageError
from kbench.protocol import Measurement, Outcome, Reply, Request, Status, decode_request, encode
from kbench.suite.schema import Arm, Measure

_PR_SET_PDEATHSIG = 1


class Trial(Protocol):
    """One case in one worker."""

    def prepare(self, *, thorough: bool = True) -> Outcome: ...

    def window(self) -> tuple[Measurement, ...]: ...

    def finish(self) -> Outcome: ...

    def trace(self) -> Outcome:
        """Instead of the three above, in a worker where nothing is timed: what ran, seen by a profiler."""


@dataclass(slots=True)
class Hosted:
    """What this process hosts: one arm on one device, and the trial that is open."""

    arm: Arm
    device: str
    measure: Measure
    trials: dict[str, Trial] = field(default_factory=dict)
    kept: Any = None
    """`KeptWeights` of the arm, once a step was measured."""


class Dispatcher:
    """Answers requests. Knows which level measures what; measuring itself lives in `kbench.measure`."""

    def __init__(self) -> None:
        self._hosted: Hosted | None = None

    def answer(self, request: Request) -> Outcome:
        try:
            return self._dispatch(request)
        except UsageError as error:
            return Outcome(Status.UNSUPPORTED, _one_line(error), facts={"usage": True})
        except KbenchError as error:
            return Outcome(Status.FAILED, _one_line(error))
        except MemoryError as error:
            return Outcome(Status.OUT_OF_MEMORY, _one_line(error))
        except Exception as error:  # noqa: BLE001  the trial boundary: code under test may raise anything
            status = Status.OUT_OF_MEMORY if type(error).__name__ == "OutOfMemoryError" else Status.FAILED
            if os.environ.get("KBENCH_DEBUG"):
                sys.excepthook(type(error), error, error.__traceback__)
            return Outcome(status, f"{type(error).__name__}: {_one_line(error)}")

    def _dispatch(self, request: Request) -> Outcome:
        if request.op == "open":
            self._hosted = Hosted(
                arm=Arm.model_validate(request.args["arm"], strict=False),
                device=str(request.args["device"]),
                measure=Measure.model_validate(request.args["measure"], strict=False),
            )
            if request.args["torch"]:
                _use_torch()
            return Outcome()
        hosted = self._hosted
        if hosted is None:
            raise MeasurementError(f"{request.op} before open")
        if request.op == "job":
            return _job(hosted, dict(request.args))
        case = str(request.args["case"])
        if request.op == "prepare":
            hosted.trials[case] = _trial(hosted, Case.parse(case))
            return hosted.trials[case].prepare(thorough=bool(request.args["thorough"]))
        if request.op == "trace":
            return _trial(hosted, Case.parse(case)).trace()
        if case not in hosted.trials:
            raise MeasurementError(f"{request.op} of {case}, which is not prepared")
        if request.op == "window":
            return Outcome(measurements=hosted.trials[case].window())
        if request.op == "finish":
            trial = hosted.trials.pop(case)
            outcome = trial.finish()
            del trial
            gc.collect()
            return outcome
        raise MeasurementError(f"no request {request.op!r}")


def _trial(hosted: Hosted, case: Case) -> Trial:
    if case.level == "kernel":
        from kbench.measure.kernel import KernelTrial

        return KernelTrial(case, hosted.arm, hosted.device, hosted.measure, hosted.arm.seed)
    if case.level == "step":
        from kbench.measure.step import StepTrial

        return StepTrial(case, hosted.arm, hosted.device, hosted.measure, hosted.arm.seed, _weights(hosted))
    raise MeasurementError(f"level {case.level} has no windows")


def _weights(hosted: Hosted) -> Any:
    """One load for all steps of this worker: at 8 B parameters it takes longer than most cases."""
    from kbench.measure.exec_batch import KeptWeights

    if hosted.kept is None:
        hosted.kept = KeptWeights()
    return hosted.kept


def _use_torch() -> None:
    """Import torch, with the threads that the parent allots. Both workers of a pair do it side by side, when opened."""
    import torch

    # Before any code under test: what measures keeps the clock that it imported, whatever is patched later.
    import kbench.clock.cuda
    import kbench.clock.escape
    import kbench.clock.integrity
    import kbench.clock.wall
    import kbench.measure.costs
    import kbench.measure.kernel
    import kbench.measure.step  # noqa: F401  imported for the names that they take

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # What was imported stays: the collection after each trial need not look at it again.
    gc.collect()
    gc.freeze()


def _job(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    name = str(args.pop("name"))
    if name not in JOBS:
        raise MeasurementError(f"no job {name!r}")
    return JOBS[name](hosted, args)


def _backends(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    """Resolve and load everything that the arm names, before a run is announced."""
    from kbench.measure.backends import resolve_all

    return resolve_all(hosted.arm, hosted.device, args)


def _costs(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    from kbench.measure.costs import measure_costs

    points, repeats = list(args["points"]), int(args["repeats"])
    rows = measure_costs(hosted.arm, hosted.device, points, repeats, hosted.arm.seed, kept=_weights(hosted))
    return Outcome(facts={"rows": rows})


def _timeline(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    from kbench.measure.timeline import record_timeline

    return record_timeline(hosted.arm, hosted.device, list(args["points"]), Path(args["path"]), hosted.arm.seed)


def _setup(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    from kbench.measure.workload import setup_job

    # Always the baseline's, also in the worker of the candidate, which shares this work.
    arm = Arm.model_validate(args.pop("arm"), strict=False)
    trace, costs, _ = args.pop("trace"), args.pop("costs"), args.pop("trace_class")
    return setup_job(trace, arm, costs, **args)


def _virtual(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    from kbench.measure.workload import virtual_job

    return virtual_job(args.pop("trace"), hosted.arm, args.pop("costs"), **args)


def _exec(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    from kbench.measure.workload import exec_job

    return exec_job(args.pop("trace"), hosted.arm, hosted.device, **args)


def _calibrate(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    from kbench.measure.workload import calibrate_job

    return calibrate_job(args.pop("trace"), hosted.arm, args.pop("costs"), **args)


def _selftest(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    """One try of `kbench selftest`, or the list of all."""
    from kbench.measure import selftest

    if "kind" in args:
        return Outcome(facts=selftest.try_kind(str(args["kind"]), hosted.device))
    if "implementation" in args:
        return Outcome(facts=selftest.try_honest(str(args["implementation"]), str(args["op"]), hosted.device))
    return Outcome(facts=selftest.listing(hosted.device))


def _tune(hosted: Hosted, args: dict[str, Any]) -> Outcome:
    from kbench.measure.tuning import tune_job

    return tune_job(hosted.arm, hosted.device, hosted.measure, **args)


def _divergence(_: Hosted, args: dict[str, Any]) -> Outcome:
    from kbench.measure.workload import divergence_job

    return divergence_job(args["a"], args["b"])


JOBS: dict[str, Callable[[Hosted, dict[str, Any]], Outcome]] = {
    "backends": _backends,
    "costs": _costs,
    "timeline": _timeline,
    "setup": _setup,
    "virtual": _virtual,
    "exec": _exec,
    "calibrate": _calibrate,
    "selftest": _selftest,
    "tune": _tune,
    "divergence": _divergence,
}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:400] or type(error).__name__


def _die_with_parent() -> None:
    """A parent that is killed outright takes its workers along, also one that is stuck inside a kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--read-fd", type=int, required=True)
    parser.add_argument("--write-fd", type=int, required=True)
    options = parser.parse_args()
    _die_with_parent()
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("kbench").setLevel(logging.INFO)
    dispatcher = Dispatcher()
    with os.fdopen(options.read_fd, "rb") as requests, os.fdopen(options.write_fd, "wb") as replies:
        for line in requests:
            request = decode_request(line)
            if request.op == "close":
                break
            replies.write(encode(Reply(request.seq, dispatcher.answer(request))))
            replies.flush()
    # Everything was said. Tearing torch and large tensors down in order takes seconds that the next session waits for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
