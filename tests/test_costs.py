"""The worked figures that everyone quotes, as the cost model gives them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbench.catalog.costs import Roofline, attention_traffic, fusion, tile_efficiency, tile_fill

KB, MIB = 1_024, 1 << 20


def test_attention_of_one_head_at_4096() -> None:
    prefill = attention_traffic(4_096, 4_096, 128, 2)
    assert prefill.scores == 32 * MIB and prefill.naive == 96 * MIB and prefill.tiled == 2 * MIB
    assert prefill.naive / prefill.tiled == pytest.approx(48)
    decode = attention_traffic(1, 4_096, 128, 2)
    assert decode.scores == 8 * KB and decode.tiled == 2 * MIB


def test_a_fused_norm_over_80_layers() -> None:
    eager = fusion(8_192, 2, layers=80, launch_us=4.0, step_us=5_000.0)
    assert eager.bytes_per_position == 16 * KB and eager.round_trip_bytes == 32 * KB
    assert eager.launch_us == 320.0 and eager.share == pytest.approx(0.064)
    node = fusion(8_192, 2, layers=80, launch_us=0.87, step_us=5_000.0)
    assert node.launch_us == pytest.approx(69.6) and node.share == pytest.approx(0.0139, abs=1e-4)


def test_tiles_of_4000_and_4096() -> None:
    assert tile_efficiency(4_096, 4_096, 4_096) == 1.0
    assert tile_efficiency(4_000, 4_000, 4_000) == pytest.approx((4_000 / 4_096) ** 2 * (4_000 / 4_032))
    assert tile_fill(32) == 0.25 and tile_fill(128) == 1.0 and tile_fill(129) == pytest.approx(129 / 256)


def test_a_roofline_knows_its_side_of_the_crossover() -> None:
    # An H200 by its measured ceilings: 4,273 GB/s read, 800 TFLOP/s bf16: the crossover lies near 187 FLOPs a byte.
    decode = Roofline(flops=2 * 32 * 4_096 * 4_096, bytes=2 * (4_096 * 4_096), bytes_per_us=4.273e6, flops_per_us=8e8)
    assert decode.crossover == pytest.approx(187.2, abs=0.1) and decode.intensity == pytest.approx(32)
    assert decode.bound == "memory" and decode.floor_us == pytest.approx(7.85, abs=0.01)
    assert decode.headroom(9.0) == pytest.approx(0.128, abs=1e-3)
    square = Roofline(flops=2 * 4_096**3, bytes=3 * 2 * 4_096**2, bytes_per_us=4.273e6, flops_per_us=8e8)
    assert square.bound == "compute" and square.floor_us == pytest.approx(171.8, abs=0.1)


@given(st.integers(1, 10**15), st.integers(1, 10**12), st.floats(1e3, 1e9), st.floats(1e3, 1e12))
def test_nothing_is_below_either_ceiling(flops: int, size: int, bandwidth: float, rate: float) -> None:
    line = Roofline(flops, size, bandwidth, rate)
    assert line.floor_us >= size / bandwidth and line.floor_us >= flops / rate
    assert (line.bound == "memory") == (line.intensity < line.crossover)
