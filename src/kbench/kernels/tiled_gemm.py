"""Triton kernels of matrix products: one product in tiles, and one for each expert in tiles of its rows.

Imports Triton, and whoever imports this pays for it. Tiles are chosen by `kernels.triton_gemm` and
`kernels.triton_moe`; the kernels do not know a device.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# triton may not be installed where types are checked, and its compiler resolves annotations of arguments.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dot_along_k(
    a,
    b,
    first,
    last,
    K,
    stride_ak,
    stride_bk,
    rows,
    columns,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHAIN: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """float32 `[BM, BN]` over blocks `first` to `last` of k. `a`, `b` point at each row's and each column's k = 0.

    With CHAIN > 0, only so many blocks are added up in a row before their sum joins the total: float32 products have no
    tensor cores that would hide the rounding of one long chain.
    """
    total = tl.zeros((BM, BN), dtype=tl.float32)
    inner = tl.arange(0, BK)
    a_at = a[:, None] + (first * BK + inner[None, :]) * stride_ak
    b_at = b[None, :] + (first * BK + inner[:, None]) * stride_bk
    if CHAIN == 0:
        for block in range(first, last):
            if WHOLE_K:
                left = tl.load(a_at, mask=rows[:, None], other=0.0)
                right = tl.load(b_at, mask=columns[None, :], other=0.0)
            else:
                here = block * BK + inner < K
                left = tl.load(a_at, mask=rows[:, None] & here[None, :], other=0.0)
                right = tl.load(b_at, mask=columns[None, :] & here[:, None], other=0.0)
            total = tl.dot(left, right, total)
            a_at += BK * stride_ak
            b_at += BK * stride_bk
    else:
        for block in range(first, last, CHAIN):
            part = tl.zeros((BM, BN), dtype=tl.float32)
            for step in tl.static_range(CHAIN):
                here = (block + step) * BK + inner < K
                left = tl.load(a_at, mask=rows[:, None] & here[None, :], other=0.0)
                right = tl.load(b_at, mask=columns[None, :] & here[:, None], other=0.0)
                part = tl.dot(left, right, part, input_precision="ieee")
                a_at += BK * stride_ak
                b_at += BK * stride_bk
            total += part
    return total


@triton.jit
def _gemm_tile(
    x,
    weight,
    out,
    parts,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_om,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAIN: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """One tile of x · weightᵀ; of several splits along k each leaves its float32 sums in `parts` `[SPLITS, M, N]`."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    # Programs that run together work on GROUP rows of tiles: their operands are then still in the L2.
    band = tile // (GROUP * tiles_n)
    height = min(tiles_m - band * GROUP, GROUP)
    tile_m = band * GROUP + (tile % (GROUP * tiles_n)) % height
    tile_n = (tile % (GROUP * tiles_n)) // height
    row = (tile_m * BM + tl.arange(0, BM)).to(tl.int64)
    column = (tile_n * BN + tl.arange(0, BN)).to(tl.int64)
    blocks = tl.cdiv(K, BK)
    each = tl.cdiv(blocks, SPLITS)
    if CHAIN > 0:
        each = tl.cdiv(each, CHAIN) * CHAIN  # no chain may reach into the next split
    first = split * each
    total = _dot_along_k(
        x + row * stride_xm,
        weight + column * stride_wn,
        first,
        min(first + each, blocks),
        K,
        stride_xk,
        stride_wk,
        row < M,
        column < N,
        BM,
        BN,
        BK,
        CHAIN,
        WHOLE_K,
    )
    inside = (row < M)[:, None] & (column < N)[None, :]
    if SPLITS == 1:
        tl.store(out + row[:, None] * stride_om + column[None, :], total.to(out.dtype.element_ty), mask=inside)
    else:
        place = (split * M + row[:, None]) * N + column[None, :]
        tl.store(parts + place, total, mask=inside)


@triton.jit
def _add_splits(parts, out, N, stride_om, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of `parts` over its splits; `size` is M · N."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size + at, mask=inside, other=0.0)
    tl.store(out + (at // N) * stride_om + at % N, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_tile(
    x,
    weight,
    out,
    offsets,
    source,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    stride_om,
    experts,
    EXPERTS_PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATHER: tl.constexpr,
    CHAIN: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """One tile of rows of one expert. Which expert that is, the program finds in `offsets`: the host does not know.

    There are as many programs as there could be tiles; those without one end at once. With GATHER > 0, row r of x is
    row source[r] // GATHER of a smaller x.
    """
    tile = tl.program_id(1)
    expert = tl.arange(0, EXPERTS_PADDED)
    known = expert < experts
    starts = tl.load(offsets + expert, mask=known, other=0)
    stops = tl.load(offsets + expert + 1, mask=known, other=0)
    tiles = (stops - starts + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    if tile < tl.sum(tiles, 0):
        own = tl.sum((ends <= tile).to(tl.int32), 0)
        mine = expert == own
        start = tl.sum(tl.where(mine, starts + (tile - (ends - tiles)) * BM, 0), 0)
        stop = tl.sum(tl.where(mine, stops, 0), 0)
        row = (start + tl.arange(0, BM)).to(tl.int64)
        rows = row < stop
        column = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
        columns = column < N
        if GATHER > 0:
            x_row = (tl.load(source + row, mask=rows, other=0) // GATHER).to(tl.int64)
        else:
            x_row = row
        total = _dot_along_k(
            x + x_row * stride_xm,
            weight + own.to(tl.int64) * stride_we + column * stride_wn,
            0,
            tl.cdiv(K, BK),
            K,
            stride_xk,
            stride_wk,
            rows,
            columns,
            BM,
            BN,
            BK,
            CHAIN,
            WHOLE_K,
        )
        at = out + row[:, None] * stride_om + column[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=rows[:, None] & columns[None, :])
