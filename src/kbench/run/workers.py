"""Child processes that host one variant each: start, ask, time out, end.

Owns the pipes and the life of a worker. A worker that dies or falls silent is ended and reported as `WorkerLost`; what
that means for a session is decided elsewhere. The parent holds no torch and no GPU.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from kbench.errors import MeasurementError
from kbench.protocol import Outcome, Request, Status, decode_reply, encode

WORKER_COMMAND = (sys.executable, "-m", "kbench.worker")
END_GRACE_S = 5.0
LAST_WORDS = 1 << 16
LARGEST_REPLY = 256 * 1024 * 1024


class WorkerLost(Exception):
    """A worker crashed or hung; `status` is how the trial that it was in ends."""

    def __init__(self, variant: str, status: Status, message: str) -> None:
        super().__init__(message)
        self.variant = variant
        self.status = status
        self.message = message


class Worker:
    """One child process and its two pipes. Requests are answered in order; only one is ever open."""

    def __init__(self, variant: str, log: Path, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.variant = variant
        self._log = log
        self._buffer = bytearray()
        self._seq = 0
        child_reads, self._write_fd = os.pipe()
        self._read_fd, child_writes = os.pipe()
        try:
            with log.open("ab") as output:
                # Its own session: Ctrl-C reaches the parent alone, which then closes its workers in order.
                self._process = subprocess.Popen(
                    [*command, "--read-fd", str(child_reads), "--write-fd", str(child_writes)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(child_reads, child_writes),
                    start_new_session=True,
                    env=_environment(),
                )
        except OSError as error:
            os.close(self._write_fd)
            os.close(self._read_fd)
            raise MeasurementError(f"cannot start a worker: {error.strerror or error}", where=str(log)) from error
        finally:
            os.close(child_reads)
            os.close(child_writes)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, args: dict[str, Any], timeout_s: float) -> Outcome:
        """Send a request and wait for its answer. Raises WorkerLost when there will be none."""
        self.send(op, args)
        return self.answer(timeout_s)

    def send(self, op: str, args: dict[str, Any]) -> None:
        self._seq += 1
        data = encode(Request(self._seq, op, args))
        try:
            while data:
                data = data[os.write(self._write_fd, data) :]
        except BrokenPipeError as error:
            raise self._lost() from error

    def answer(self, timeout_s: float) -> Outcome:
        """Wait for the answer to the last `send`."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._read_fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                raise WorkerLost(self.variant, Status.HUNG, f"no answer in {timeout_s:g} s")
            chunk = os.read(self._read_fd, 1 << 16)
            if not chunk:
                raise self._lost()
            self._buffer += chunk
            if len(self._buffer) > LARGEST_REPLY:
                self.kill()
                raise WorkerLost(self.variant, Status.CRASHED, "an answer larger than 256 MiB")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        try:
            reply = decode_reply(line)
        except MeasurementError as error:
            raise self._nonsense(error.problems[0].what) from error
        if reply.seq != self._seq:
            raise self._nonsense(f"it answered request {reply.seq}, not {self._seq}")
        return reply.outcome

    def pin(self, cores: Collection[int]) -> None:
        """Keep the worker, and the threads that it will start, on `cores`. Where the system cannot, it stays free."""
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._process.pid, cores)

    def close(self) -> None:
        """Ask the worker to go, then make sure of it."""
        with contextlib.suppress(WorkerLost, OSError):
            self.send("close", {})
        self._end(END_GRACE_S)

    def kill(self) -> None:
        self._end(0.0)

    def _end(self, grace_s: float) -> None:
        for name in ("_write_fd", "_read_fd"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
                setattr(self, name, -1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        # It led a session of its own: whatever it has started and left behind goes with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _lost(self) -> WorkerLost:
        self._end(END_GRACE_S)
        code = self._process.returncode
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return WorkerLost(self.variant, Status.CRASHED, f"worker {reason}{self._last_words()}")

    def _nonsense(self, what: str) -> WorkerLost:
        """Something else than the worker writes into its pipe: code under test that uses files it did not open."""
        self.kill()
        return WorkerLost(self.variant, Status.CRASHED, f"its answer cannot be read: {what}")

    def _last_words(self) -> str:
        """The last line that the worker printed, if it printed any."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - LAST_WORDS))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        # Python's fault handler ends with a list of modules; what happened, and where, stands above it.
        for place, line in enumerate(lines):
            if line.startswith("Fatal Python error: "):
                frame = next((text.strip() for text in lines[place:] if text.startswith("  File ")), "")
                return f": {line.removeprefix('Fatal Python error: ')}" + (f", {frame}" if frame else "")
        return f": {lines[-1].strip()[:200]}" if lines else ""


def _environment() -> dict[str, str]:
    """One thread a core but for half of them: the other half keeps the parent and the system out of the windows."""
    threads = str(worker_threads())
    fixed = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    # torch's profiler otherwise writes lines of its own into the worker's log, where the last words of a crash belong.
    fixed["KINETO_LOG_LEVEL"] = "99"
    return {**os.environ, **fixed}


def measuring_cores() -> list[int]:
    """The upper half of the usable cores: as many as a worker has threads. The system and the parent like the lower."""
    return sorted(os.sched_getaffinity(0))[-worker_threads() :]


def worker_threads() -> int:
    return max(1, len(os.sched_getaffinity(0)) // 2)
