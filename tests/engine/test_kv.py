"""The KV pool: any page size and layout hold the same tokens; what was not written stays poisoned."""

from __future__ import annotations

import itertools

import pytest
import torch

from kbench.catalog import model_shape
from kbench.engine.kv import KVPool, Slots, torch_dtype
from kbench.errors import UsageError

CPU = torch.device("cpu")
SHAPE = model_shape("tiny")


def make_pool(page_size: int, layout: str, poison: bool = True) -> KVPool:
    return KVPool(
        SHAPE, pages=64 // page_size, page_size=page_size, layout=layout, dtype=torch.float32, device=CPU, poison=poison
    )


def slots(flat: list[int], page_size: int) -> Slots:
    where = torch.tensor(flat)
    return Slots(where, where // page_size, where % page_size)


def token(pool: KVPool, layer: int, flat: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one slot, read by plain indexing of the documented layout."""
    page, offset = divmod(flat, pool.page_size)
    kv = pool.layers[layer]
    if pool.layout == "NHD":
        return kv.k[page, offset], kv.v[page, offset]
    return kv.k[page, :, offset], kv.v[page, :, offset]


@pytest.mark.parametrize(("page_size", "layout"), list(itertools.product((1, 8, 16, 64), ("NHD", "HND"))))
def test_written_tokens_are_found_where_the_layout_says(page_size: int, layout: str) -> None:
    pool = make_pool(page_size, layout)
    k = torch.randn(3, SHAPE.kv_heads, SHAPE.head_dim)
    where = [page_size + page_size // 2, 62 + page_size, 63 + page_size]
    pool.write(1, slots(where, page_size), k, -k)
    for index, flat in enumerate(where):
        keys, values = token(pool, 1, flat)
        assert torch.equal(keys, k[index])
        assert torch.equal(values, -k[index])
    written = torch.isfinite(pool.layers[1].k).sum()
    assert written == k.numel()
    assert torch.isnan(pool.layers[0].k).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_restore_brings_back_what_a_step_overwrote_nan_included(layout: str) -> None:
    pool = make_pool(16, layout)
    touched = slots([17, 40, 41], 16)
    first = torch.randn(1, SHAPE.kv_heads, SHAPE.head_dim)
    pool.write(0, slots([40], 16), first, first)
    kept = pool.snapshot(touched)
    pool.write(0, touched, torch.ones(3, 2, 32), torch.ones(3, 2, 32))
    pool.restore(kept)
    assert torch.equal(token(pool, 0, 40)[0], first[0])
    assert torch.isnan(token(pool, 0, 17)[0]).all()
    assert torch.isfinite(pool.layers[0].k).sum() == first.numel()


def test_random_contents_do_not_depend_on_page_size_or_layout() -> None:
    contents = []
    for page_size, layout in ((16, "NHD"), (64, "HND"), (8, "HND")):
        pool = make_pool(page_size, layout)
        where = [page_size + index for index in range(20)]
        pool.fill_random(slots(where, page_size), torch.Generator().manual_seed(3))
        contents.append(torch.stack([torch.stack(token(pool, layer, flat)) for layer in (0, 1) for flat in where]))
    assert torch.equal(contents[0], contents[1])
    assert torch.equal(contents[0], contents[2])
    assert abs(float(contents[0].std()) - 1) < 0.05


def test_the_null_page_is_extra_and_bytes_count_it() -> None:
    pool = make_pool(16, "NHD", poison=False)
    assert pool.layers[0].pages == pool.pages + 2
    assert pool.bytes == (pool.pages + 2) * 16 * SHAPE.kv_bytes_per_token(4)
    pool.poison()
    assert torch.isnan(pool.layers[1].v).all()
    pool.clear()
    assert not pool.layers[1].v.any()


def test_an_unknown_dtype_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="float8"):
        torch_dtype("float8")
