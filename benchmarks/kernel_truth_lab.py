"""Reads every tool and the profiler on one kernel at a time, for `kernel_truth.py`.

Owns the two passes, the order, how the device is kept warm, and the boundary: what a tool or a kernel raises costs that
reading or that kernel and is written down. It judges nothing.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from kernel_truth_cases import CALIBRATORS, CASES, Call
from kernel_truth_tools import Tool, available

from kbench.clock.cache import CacheState, last_level_bytes, plan_state
from kbench.clock.device import DeviceClock
from kbench.clock.flush import BATCH, FlushTimer
from kbench.clock.profiler import CallProfile, WatchedRun, profile_calls, watch_run
from kbench.clock.sm_clock import SmClock
from kbench.clock.timer import Timer, prepared_timer

STATES = ("hot", "cold", "flush")
LONG_US = 100.0
FLUSH_BYTES = 256 << 20
"""What do_bench writes; more than 2×L2 of any device so far."""
WINDOW_CALLS, WINDOW_MS = 20, 40.0
SETTLE_MS = 60.0
"""A long kernel is kept running so long before each reading, so that all readings find the device equally warm."""
SETTLE_CALLS = 600
MOST_WATCHED = 4
"""Kernels of a call: watching replays of calls with more ended in a segmentation fault inside torch 2.11's profiler."""
SHORT_PROFILES = 2
"""Of a short kernel: a profile is some thousand calls, and their mean hardly moves."""
Reading = dict[str, float]


@dataclass(slots=True)
class Case:
    """One kernel, built: the timers of each cache state, prepared once as level 1 does."""

    name: str
    states: dict[str, CacheState]
    timers: dict[tuple[str, str], Timer]
    """By state and tool name."""
    call: Call
    us: float


@dataclass(slots=True)
class Row:
    kernel: str
    state: str
    plan: CacheState
    phase: str
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    profiles: list[CallProfile] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    timer: str = ""
    calibration: list[float] = field(default_factory=list)
    """What the calibrator of this state read in the same rounds, in µs."""


