from __future__ import annotations

import itertools

import pytest
import torch

from kbench.catalog import parse_point
from kbench.ops.attention import AttentionSpec, sequence_kv
from kbench.ops.base import InputSettings
from kbench.ops.inputs import build, build_sets, edge_cases

CPU = torch.device("cpu")
SPEC = AttentionSpec(4, 2, 32)


def settings(page: int = 16, layout: str = "NHD", seed: int = 3) -> InputSettings:
    return InputSettings(page, layout, torch.float32, CPU, seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["random", "needle", "one-hot"])
def test_both_arms_see_the_same_values_whatever_the_page_size_and_layout(kind: str) -> None:
    point = parse_point("2*1@127+1*7@40")
    forms = [
        build(point, SPEC, settings(page, layout), kind)  # type: ignore[arg-type]
        for page, layout in itertools.product((16, 64), ("NHD", "HND"))
    ]
    first = forms[0]
    for other in forms[1:]:
        assert torch.equal(other.q, first.q)
        for index, (_, _, kv_len) in enumerate(first.batch.spans()):
            for own, theirs in zip(
                sequence_kv(first.kv, first.batch, index, kv_len),
                sequence_kv(other.kv, other.batch, index, kv_len),
                strict=True,
            ):
                assert torch.equal(own, theirs) and bool(own.isfinite().all())


def test_everything_that_must_not_be_read_is_poisoned() -> None:
    inputs = build(parse_point("3*1@37+1*1@32"), SPEC, settings())
    used = torch.zeros(inputs.kv.pages, 16, dtype=torch.bool)
    for table, kv_len in zip(inputs.batch.block_table.tolist(), inputs.batch.kv_lens, strict=True):
        for token in range(kv_len):
            used[table[token // 16], token % 16] = True
    finite = inputs.kv.k.isfinite().all(dim=(2, 3))
    assert torch.equal(finite, used)
    assert torch.equal(inputs.kv.v.isfinite().all(dim=(2, 3)), used)
    assert not bool(used[0].any()), "the null page is nobody's"
    assert bool((~used).all(dim=1).sum() >= 2), "unused pages besides the null page"


def test_block_tables_are_scattered_and_disjoint() -> None:
    inputs = build(parse_point("4*1@500"), SPEC, settings())
    pages = [page for row in inputs.batch.block_table.tolist() for page in row if page]
    assert len(set(pages)) == len(pages) == 4 * 32
    assert sum(after == before + 1 for before, after in itertools.pairwise(pages)) < 10
    assert pages == [
        page for row in build(parse_point("4*1@500"), SPEC, settings()).batch.block_table.tolist() for page in row
    ]


def test_aliased_sequences_share_pages_but_not_the_last() -> None:
    tables = build(parse_point("3*1@35"), SPEC, settings(), aliased=True).batch.block_table
    assert torch.equal(tables[0, :2], tables[1, :2]) and torch.equal(tables[0, :2], tables[2, :2])
    assert len(set(tables[:, 2].tolist())) == 3


@pytest.mark.parametrize("point", ["2*1@127", "1*9@300", "1*1@4096"])
def test_the_needle_takes_half_of_the_last_querys_mass(point: str) -> None:
    inputs = build(parse_point(point), SPEC, settings(), "needle")
    row = 0
    for index, (start, query_len, kv_len) in enumerate(inputs.batch.spans()):
        row = start + query_len - 1
        keys, _ = sequence_kv(inputs.kv, inputs.batch, index, kv_len)
        for head in range(SPEC.q_heads):
            scores = keys[:, head // SPEC.group].double() @ inputs.q[row, head].double() * SPEC.scale
            assert float(torch.softmax(scores, 0)[-1]) == pytest.approx(0.5, abs=1e-4)


def test_sets_share_a_pool_and_differ_in_pages_and_values() -> None:
    sets = build_sets(parse_point("2*1@50"), SPEC, settings(), 3)
    assert all(one.kv is sets[0].kv for one in sets)
    pages = [set(one.batch.block_table.flatten().tolist()) for one in sets]
    assert not pages[0] & pages[1] and not pages[1] & pages[2]
    assert not torch.equal(sets[0].q, sets[1].q)


@pytest.mark.parametrize("op", ["attention.decode", "attention.prefill"])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_edge_cases_hold_the_lengths_that_break_kernels(op: str, page: int) -> None:
    cases = edge_cases(op, page)
    lengths = {kv for case in cases for _, kv in case.point.sequences}
    assert {1, page, page + 1, 2 * page} <= lengths
    assert op == "attention.prefill" or page == 1 or page - 1 in lengths
    assert any(case.aliased for case in cases) and {case.kind for case in cases} == {
        "random",
        "needle",
        "one-hot",
        "rising",
    }
    assert all(case.point.is_decode for case in cases) == (op == "attention.decode")
