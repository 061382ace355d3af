"""What goes on around a session: other processes on the host, the devices and their memory errors.

Owns the reading, before and after, from the parent, which holds no GPU. It says nothing of either arm and judges
nothing: which readings void a session is the rule's business (`decide.voids`).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

_IDLE = ("idle", "iowait", "guest", "guest_nice")  # guest time is in user time already


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the host."""

    wall_s: float
    busy_s: float
    """Of all cores since boot: what everybody on this host took, and what its hypervisor kept."""
    own_s: float
    """Of this process and of its children that have ended."""
    gpus: int | None
    ecc_uncorrected: int | None


def read(device: str) -> Reading:
    """The present state; devices are asked only where the session runs on them."""
    import psutil

    times = psutil.cpu_times()._asdict()
    own = os.times()
    gpus, errors = _devices() if device == "cuda" else (None, None)
    return Reading(
        wall_s=time.monotonic(),
        busy_s=sum(value for name, value in times.items() if name not in _IDLE),
        own_s=own.user + own.system + own.children_user + own.children_system,
        gpus=gpus,
        ecc_uncorrected=errors,
    )


def between(before: Reading, after: Reading) -> dict[str, Any]:
    """What a session's mark keeps. Read `after` when the workers have ended: only then is their time our own."""
    found: dict[str, Any] = {}
    wall_s = after.wall_s - before.wall_s
    if wall_s > 0.0:
        foreign_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
        share = foreign_s / (wall_s * len(os.sched_getaffinity(0)))
        found["foreign_cpu_share"] = round(min(1.0, max(0.0, share)), 4)
    for name in ("gpus", "ecc_uncorrected"):
        pair = [getattr(before, name), getattr(after, name)]
        if None not in pair:
            found[name] = pair
    return found


def _devices() -> tuple[int | None, int | None]:
    from kbench.env import gpus

    found = gpus()
    errors = [gpu["ecc_uncorrected"] for gpu in found]
    return len(found), None if None in errors else sum(errors)
