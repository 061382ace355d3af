"""What a step really ran: torch operators and Triton launches by the part of the step, and kernels on the device.

Owns the counting pass, which runs after everything that is timed. Parts are told apart in a step that is launched
kernel by kernel; where steps are replayed, the kernels are those of one more step, a replay. Operators that call
others, views and allocations launch nothing and are left out. On a device the number of launches is that of its kernels
and copies.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from kbench.catalog import Implementation
from kbench.engine.phases import NullClock, Phases
from kbench.engine.runner import Runner
from kbench.kernels.base import Attention
from kbench.measure.promises import held, promises
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

_PART = "kbench.part "
_NAMES = """
alias as_strided chunk detach empty empty_like empty_strided expand flatten is_nonzero item _local_scalar_dense
lift_fresh narrow new_empty permute _reshape_alias reshape resize_ resolve_conj resolve_neg select set_ slice split
split_with_sizes squeeze t to transpose unbind unflatten unsafe_split unsqueeze view _unsafe_view view_as
"""
_LAUNCHES_NOTHING = frozenset(f"aten::{name}" for name in _NAMES.split())


class Observation:
    """Names that were launched, by part: a phase name, or `attention.decode` and `attention.prefill`."""

    def __init__(self) -> None:
        self.part = "other"
        self.kernels: Counter[str] = Counter()
        """What ran on the device, by name; empty on the CPU."""
        self.launched: dict[str, Counter[str]] = {}
        self.called: dict[str, set[str]] = {}
        """Every operator, those that call others too, by part."""

    def saw(self, name: str) -> None:
        self.launched.setdefault(self.part, Counter())[name] += 1

    @property
    def launches(self) -> int:
        return sum(self.kernels.values()) or sum(sum(names.values()) for names in self.launched.values())

    def names(self, part: str) -> list[str]:
        return sorted(self.launched.get(part, ()))

    def inside(self, part: str) -> _Inside:
        return _Inside(self, part)


class _Inside:
    """While entered, launches belong to `part`; may be entered again and again, as a phase is."""

    def __init__(self, seen: Observation, part: str) -> None:
        self._seen = seen
        self._part = part
        self._before: list[tuple[str, record_function]] = []

    def __enter__(self) -> None:
        mark = record_function(_PART + self._part)
        mark.__enter__()  # type: ignore[no-untyped-call]
        self._before.append((self._seen.part, mark))
        self._seen.part = self._part

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._seen.part, mark = self._before.pop()
        mark.__exit__(kind, error, at)


def _collect(profiler: profile, seen: Observation) -> None:
    """Add every operator that calls no other under the innermost part around it, and what ran on the device."""
    for event in profiler.events() or ():  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA":
            if not getattr(event, "is_user_annotation", False):
                seen.kernels[event.name] += 1
            continue
        if not event.name.startswith("aten::") or event.name in _LAUNCHES_NOTHING:
            continue
        around = event.cpu_parent
        while around is not None and not around.name.startswith(_PART):
            around = around.cpu_parent
        seen.part = around.name.removeprefix(_PART) if around is not None else "other"
        seen.called.setdefault(seen.part, set()).add(event.name)
        if any(child.name.startswith("aten::") and child.name not in _LAUNCHES_NOTHING for child in event.cpu_children):
            continue
        seen.saw(event.name)


class _PartClock:
    """A phase clock that tells the observation which phase runs."""

    def __init__(self, seen: Observation) -> None:
        self._seen = seen

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return self._seen.inside(name)


class _Watched:
    """An implementation whose `run` is told apart from the other phase's."""

    def __init__(self, inner: Attention, part: str, seen: Observation) -> None:
        self._inner = inner
        self._part = part
        self._seen = seen
        self.name = inner.name

    def convert(self, kv: PagedKV) -> PagedKV:
        return self._inner.convert(kv)

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> object:
        return self._inner.plan(batch, spec, kv)

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        with self._seen.inside(self._part):
            return self._inner.run(q, kv, plan, out)


def observe(runner: Runner, restore: Callable[[], object], step: Callable[[Phases], object]) -> Observation:
    """Run `step` and say what it launched; `restore` comes before and is not counted. Implementations are kept."""
    seen = Observation()
    decode, prefill = runner.attention
    runner.use(_Watched(decode, "attention.decode", seen), _Watched(prefill, "attention.prefill", seen))
    try:
        restore()
        step(NullClock())
        restore()
        runner.idle()
        seen.launched.clear()
        seen.called.clear()
        activities = [ProfilerActivity.CPU]
        if runner.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with _triton_launches(seen), profile(activities=activities, acc_events=True) as profiler:
            step(_PartClock(seen))
            runner.idle()
    finally:
        runner.use(decode, prefill)
    _collect(profiler, seen)
    if runner.graphs is not None and runner.graphs.mode == "graph":
        seen.kernels = _replayed(runner, restore, step)
    return seen


def _replayed(runner: Runner, restore: Callable[[], object], step: Callable[[Phases], object]) -> Counter[str]:
    """Kernels and copies of one step as it is taken without anybody looking on."""
    restore()
    step(NullClock())
    restore()
    runner.idle()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        step(NullClock())
        runner.idle()
    again = Observation()
    _collect(profiler, again)
    return again.kernels


def observed_name(
    resolved: str, op: str, facts: Implementation | None, seen: Observation, later: Observation | None = None
) -> str:
    """The name that what ran answers to, and what was seen instead where it is not `resolved`'s.

    Empty where the step did not need this op, or where nothing tells `resolved` from others. `facts`: what it promises
    of the names that it is seen by. `later`: the same step after many others.
    """
    names = seen.names(op)
    if not names:
        return ""
    if later is not None and later.names(op) != names:
        return f"not the same throughout: first {_few(names)}, later {_few(later.names(op))}"
    device = "cuda" if seen.kernels else "cpu"
    if facts is None or not promises(facts, device):
        return ""
    kept = [seen] if later is None else [seen, later]
    said = [held(facts, [*one.names(op), *sorted(one.called.get(op, ()))], device, tuple(one.kernels)) for one in kept]
    problem = next((text for text in said if text), "")
    if problem:
        return f"not what it promises: {problem}"
    return "" if None in said else resolved


def _few(names: list[str]) -> str:
    return ", ".join(names[:4])


@contextmanager
def _triton_launches(seen: Observation) -> Iterator[None]:
    """Count launches of Triton kernels, which torch's dispatcher does not see. Only where Triton is in use."""
    knobs = sys.modules.get("triton.knobs")
    hook: Any = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
    if not hasattr(hook, "add") or not torch.cuda.is_available():
        yield
        return

    def launched(metadata: Any) -> None:
        facts = metadata.get() if hasattr(metadata, "data") else metadata  # a LazyDict, whose get takes no key
        seen.saw(str(facts["name"]) if isinstance(facts, dict) else "triton")

    hook.add(launched)
    try:
        yield
    finally:
        hook.remove(launched)
