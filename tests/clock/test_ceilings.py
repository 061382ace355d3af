from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kbench.clock.ceilings as module
from kbench.clock.ceilings import Ceilings, ceilings, load, measure

CPU = torch.device("cpu")


def made(**changes: object) -> Ceilings:
    fields = {
        "device": "it",
        "uuid": "1",
        "torch": "2",
        "threads": 0,
        "date": "2026-12-01",
        "cache_bytes": 1,
        "copy_bytes_per_us": 4_000.0,
        "read_bytes_per_us": 4_200.0,
        "write_bytes_per_us": 3_000.0,
        "gemm_flops_per_us": {"bfloat16": 800_000.0},
        "peak_bytes_per_us": 4_800.0,
        "peak_flops_per_us": {"bfloat16": 1_000_000.0},
    }
    return Ceilings.model_validate(fields | changes)


def test_it_is_measured_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def small(device: torch.device) -> Ceilings:
        measured.append(1)
        return measure(device, scale=0.001)

    monkeypatch.setattr(module, "measure", small)
    assert load(CPU, tmp_path / "cache") is None
    first = ceilings(CPU, tmp_path / "cache")
    assert ceilings(CPU, tmp_path / "cache") == first and measured == [1]
    assert first.torch == torch.__version__ and first.uuid.startswith("cpu-") and first.threads == 1
    rates = (
        first.copy_bytes_per_us,
        first.read_bytes_per_us,
        first.write_bytes_per_us,
        *first.gemm_flops_per_us.values(),
    )
    assert min(rates) > 0 and {"float32", "bfloat16"} <= first.gemm_flops_per_us.keys()
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text("{}")
    assert ceilings(CPU, tmp_path / "cache").uuid == first.uuid and measured == [1, 1]


def test_other_threads_are_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", lambda _: made())
    ceilings(CPU, tmp_path)
    assert load(CPU, tmp_path) is not None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert load(CPU, tmp_path) is None


def test_only_above_the_physical_peak_is_impossible() -> None:
    it = made()
    assert not it.impossible(1.0, bytes_moved=4_500.0), "above what was measured is news, not an error"
    assert it.impossible(1.0, bytes_moved=4_900.0)
    assert it.impossible(1.0, flops=1.1e6, dtype="bfloat16")
    assert not it.impossible(1.0, flops=1.1e6, dtype="float8"), "unknown peaks accuse nobody"
    assert it.impossible(0.0) and it.impossible(-1.0)
    assert not made(peak_bytes_per_us=0.0).impossible(1.0, bytes_moved=1e12)


def test_the_roofline_takes_the_ceiling_of_the_kind_of_traffic() -> None:
    it = made()

    def time_us(read: float, written: float, flops: float = 0.0) -> float:
        return it.roofline_us(bytes_read=read, bytes_written=written, flops=flops, dtype="bfloat16")

    assert time_us(4_200.0, 0.0) == pytest.approx(1.0)
    assert time_us(2_000.0, 2_000.0) == pytest.approx(1.0)
    assert time_us(0.0, 3_000.0) == pytest.approx(1.0)
    assert time_us(4_200.0, 0.0, 8e6) == pytest.approx(10.0)
