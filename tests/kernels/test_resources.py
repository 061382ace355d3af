"""Occupancy against published examples, and the look at what a call launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kbench.kernels.resources import Limits, occupancy, resources

VOLTA = Limits((7, 0), warps=64, registers=65_536, shared_bytes=98_304, blocks=32)
AMPERE_86 = Limits((8, 6), warps=48, registers=65_536, shared_bytes=102_400, blocks=16)
HOPPER = Limits((9, 0), warps=64, registers=65_536, shared_bytes=233_472, blocks=32)


@pytest.mark.parametrize(
    ("limits", "threads", "registers", "shared", "blocks", "share", "bound"),
    [
        # CUDA C++ Best Practices Guide, "Calculating Occupancy": 37 registers a thread on compute capability 7.0.
        (VOLTA, 128, 37, 0, 12, 0.75, "registers"),
        (VOLTA, 320, 37, 0, 4, 0.625, "registers"),
        # The same place: at most 32 registers a thread for full occupancy.
        (VOLTA, 256, 32, 0, 8, 1.0, "warps"),
        # S. Boehm, "How to Optimize a CUDA Matmul Kernel": 1,024 threads, 37 registers, 8 KiB on an RTX A6000.
        (AMPERE_86, 1_024, 37, 8_192, 1, 32 / 48, "warps"),
        # Hopper: 228 KiB hold two blocks of 113 KiB and their reserved KiB, and one of 227.
        (HOPPER, 128, 32, 113 * 1_024, 2, 8 / 64, "shared memory"),
        (HOPPER, 128, 32, 227 * 1_024, 1, 4 / 64, "shared memory"),
        (HOPPER, 32, 16, 0, 32, 0.5, "blocks"),
        (HOPPER, 256, 255, 0, 1, 8 / 64, "registers"),
        (HOPPER, 128, 0, 0, 16, 1.0, "warps"),
    ],
)
def test_occupancy_is_that_of_published_examples(
    limits: Limits, threads: int, registers: int, shared: int, blocks: int, share: float, bound: str
) -> None:
    found = occupancy(limits, threads, registers, shared)
    assert (found.blocks, found.share, found.bound) == (blocks, pytest.approx(share), bound)


def test_a_block_that_does_not_fit_has_none() -> None:
    assert occupancy(AMPERE_86, 128, 32, 102_400).share == 0.0


def test_each_kernel_that_a_call_launches_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    about = SimpleNamespace(shared=4_096, num_warps=4, warp_size=32)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(name=self.name, hash=self.name, n_regs=40, n_spills=2, metadata=about)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    monkeypatch.setattr("kbench.kernels.resources.device_limits", lambda: HOPPER)
    kernels = [object.__new__(jit.JITFunction) for _ in range(2)]
    for kernel, name in zip(kernels, ("first", "second"), strict=True):
        kernel.name = name
    calls = []

    def call() -> None:
        calls.append(1)
        for kernel in (*kernels, kernels[0]):
            jit.JITFunction.run(kernel)

    found = resources(call)
    assert [entry["kernel"] for entry in found] == ["first", "second"] and len(calls) == 2
    assert found[0] == {
        "kernel": "first",
        "registers": 40,
        "spills": 2,
        "shared_bytes": 4_096,
        "threads": 128,
        "occupancy": 0.75,
        "bound": "registers",
    }
    assert jit.JITFunction.run is run


def test_a_call_without_triton_tells_nothing() -> None:
    assert resources(lambda: None) == []
