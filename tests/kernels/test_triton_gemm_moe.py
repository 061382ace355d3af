"""What is chosen by shape; the kernels in Triton's interpreter where it is installed, on devices in tests/gpu."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kbench.kernels.triton_gemm import BLOCKS_PER_SPLIT, MAX_SPLITS, choose_splits, choose_tile, tiles_of
from kbench.kernels.triton_moe import choose_tile as choose_grouped
from kbench.kernels.triton_moe import most_tiles, padded


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64, 65, 4_096])
def test_a_thin_product_gets_the_lowest_tile_that_holds_it(rows: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tile = choose_tile(rows, 4_096, dtype, 132)
        assert tile.m >= min(rows, 64) and tile.m <= max(16, 2 * rows)


def test_a_large_product_gets_the_largest_tile_that_leaves_nobody_idle() -> None:
    assert choose_tile(4_096, 4_096, torch.bfloat16, 132).n == 256
    assert choose_tile(2_048, 2_048, torch.bfloat16, 132).n == 128
    assert choose_tile(1_024, 1_024, torch.bfloat16, 132).m == 64
    tile = choose_tile(256, 28_672, torch.bfloat16, 132)
    assert tiles_of(256, 28_672, tile) >= 132


def test_splits_fill_the_device_without_becoming_tiny() -> None:
    assert choose_splits(tiles=64, blocks=32, count=132) == 4
    assert choose_splits(tiles=64, blocks=4, count=132) == 1
    assert choose_splits(tiles=1_000, blocks=32, count=132) == 1
    assert choose_splits(tiles=1, blocks=10_000, count=132) == MAX_SPLITS
    assert choose_splits(tiles=1, blocks=2 * BLOCKS_PER_SPLIT, count=132) == 2


def test_tiles_of_experts_follow_their_average_load() -> None:
    assert choose_grouped(8, 128, torch.bfloat16).m == 16
    assert choose_grouped(2_048 * 8, 128, torch.bfloat16).m == 128
    assert choose_grouped(1, 0, torch.float32).m == 16


@pytest.mark.parametrize("height", [16, 128])
def test_no_spread_of_rows_needs_more_tiles_than_the_grid_has(height: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 5, 300):
        for experts in (1, 7, 64):
            for _ in range(20):
                loads = torch.randint(experts, (rows,), generator=generator).bincount(minlength=experts)
                assert int((-(-loads // height)).sum()) <= most_tiles(rows, experts, height)


def test_blocks_are_powers_of_two() -> None:
    assert [padded(size) for size in (0, 1, 2, 3, 8, 9, 384)] == [1, 1, 2, 4, 8, 16, 512]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_are_right_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when triton is first imported."""
    script = Path(__file__).with_name("interpret_gemm_moe.py")
    environment = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
