"""Runs a suite with the fake worker, and kills itself at the named point of KBENCH_KILL (`EVENT:NTH`).

`Zygote` runs it many times: one interpreter that has imported everything forks a child for every run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from kbench.errors import KbenchError
from kbench.plan import make_plan
from kbench.run.execute import execute
from kbench.run.loop import Options
from kbench.run.session import Host
from kbench.suite import load_suite

FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


class Killer:
    """An observer that ends its own process, without a chance to clean up, at the nth event of a name."""

    def __init__(self, point: str) -> None:
        self._event, _, nth = point.partition(":")
        self._left = int(nth or 0)

    def __call__(self, event: str, **facts: Any) -> None:
        if event != self._event:
            return
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def main(suite: str, root: str, resume: str) -> int:
    options = Options(
        levels=("kernel", "step"),
        root=Path(root),
        host=Host("cpu", FAKE),
        resume=resume == "resume",
        observe=Killer(os.environ.get("KBENCH_KILL", "")),
    )
    try:
        execute(make_plan(load_suite(Path(suite))), options)
    except KbenchError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


class Zygote:
    """Drives runs in forked children. What a child says on stderr is in `said`; its exit status is returned."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.said = ""
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__)), str(log)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def drive(self, suite: Path, root: Path, *, resume: bool = False, **env: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {"args": [str(suite), str(root), "resume" if resume else "fresh"], "env": env}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        self.said = self._log.read_text()
        return code

    def close(self) -> None:
        self._process.communicate(timeout=60)


def serve(log: str) -> None:
    # What a run imports late, imported once for all of them; pyarrow looks for pandas at its first numpy array.
    import filelock  # noqa: F401
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet

    pa.array(np.zeros(1))
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 2)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.environ.update(job["env"])
            code = 99
            try:
                code = main(*job["args"])
            except BaseException:  # noqa: BLE001  the child must end here whatever happens
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
