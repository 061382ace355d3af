"""Matrix products in Triton: which tiles, how many splits, and the launch.

Owns the heuristics, which look at the shape and the number of multiprocessors and try nothing out, so that a first call
costs a compilation and no search. The kernels are in `kernels.tiled_gemm`, imported when the first instance is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.ops.base import Outputs

MAX_SPLITS = 16
BLOCKS_PER_SPLIT = 4
"""Blocks of k that a split must have at least, or adding the splits up costs more than it saves."""
WAVES = 2
"""Programs a multiprocessor that a thin product is split into: enough loads in flight to saturate memory."""
ADD_BLOCK = 1_024
FLOAT32_CHAIN = 2
"""Blocks of 32 that float32 sums go over in a row: the error grows with the root of the chain."""


@dataclass(frozen=True, slots=True)
class Tile:
    m: int
    n: int
    k: int
    warps: int
    stages: int


FLOAT32 = (Tile(16, 64, 32, 4, 3), Tile(32, 64, 32, 4, 3), Tile(64, 64, 32, 4, 2))
THIN = (Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3))
LARGE = (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4))
"""Largest first. Three stages of the largest hold 144 KiB of shared memory, of 227 on an H200."""


@dataclass(frozen=True, slots=True)
class GemmPlan:
    tile: Tile
    splits: int
    parts: Tensor
    """float32 `[splits, m, n]`; one element where there is one split."""


class TritonGemm:
    """x · weightᵀ on CUDA in any storage order: float32 (no TF32), float16, bfloat16; sums in float32."""

    name = "triton-gemm"

    def __init__(self) -> None:
        from kbench.kernels import tiled_gemm

        self._kernel: Any = tiled_gemm._gemm_tile
        self._add: Any = tiled_gemm._add_splits

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    def plan(self, state: dict[str, Any]) -> GemmPlan:
        x, weight = state["x"], state["weight"]
        (m, k), n = x.shape, weight.shape[0]
        count = multiprocessors(x.device)
        tile = choose_tile(m, n, x.dtype, count)
        splits = choose_splits(tiles_of(m, n, tile), -(-k // tile.k), count)
        parts = torch.empty((splits, m, n) if splits > 1 else (1,), dtype=torch.float32, device=x.device)
        return GemmPlan(tile, splits, parts)

    def run(self, state: dict[str, Any], plan: GemmPlan, out: Outputs) -> Tensor:
        x, weight, answer, tile = state["x"], state["weight"], out[0], plan.tile
        (m, k), n = x.shape, weight.shape[0]
        if not m or not n:
            return answer
        self._kernel[(tiles_of(m, n, tile), plan.splits)](
            x,
            weight,
            answer,
            plan.parts,
            m,
            n,
            k,
            *x.stride(),
            *weight.stride(),
            answer.stride(0),
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
            GROUP=8,
            SPLITS=plan.splits,
            CHAIN=chain_of(x.dtype),
            WHOLE_K=k % tile.k == 0,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if plan.splits > 1:
            grid = (-(-m * n // ADD_BLOCK),)
            self._add[grid](
                plan.parts, answer, n, answer.stride(0), m * n, SPLITS=plan.splits, BLOCK=ADD_BLOCK, num_warps=4
            )
        return answer


def choose_tile(rows: int, n: int, dtype: torch.dtype, count: int) -> Tile:
    """Up to 64 rows: the lowest tile that holds them. More: the largest tile that still gives everyone work."""
    if rows <= 64 or dtype == torch.float32:
        tiles = FLOAT32 if dtype == torch.float32 else THIN
        return next((tile for tile in tiles if rows <= tile.m), tiles[-1])
    return next((tile for tile in LARGE if tiles_of(rows, n, tile) >= count), LARGE[-1])


def choose_splits(tiles: int, blocks: int, count: int) -> int:
    """A power of two: up to `WAVES` programs a multiprocessor, none with less than `BLOCKS_PER_SPLIT` blocks of k."""
    splits = 1
    while splits * 2 <= MAX_SPLITS and tiles * splits * 2 <= WAVES * count and splits * 2 * BLOCKS_PER_SPLIT <= blocks:
        splits *= 2
    return splits


def chain_of(dtype: torch.dtype) -> int:
    return FLOAT32_CHAIN if dtype == torch.float32 else 0


def tiles_of(m: int, n: int, tile: Tile) -> int:
    return -(-m // tile.m) * -(-n // tile.n)


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter: one program after another
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
