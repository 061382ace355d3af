"""The second witness of a trial: a profiler beside the timer, in a worker where nothing is timed for evidence.

Owns what ran (kernels on CUDA, torch's operators on a CPU), their time, and who that makes the implementation.
What it must be seen by is `measure.promises`'s.
"""

from __future__ import annotations

from typing import Any

import torch

from kbench.catalog import Implementation
from kbench.clock.profiler import profile_kernels
from kbench.clock.timer import Timer
from kbench.measure.promises import OPERATOR, held

SHOWN = 8


def observed(facts: Implementation, resolved: str, names: tuple[str, ...], device_type: str) -> str:
    """`resolved` where what ran keeps its promises, else what ran instead; nothing is `unknown`.

    Empty where no promise could be judged.
    """
    if not names:
        return "unknown"
    problem = held(facts, names, device_type)
    if not problem:
        return "" if problem is None else resolved
    return problem if problem in names else names[0]


def host_operators(timer: Timer) -> tuple[str, ...]:
    """Operators that one round called, those with most time first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        timer.round()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_cpu_time_total)
    return tuple(row.key for row in rows if row.key.startswith(OPERATOR))


def cuda_facts(timer: Timer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Profiler time of the very calls that were timed, in the same rotation; and the kernels that ran.

    `profiler_us` leaves out the gaps between kernels and is to be compared with the undisturbed timer;
    `profiler_span_us` holds them, which profiling widens: its partner is the timer's reading of the same replay.
    """
    profile = profile_kernels(timer.witnessed, timer.round_calls, torch.device("cuda"))
    if profile is None:
        return {}, ()
    facts = {
        "profiler_us": profile.busy_us,
        "profiler_sum_us": profile.sum_us,
        "profiler_span_us": profile.span_us,
        f"{timer.name}_profiled_us": profile.timer_us,
        "kernels": list(profile.names[:SHOWN]),
        "kernels_per_call": profile.kernels,
    }
    return facts, profile.names
