"""Merging parts against attention over the whole, and the contract for empty parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kbench.catalog import parse_shape, resolve_shape
from kbench.ops.base import InputSettings
from kbench.ops.merge import CascadeMerge, merge

OP = CascadeMerge()
SETTINGS = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), 3)
SHAPE = resolve_shape("attention.cascade_merge", parse_shape("rows=5,heads=4,head_dim=16,parts=3"), None)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=5), st.integers(0, 1_000))
@hypothesis_settings(max_examples=40, deadline=None)
def test_parts_of_any_size_merge_to_the_whole(sizes: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(sizes), generator=draw, dtype=torch.float64) * 20
    values = torch.randn(sum(sizes), 8, generator=draw, dtype=torch.float64)
    outputs, masses = [], []
    for own, held in zip(scores.split(sizes), values.split(sizes), strict=True):
        outputs.append(torch.softmax(own, 0) @ held if len(own) else torch.full((8,), float("nan")).double())
        masses.append(torch.logsumexp(own, 0) if len(own) else torch.tensor(float("-inf")).double())
    output, lse = merge(torch.stack(outputs)[:, None, None], torch.stack(masses)[:, None, None])
    if sum(sizes):
        torch.testing.assert_close(output[0, 0], torch.softmax(scores, 0) @ values, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(lse[0, 0], torch.logsumexp(scores, 0), rtol=1e-12, atol=1e-12)
    else:
        assert not bool(output.any()) and float(lse) == float("-inf")


def test_both_infinities_mean_an_empty_part() -> None:
    own = OP.standard(OP.build(SHAPE, SETTINGS, "empty")[0])
    output, lse = own.expected
    assert bool(output.isfinite().all()) and not bool(output[3].any())
    assert bool((lse[3] == float("-inf")).all()) and bool(lse[:3].isfinite().all())
    assert bool(torch.isnan(own.inputs.arguments["outputs"]).any()), "what an empty part holds is not read"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_models_are_rejected(dtype: torch.dtype) -> None:
    inputs = OP.build(SHAPE, InputSettings(16, "NHD", dtype, torch.device("cpu"), 3))[0]
    report = OP.nulls((OP.standard(inputs),))
    assert not report.survived
    assert {"parts averaged", "last part left out", "lse taken as base 2", "lse in base 2"} <= set(report.killed)


def test_cost_reads_every_part_once() -> None:
    own = OP.cost(OP.build(SHAPE, SETTINGS)[0])
    assert own.bytes_read == 3 * 5 * 4 * (16 + 1) * 4 and own.bytes_written == 5 * 4 * (16 + 1) * 4
