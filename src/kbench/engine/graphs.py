"""Captured CUDA graphs of whole steps, from the embedding to the greedy token, in one memory pool.

Owns capture, replay and what stands in for both where there is no CUDA device: there the same padded step is launched
kernel by kernel, so that padding can be tested and measured, and is never called a graph. It does not choose sizes
(`engine.ladder`) and does not know what a step computes: a callable does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from kbench.engine.ladder import StepMode

Body = Callable[[], Tensor]
"""Launches everything on static buffers; returns the tokens, one a row."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph and the tokens that its replay fills. `keeps` are objects whose identity is part of the key."""

    graph: torch.cuda.CUDAGraph | None
    body: Body
    """Run in place of the graph where there is none."""
    tokens: Tensor | None
    keeps: tuple[object, ...]
    refusal: str = ""
    """Why the capture failed; such a size is launched eagerly from then on."""


class StepGraphs:
    """Graphs by key. Each is captured when it is first asked for, or by `capture` ahead of time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._found: dict[Hashable, Captured] = {}
        self.frozen = False
        """Nothing is captured any more: a size that is not there yet is refused."""
        self.captures = 0
        self.capture_ns = 0

    @property
    def mode(self) -> StepMode:
        """How a padded step is computed here."""
        return "graph" if self._device.type == "cuda" else "padded"

    def clear(self) -> None:
        """Drop all graphs: the buffers that they read have moved.

        The allocator gives up a pool with its last graph and refuses to capture into it again, so the next graph begins
        a new one.
        """
        if self._found and self.mode == "graph":
            torch.cuda.synchronize(self._device)
        self._found.clear()
        self._pool = None

    def ready(self, key: Hashable, body: Body, keeps: tuple[object, ...], sampled: Tensor) -> str:
        """Have a graph for the key; why there is none, or an empty string.

        The inputs of a real step must be on the device: the body runs once on them before it is captured, so that
        kernels are compiled and libraries have chosen. `sampled`: what the body reads and overwrites, put back.
        """
        found = self._found.get(key)
        if found is None:
            if self.frozen:
                return "its size was not captured beforehand"
            begin = perf_counter_ns()
            kept = sampled.clone()
            found = self._capture(body, keeps) if self.mode == "graph" else Captured(None, body, None, keeps)
            self._found[key] = found
            sampled.copy_(kept)
            self.captures += 1
            self.capture_ns += perf_counter_ns() - begin
        return found.refusal

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a graph for the key that can be replayed."""
        found = self._found.get(key)
        return found is not None and not found.refusal

    def run(self, key: Hashable) -> Tensor:
        """Replay; the tokens are overwritten by the next replay of this key."""
        found = self._found[key]
        if found.graph is None or found.tokens is None:
            return found.body()
        found.graph.replay()
        return found.tokens

    def _capture(self, body: Body, keeps: tuple[object, ...]) -> Captured:
        if self._pool is None or self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        collects = gc.isenabled()
        gc.disable()  # what is freed while a stream records might ask the device, which must not be asked then
        try:
            with torch.cuda.stream(stream):
                body()
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                try:
                    tokens = self._record(graph, body)
                except RuntimeError as error:  # NotImplementedError is one, and so are CUDA's
                    torch.cuda.synchronize(self._device)
                    return Captured(None, body, None, keeps, f"capture failed: {' '.join(str(error).split())[:200]}")
        finally:
            current.wait_stream(stream)
            if collects:
                gc.enable()
        return Captured(graph, body, tokens, keeps)

    def _record(self, graph: torch.cuda.CUDAGraph, body: Body) -> Tensor:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        whole = False
        try:
            tokens = body()
            whole = True
        finally:
            # Whatever ended the body, Ctrl-C too, the stream must stop recording; that error is the one to tell.
            with nullcontext() if whole else suppress(RuntimeError):
                graph.capture_end()
        return tokens