class Lab:
    """The device, the other tools, and what was found so far. A tool or case that fails is a problem, not the end."""

    def __init__(self, device: torch.device, rounds: int, seed: int, deadline: float) -> None:
        self.device = device
        self.rounds = rounds
        self.random = random.Random(seed)
        self.deadline = deadline
        self.clock = DeviceClock(device)
        self.mhz = 0.0
        self.problems: list[str] = []
        self.tools, self.absent = available()
        self.rows: dict[tuple[str, str], Row] = {}
        self.facts: dict[str, Any] = {}
        self.built: dict[str, Case] = {}
        """Short kernels, kept from the first pass to the second: another memory is another time."""
        self.us: dict[str, float] = {}
        """Of each kernel in a graph, hot: whether it is a long one."""
        self.calibrators: dict[str, Timer] = {}
        self.calibrator_us: dict[str, float] = {}
        """The profiler's time of each state's calibrator."""
        self.sm_clock: SmClock | None = None
        if device.type == "cuda":
            self.sm_clock = self._try("the clock on the device", lambda: SmClock(device))

    # ------------------------------------------------------------------------------------- one case

    def build(self, name: str) -> Case:
        """The kernel's input sets and kbench's timers in every state."""
        built = CASES[name](self.device)
        cache = last_level_bytes(self.device)
        states = {state: plan_state(built.bytes, 0, cache, self.device.type, state) for state in STATES}  # type: ignore[arg-type]
        calls = built.sets(states["cold"].sets)
        timers: dict[tuple[str, str], Timer] = {}
        for state, some in (("hot", calls[:1]), ("cold", calls)):
            for tool, timer in (("kbench", "auto"), ("kbench event", "event")):
                self._try(f"{name}, {state}, {tool}", lambda: self._prepare(timers, (state, tool), some, timer))  # noqa: B023
        flush = FlushTimer(self.device, FLUSH_BYTES)
        self._try(f"{name}, flush", lambda: flush.prepare(calls[:1] * BATCH))
        timers["flush", "kbench"] = flush
        estimate = timers["hot", "kbench"].window(3, 5.0)
        return Case(name, states, timers, calls[0], median(estimate))

    def _prepare(self, timers: dict[tuple[str, str], Timer], key: tuple[str, str], calls: Any, name: str) -> None:
        timers[key] = prepared_timer(calls, self.device, name)

    def calibrate(self) -> None:
        """Ready the calibrators: they are read beside every short kernel, and profiled at the end of all clocks."""
        cache = last_level_bytes(self.device)
        for state, build in CALIBRATORS.items():
            built = build(self.device)
            sets = plan_state(built.bytes, 0, cache, self.device.type, state).sets if state == "cold" else 1  # type: ignore[arg-type]
            calls = built.sets(sets)
            if state == "flush":
                timer: Timer = FlushTimer(self.device, FLUSH_BYTES)
                timer.prepare(calls * BATCH)
            else:
                timer = prepared_timer(calls, self.device)
            self.calibrators[state] = timer

    def profile_calibrators(self) -> None:
        for state, timer in self.calibrators.items():
            leading = 1 if state == "flush" else 0
            made = profile_calls(timer.witnessed, timer.round_calls, self.device, leading=leading)
            if made is not None:
                self.calibrator_us[state] = made.span_us

    def row(self, case: Case, state: str, phase: str) -> Row:
        key = (case.name, state)
        if key not in self.rows:
            timer = case.timers[state, "kbench"].name if (state, "kbench") in case.timers else ""
            self.rows[key] = Row(case.name, state, case.states[state], phase, timer=timer)
        return self.rows[key]

    def read(self, case: Case, phase: str, *, clocks: bool, profilers: bool) -> None:
        """Every tool in every state once, in random order: those with clocks, those that profile, or both.

        What a tool raises costs its reading.
        """
        jobs: list[tuple[str, bool, Callable[[], dict[str, float]]]] = [
            (state, True, self._ours(case, state, tool)) for state, tool in case.timers if clocks
        ]
        wanted = [tool for tool in self.tools if (profilers if tool.profiles else clocks)]
        jobs += [(tool.state, False, self._theirs(case, tool)) for tool in wanted]
        self.random.shuffle(jobs)
        jobs = [(state, ours, self._clocked(job)) for state, ours, job in jobs]
        for state, timer in self.calibrators.items() if clocks and case.us < LONG_US else ():
            self.row(case, state, phase).calibration.append(median(timer.window(WINDOW_CALLS, WINDOW_MS)))
        for state, ours, job in jobs:
            row = self.row(case, state, phase)
            self.settle(case)
            own: WatchedRun | None = None
            if case.us >= LONG_US and row.profiles and row.profiles[-1].kernels <= MOST_WATCHED:
                found, own = self._try(f"{case.name}, {state}", lambda: self._in_own_run(job, row, ours)) or ({}, None)  # noqa: B023
            else:
                found = self._try(f"{case.name}, {state}", job) or {}
            for name, us in found.items():
                reading = {"us": us, "sm_mhz": self.mhz}
                if own is not None and case.timers[state, "kbench"].round_calls > 1:
                    reading |= {"between": own.between_us}
                if own is not None:
                    reading |= {"sum": own.sum_us, "span": own.span_us}
                row.readings.setdefault(name, []).append(reading)

    def _in_own_run(
        self, job: Callable[[], dict[str, float]], row: Row, ours: bool
    ) -> tuple[dict[str, float], WatchedRun | None]:
        """A tool under the profiler: its reading, and what the profiler saw of the very calls that it timed.

        kbench's timers warm up before; of other tools the later half counts, so that their warm-up is left out.
        """
        found: dict[str, float] = {}

        def run() -> None:
            found.update(job())

        last = row.profiles[-1]
        seen = watch_run(run, self.device, last.names, last.kernels, all_calls=ours)
        return found, seen

    def _clocked(self, job: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
        """The multiprocessors' mean clock over the job, read on the device, else by NVML after it, goes to `mhz`."""

        def clocked() -> dict[str, float]:
            if self.sm_clock is not None:
                self.sm_clock.begin()
            made = job()
            if self.sm_clock is not None:
                self.sm_clock.end()
                self.mhz = self.sm_clock.mhz()
            else:
                self.mhz = float(self.clock.read().get("sm_mhz", 0.0))
            return made

        return clocked

    def _ours(self, case: Case, state: str, tool: str) -> Callable[[], dict[str, float]]:
        def job() -> dict[str, float]:
            timer = case.timers[state, tool]
            value = median(timer.window(WINDOW_CALLS, WINDOW_MS))
            if tool == "kbench":
                self.rows[case.name, state].flags |= set(timer.flags)
            return {tool: value}

        return job

    def _theirs(self, case: Case, tool: Tool) -> Callable[[], dict[str, float]]:
        return lambda: tool.read(case.call)

    def profile(self, case: Case, phase: str) -> None:
        """The profiler's own time in each state, by the same replays and batches as the timers make."""
        for state in STATES:
            row = self.row(case, state, phase)
            timer = case.timers.get((state, "kbench"))
            if timer is None:
                continue

            def run(timer: Timer = timer) -> float:
                self.settle(case)
                return timer.witnessed()

            leading = 1 if state == "flush" else 0
            made = self._try(
                f"{case.name}, {state}, profiler",
                lambda: profile_calls(run, timer.round_calls, self.device, leading=leading),  # noqa: B023
            )
            if made is not None:
                row.profiles.append(made)

    def settle(self, case: Case) -> None:
        """Bring a long kernel to the clock that it runs at."""
        if case.us < LONG_US:
            return
        for _ in range(min(SETTLE_CALLS, int(SETTLE_MS * 1_000 / case.us) + 1)):
            case.call()

    # -------------------------------------------------------------------------------------- passes

    def undisturbed(self, name: str) -> None:
        """Pass A: before this process profiles anything. Long kernels only learn that they are long."""
        case = self.build(name)
        self.us[name] = case.us
        if case.us < LONG_US:
            self.built[name] = case
        for _ in range(self.rounds if case.us < LONG_US else 0):
            self.read(case, "before any profile", clocks=True, profilers=False)

    def profiled(self, name: str) -> None:
        """Pass B: the references; and the readings of long kernels, each round between two profiles."""
        case = self.built.pop(name, None) or self.build(name)
        is_long = self.us.get(name, case.us) >= LONG_US
        phase = "between profiles" if is_long else "before any profile"
        self.profile(case, phase)
        for _ in range(self.rounds if is_long else SHORT_PROFILES - 1):
            self.read(case, phase, clocks=is_long, profilers=True)
            self.profile(case, phase)

    def each(self, names: Sequence[str], step: Callable[[str], None], done: Callable[[], None]) -> None:
        for name in names:
            if time.monotonic() > self.deadline:
                self.problems.append(f"{name}: the budget was spent")
                continue
            begun = time.monotonic()
            with torch.inference_mode():
                self._try(name, lambda: step(name))  # noqa: B023
            self._try(f"{name}, clean up", lambda: _free(self.device))
            print(f"{step.__name__} {name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
            done()

    def node_us(self) -> float:
        """A graph node of the smallest kernel: whether a second context or a profiler changed the device's pace."""
        timer = prepared_timer(CASES["add-1"](self.device).sets(1), self.device)
        return median(timer.window(WINDOW_CALLS, WINDOW_MS))

    def fact(self, name: str, read: Callable[[], Any]) -> None:
        self.facts[name] = self._try(name, read)

    def _try(self, what: str, job: Callable[[], Any]) -> Any:
        try:
            return job()
        except Exception as error:  # noqa: BLE001 - the boundary of one tool on one kernel
            text = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if text not in self.problems:
                self.problems.append(text)
            return None


def _free(device: torch.device) -> None:
    gc.collect()
    _synchronize(device)
    torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
