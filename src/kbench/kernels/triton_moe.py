"""Mixture-of-experts layers in Triton: tiles, workspaces and launches.

Owns what is fixed before a call: grids for the most tiles that there could be, and workspaces. The host never learns
how many rows an expert has, so a call can be captured and replayed with other choices. Kernels: `kernels.moe_kernels`
and `kernels.tiled_gemm`, imported when the first instance is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.triton_gemm import FLOAT32, THIN, Tile, chain_of
from kbench.ops.base import Outputs

State = dict[str, Any]
WIDE = Tile(128, 128, 64, 8, 4)
SORT_BLOCK = 1_024
WIDTH_BLOCK = 1_024


@dataclass(frozen=True, slots=True)
class MoePlan:
    """Workspaces of one layer; `rows` is tokens · top_k."""

    tile: Tile
    weights: Tensor
    ids: Tensor
    source: Tensor
    place: Tensor
    offsets: Tensor
    gate_up: Tensor
    activated: Tensor
    parts: Tensor


class _Kernels:
    """Every implementation here has both modules of kernels at hand."""

    def __init__(self) -> None:
        from kbench.kernels import moe_kernels, tiled_gemm

        self._moe: Any = moe_kernels
        self._tiled: Any = tiled_gemm

    def convert(self, arguments: State) -> State:
        return arguments

    def _route(self, logits: Tensor, top_k: int, weights: Tensor, ids: Tensor) -> None:
        tokens, experts = logits.shape
        if tokens:
            self._moe._route[(tokens,)](
                logits,
                weights,
                ids,
                logits.stride(0),
                experts,
                PADDED=padded(experts),
                TOP_K=top_k,
                TOP_K_PADDED=padded(top_k),
                num_warps=1,
            )

    def _sort(
        self,
        ids: Tensor,
        expert_map: Tensor | None,
        experts: int,
        source: Tensor,
        place: Tensor | None,
        offsets: Tensor,
    ) -> None:
        self._moe._sort_by_expert[(experts,)](
            ids,
            ids if expert_map is None else expert_map,
            source,
            source if place is None else place,
            offsets,
            ids.numel(),
            experts,
            MAPPED=expert_map is not None,
            PLACED=place is not None,
            BLOCK=min(SORT_BLOCK, padded(ids.numel())),
            num_warps=4,
        )

    def _grouped(
        self, x: Tensor, weight: Tensor, offsets: Tensor, source: Tensor | None, gather: int, out: Tensor, tile: Tile
    ) -> None:
        """`gather` is top_k where row r of x is row source[r] // top_k, else 0."""
        experts, n, k = weight.shape
        rows = out.shape[0]
        if not rows:
            return
        self._tiled._grouped_tile[(-(-n // tile.n), most_tiles(rows, experts, tile.m))](
            x,
            weight,
            out,
            offsets,
            offsets if source is None else source,
            n,
            k,
            *x.stride(),
            *weight.stride(),
            out.stride(0),
            experts,
            EXPERTS_PADDED=padded(experts),
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
            GATHER=gather,
            CHAIN=chain_of(x.dtype),
            WHOLE_K=k % tile.k == 0,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


class TritonGrouped(_Kernels):
    """One GEMM an expert over sorted rows; rows that are nobody's are neither read nor written."""

    name = "triton-grouped"

    def plan(self, state: State) -> Tile:
        return choose_tile(state["x"].shape[0], state["weight"].shape[0], state["x"].dtype)

    def run(self, state: State, plan: Tile, out: Outputs) -> Tensor:
        self._grouped(state["x"], state["weight"], state["offsets"], None, 0, out[0], plan)
        return out[0]


class TritonRouter(_Kernels):
    name = "triton-router"

    def plan(self, state: State) -> None:
        return None

    def run(self, state: State, plan: None, out: Outputs) -> Outputs:
        self._route(state["logits"], state["top_k"], *out)
        return out


class TritonPermute(_Kernels):
    name = "triton-permute"

    def plan(self, state: State) -> None:
        return None

    def run(self, state: State, plan: None, out: Outputs) -> Outputs:
        x, ids, experts = state["x"], state["ids"], state["experts"]
        rows, offsets, source = out
        self._sort(ids, None, experts, source, None, offsets)
        width = x.shape[1]
        block = min(WIDTH_BLOCK, padded(width))
        if rows.numel():
            self._moe._gather_rows[(rows.shape[0], -(-width // block))](
                x, source, offsets, rows, width, x.stride(0), experts, TOP_K=ids.shape[1], BLOCK=block
            )
        return out


class TritonMoe(_Kernels):
    """The whole layer in six launches; the first grouped GEMM gathers its rows itself."""

    name = "triton-moe"

    def plan(self, state: State) -> MoePlan:
        x, gate_up = state["x"], state["gate_up"]
        (tokens, hidden), (experts, double, _) = x.shape, gate_up.shape
        top_k = state["top_k"]
        rows = tokens * top_k

        def integers(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=x.device)

        def values(width: int) -> Tensor:
            return torch.empty((rows, width), dtype=x.dtype, device=x.device)

        return MoePlan(
            tile=choose_tile(rows, state["logits"].shape[1], x.dtype),
            weights=torch.empty((tokens, top_k), dtype=torch.float32, device=x.device),
            ids=integers(rows),
            source=integers(rows),
            place=integers(rows),
            offsets=integers(experts + 1),
            gate_up=values(double),
            activated=values(double // 2),
            parts=values(hidden),
        )

    def run(self, state: State, plan: MoePlan, out: Outputs) -> Tensor:
        x, answer, top_k = state["x"], out[0], state["top_k"]
        experts, width = state["gate_up"].shape[0], plan.activated.shape[1]
        rows = plan.source.numel()
        if not rows:
            return answer
        self._route(state["logits"], top_k, plan.weights, plan.ids)
        self._sort(plan.ids, state["expert_map"], experts, plan.source, plan.place, plan.offsets)
        self._grouped(x, state["gate_up"], plan.offsets, plan.source, top_k, plan.gate_up, plan.tile)
        block = min(WIDTH_BLOCK, padded(width))
        self._moe._silu_mul[(rows, -(-width // block))](
            plan.gate_up, plan.activated, plan.offsets, width, experts, BLOCK=block
        )
        self._grouped(plan.activated, state["down"], plan.offsets, None, 0, plan.parts, plan.tile)
        block = min(WIDTH_BLOCK, padded(answer.shape[1]))
        self._moe._weighted_sum[(answer.shape[0], -(-answer.shape[1] // block))](
            plan.parts, plan.weights, plan.place, answer, answer.shape[1], answer.stride(0), TOP_K=top_k, BLOCK=block
        )
        return answer


def choose_tile(rows: int, experts: int, dtype: torch.dtype) -> Tile:
    """By the rows that an expert has on average: a tile that is much higher multiplies air."""
    average = rows / max(1, experts)
    tiles = FLOAT32 if dtype == torch.float32 else (*THIN, WIDE)
    return next((tile for tile in tiles if average <= tile.m), tiles[-1])


def most_tiles(rows: int, experts: int, height: int) -> int:
    """However rows are spread: every expert may leave one tile unfilled."""
    return rows // height + min(rows, experts)


def padded(size: int) -> int:
    """The next power of two, as Triton's blocks want it."""
    return 1 << max(0, size - 1).bit_length()
