"""What a trial has ready for its windows, and what it read in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kbench.clock.cache import CacheState
from kbench.clock.ceilings import peak_flops_per_us
from kbench.clock.device import peak_bytes_per_us
from kbench.clock.timer import Timer
from kbench.measure.answers import TimedCall, Watch
from kbench.ops.base import Cost


@dataclass(slots=True)
class Timed:
    """What `prepare` leaves for the windows."""

    timer: Timer
    calls: list[TimedCall]
    cost: Cost
    streamed: int
    """Bytes of a call that serving finds cold."""
    cache: CacheState
    before: tuple[int, ...]
    watch: Watch
    latencies_us: list[float] = field(default_factory=list)
    clocks: list[dict[str, Any]] = field(default_factory=list)

    def impossible(self, latency_us: float, dtype: str) -> bool:
        """Above the *physical* peak: of memory for bytes that were verified cold, of arithmetic in any state."""
        device = torch.device("cuda")
        peak_bytes = peak_bytes_per_us(device)
        peak_flops = peak_flops_per_us(device).get(dtype)
        cold = self.cost.bytes if self.cache.label in ("cold", "flush") else 0
        if self.cache.label == "serving":
            cold = self.streamed
        too_many = peak_bytes is not None and cold / latency_us > peak_bytes
        return too_many or (peak_flops is not None and self.cost.flops / latency_us > peak_flops)


def summary(clocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Lowest and highest of each sensor over the windows, and every throttle reason that was seen."""
    summary: dict[str, Any] = {}
    for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c"):
        values = [state[name] for state in clocks if name in state]
        if values:
            summary[name] = [min(values), max(values)]
    summary["throttle"] = sorted({reason for state in clocks for reason in state.get("throttle", ())})
    return summary
