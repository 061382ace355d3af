"""Work that goes on after the timer thinks that a call ended.

Two witnesses. On CUDA, the wall: events on the calling stream say when the call's work ended there, then the whole
device is synchronised; what that still has to wait for ran elsewhere (`device_escape`). Anywhere, the answer: outputs
are copied right when a call returns and compared once everything came to rest; what changed in between was filled by
someone else (`LateOutputs`). When all threads of a process are idle cannot be known, so on a CPU there is no wall.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, equal
from torch.cuda import Event, _sleep, synchronize

from kbench.clock.timer import Call

CALLS = 20
REPEATS = 5
TAIL_FLOOR_US = 20.0
"""What a synchronisation may take longer than around nothing, for the host's reasons."""
TAIL_SHARE = 0.05
"""Of the time that the calls took on their stream."""
BLOCK_US = 1_000.0
CYCLES_PER_US = 2_000


@dataclass(frozen=True, slots=True)
class Escape:
    """What a sample of calls left running."""

    calls: int
    stream_us: float
    """All calls, by events on the calling stream."""
    wall_us: float
    """All calls, from the first launch until the whole device was idle."""
    tail_us: float
    """From the end of the calling stream's work until the whole device was idle: the shortest of the repeats."""
    idle_tail_us: float
    """The same around nothing."""

    @property
    def escaped(self) -> bool:
        return escaped(self.tail_us, self.idle_tail_us, self.stream_us)

    @property
    def flags(self) -> tuple[str, ...]:
        return ("ASYNC_ESCAPE",) if self.escaped else ()


def escaped(tail_us: float, idle_tail_us: float, stream_us: float) -> bool:
    return tail_us - idle_tail_us > max(TAIL_FLOOR_US, TAIL_SHARE * stream_us)


def device_escape(call: Call, device: torch.device, calls: int = CALLS, repeats: int = REPEATS) -> Escape:
    """Make `calls` calls on a CUDA device, several times; the most telling of two ways counts.

    Once with the calling stream free, where work on a stream that does not wait for it comes out; once with it blocked
    until all calls are queued, where work that does wait piles up behind it, however short each piece is. Synchronises
    the device; no window may be open.
    """
    for _ in range(2):
        call()
    found = []
    for block_us in (0.0, BLOCK_US):
        idle = min(_run(lambda: None, device, calls, block_us) for _ in range(repeats))
        tail, stream, wall = min(_run(call, device, calls, block_us) for _ in range(repeats))
        found.append(Escape(calls, stream, wall, tail, idle[0]))
    return max(found, key=lambda escape: escape.tail_us - escape.idle_tail_us)


def _run(call: Call, device: torch.device, calls: int, block_us: float) -> tuple[float, float, float]:
    """Tail, stream and wall time of `calls` calls in µs; the block is in the wall alone."""
    begin, end = Event(enable_timing=True), Event(enable_timing=True)
    synchronize(device)
    start = perf_counter_ns()
    if block_us:
        _sleep(int(block_us * CYCLES_PER_US))
    begin.record()
    held = [call() for _ in range(calls)]
    end.record()
    end.synchronize()
    streamed = perf_counter_ns()
    synchronize(device)
    idle = perf_counter_ns()
    del held
    return (idle - streamed) / 1_000, float(begin.elapsed_time(end)) * 1_000, (idle - start) / 1_000


class LateOutputs:
    """Copies of outputs, taken when their call returned, and what became of the outputs since.

    Poison the outputs, call, `take` at once. No call may write the same outputs again before `changed` is asked.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[Tensor, Tensor]] = []

    def take(self, answer: object) -> None:
        """On CUDA the copy is queued on the calling stream, right behind the call's own work there."""
        self._taken += [(tensor, tensor.detach().clone()) for tensor in _tensors(answer)]

    def changed(self) -> tuple[int, ...]:
        """Which of the outputs, in the order taken, hold other bytes than when their call returned."""
        for device in {live.device for live, _ in self._taken if live.is_cuda}:
            synchronize(device)
        return tuple(index for index, (live, copy) in enumerate(self._taken) if not same_bytes(live, copy))


def late_output(
    call: Call, poison: Callable[[], object], come_to_rest: Callable[[], object], *, block: bool = False
) -> bool:
    """Whether one call's output was still being written when it returned.

    `poison` overwrites the output before; `come_to_rest` waits, in whatever way the caller can, for work that may be
    left (on CUDA the device is synchronised besides). `block` holds the calling stream for a millisecond first: work
    that left for a stream which waits for it then starts together with the copy, however short it is. Ask both ways.
    """
    poison()
    if block:
        _sleep(int(BLOCK_US * CYCLES_PER_US))
    watch = LateOutputs()
    watch.take(call())
    come_to_rest()
    return bool(watch.changed())


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Bytes, not values: a NaN equals itself, and −0 is not 0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return equal(one.detach().contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _tensors(answer: object) -> Iterable[Tensor]:
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, list | tuple):
        for part in _parts(answer):
            yield from _tensors(part)
    elif isinstance(answer, dict):
        yield from _tensors(list(answer.values()))


def _parts(answer: Any) -> list[Any]:
    return list(answer)
