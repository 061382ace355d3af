"""Whether the clock is still the one that was bound before any code under test was loaded.

Owns the list of what measuring relies on, taken when this module is imported. Timers call what they imported, so most
replacements would not even reach them; that someone made one is what is to be known. A process that imports this module
after a plug-in learns nothing from it.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

import kbench.clock.cuda as cuda
import kbench.clock.flush as flush
import kbench.clock.profiler as profiler
import kbench.clock.timer as timer
import kbench.clock.wall as wall


@dataclass(frozen=True, slots=True)
class Binding:
    """A name in an owner, and the object that it stood for."""

    owner: Any
    name: str
    bound: Any

    @classmethod
    def of(cls, owner: Any, name: str) -> Binding:
        return cls(owner, name, inspect.getattr_static(owner, name, _ABSENT))

    @property
    def replaced(self) -> bool:
        return inspect.getattr_static(self.owner, self.name, _ABSENT) is not self.bound

    def __str__(self) -> str:
        module = "" if inspect.ismodule(self.owner) else f"{getattr(self.owner, '__module__', '')}."
        owner = getattr(self.owner, "__qualname__", getattr(self.owner, "__name__", repr(self.owner)))
        return f"{module}{owner}.{self.name}"


_ABSENT = object()


def _watched() -> Iterable[tuple[Any, str]]:
    for name in ("perf_counter_ns", "perf_counter", "monotonic_ns", "monotonic", "time_ns", "time"):
        yield time, name
    for name in ("median", "mean"):
        yield statistics, name
    for name in ("Event", "CUDAGraph", "graph", "Stream", "synchronize", "current_stream", "_sleep"):
        yield torch.cuda, name
    for name in ("elapsed_time", "record", "query", "synchronize", "wait"):
        yield torch.cuda.Event, name
    for name in ("capture_begin", "capture_end", "replay"):
        yield torch.cuda.CUDAGraph, name
    for name in ("equal", "Tensor"):
        yield torch, name
    for name in ("clone", "copy_", "fill_"):
        yield torch.Tensor, name
    yield torch.profiler, "profile"
    for module in (cuda, flush, wall, profiler, timer):
        own = [name for name, value in vars(module).items() if callable(value) and not name.startswith("__")]
        yield from ((module, name) for name in own)
    for kind in (cuda.GraphTimer, cuda.EventTimer, flush.FlushTimer, wall.WallTimer, profiler.ProfilerTimer):
        yield from ((kind, name) for name in vars(kind) if not name.startswith("__"))


_BOUND = tuple(Binding.of(owner, name) for owner, name in _watched())


def unpatched(bindings: Iterable[Binding] = _BOUND) -> list[str]:
    """Names of what was replaced since this module was imported; empty where the clock is whole."""
    return [str(binding) for binding in bindings if binding.replaced]
