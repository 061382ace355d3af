from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kbench import catalog
from kbench.catalog import parse_point
from kbench.errors import UsageError
from kbench.ops.attention import AttentionSpec
from kbench.ops.base import FLOORS, InputSettings, checksum, row_errors
from kbench.ops.correctness import Standard, judge, null_output, null_report, standard
from kbench.ops.inputs import Inputs, build
from kbench.ops.registry import load_op

SPEC = AttentionSpec(4, 2, 32)
ALWAYS = {"zeros", "dropped last page", "mask one short", "heads swapped", "stale output"}


def make(point: str, kind: str = "random", dtype: torch.dtype = torch.float32, spec: AttentionSpec = SPEC) -> Inputs:
    settings = InputSettings(16, "NHD", dtype, torch.device("cpu"), 5)
    return build(parse_point(point), spec, settings, kind)  # type: ignore[arg-type]


def pair(point: str, dtype: torch.dtype = torch.float32, spec: AttentionSpec = SPEC) -> tuple[Standard, Standard]:
    return standard(make(point, "random", dtype, spec)), standard(make(point, "needle", dtype, spec))


CONTEXTS = (127, 128, 129, 1_000, 4_096, 16_384)
LONG_CONTEXTS = tuple(pytest.param(context, marks=pytest.mark.slow) for context in (65_536, 131_072))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("context", [*CONTEXTS, *LONG_CONTEXTS])
def test_every_wrong_answer_fails_at_every_context(context: int, dtype: torch.dtype) -> None:
    """A dropped last page, a mask off by one, swapped heads, zeros, stale memory: each as a null model, and each as an
    answer that is handed to the judge in the dtype of the case."""
    both = pair(f"1*1@{context}", dtype, AttentionSpec(2, 1, 16))
    report = null_report(both)
    assert set(report.killed) == ALWAYS and not report.survived
    for name in ALWAYS:
        wrong = [judge(null_output(name, own, both[place - 1]).to(dtype), own) for place, own in enumerate(both)]
        assert not all(judgement.ok for judgement in wrong), name
    assert all(judge(own.expected.to(dtype), own).ok for own in both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("point", ["2*9@300+1*40", "1*64@2048"])
def test_every_null_model_fails_in_prefill(point: str, dtype: torch.dtype) -> None:
    report = null_report(pair(point, dtype))
    assert set(report.killed) == ALWAYS | {"mask one ahead"} and not report.survived


def test_random_inputs_alone_cannot_see_a_dropped_page_of_a_long_context_at_a_lax_limit() -> None:
    """Why there are needles: 16 of 131,072 random keys are within a tolerance of 1e-2, one needle is not."""
    random, needle = pair("1*1@131072", spec=AttentionSpec(2, 1, 16))
    lax = (replace(random, limit=2e-2), replace(random, limit=2e-2))
    assert "dropped last page" in null_report(lax).survived
    assert "dropped last page" in null_report((random, replace(needle, limit=2e-2))).killed


def test_a_limit_that_accepts_a_wrong_answer_is_reported() -> None:
    report = null_report(tuple(replace(one, limit=1e3) for one in pair("2*1@127")))
    assert set(report.survived) == ALWAYS and not report.killed


def test_one_sequence_that_hides_a_wrong_answer_is_enough_to_report_it() -> None:
    random, _ = pair("1*1@40+1*1@131072", spec=AttentionSpec(2, 1, 16))
    assert "dropped last page" in null_report((replace(random, limit=2e-2),)).survived


def test_a_null_model_that_is_right_is_not_counted() -> None:
    report = null_report(pair("1*1", spec=AttentionSpec(2, 1, 16)))
    assert "heads swapped" not in report.killed + report.survived, "with one key, heads of a group agree"
    assert {"zeros", "dropped last page", "mask one short"} <= set(report.killed)


def test_bfloat16_answers_pass_their_own_limit_and_fail_float32s() -> None:
    half = standard(make("4*1@1000", dtype=torch.bfloat16))
    assert judge(half.expected.to(torch.bfloat16), half).ok

    single = standard(make("4*1@1000"))
    assert judge(single.expected.float(), single).ok
    rounded = judge(single.expected.to(torch.bfloat16).float(), single)
    assert not rounded.ok and rounded.rel_l2 > 100 * single.limit


def test_limits_follow_the_dtype_in_both_directions() -> None:
    limits = {dtype: standard(make("4*1@1000", dtype=dtype)).limit for dtype in FLOORS}
    assert limits[torch.float32] < 1e-5 < limits[torch.float16] < limits[torch.bfloat16] < 5e-2
    for dtype, floor in FLOORS.items():
        assert limits[dtype] >= floor
        assert standard(make("1*1", dtype=dtype)).limit == floor, "one key: plain mathematics makes no error"


def test_one_wrong_row_of_many_decides_and_is_named() -> None:
    own = standard(make("6*1@200"))
    answer = own.expected.float()
    answer[4, 2] = 0
    verdict = judge(answer, own)
    assert verdict.rel_l2 == pytest.approx(1.0) and "sequence 4" in verdict.problem and "head 2" in verdict.problem
    assert "1 of 24 rows" in verdict.problem


def test_numbers_that_are_none_fail_with_an_infinite_error() -> None:
    own = standard(make("2*1@50"))
    for poison in (float("nan"), float("inf")):
        answer = own.expected.float()
        answer[1, 3, 7] = poison
        assert judge(answer, own).rel_l2 == float("inf")
    answer[1, 3, 7] = float("nan")
    assert "NaN in sequence 1" in judge(answer, own).problem


def test_rows_of_zero_are_matched_exactly() -> None:
    zero = torch.zeros(1, 1, 4, dtype=torch.float64)
    assert row_errors(torch.zeros(1, 1, 4), zero).item() == 0
    assert row_errors(torch.full((1, 1, 4), 1e-30), zero).item() == float("inf")


def test_a_wrong_form_is_told_apart_from_a_wrong_value() -> None:
    own = standard(make("2*1@50"))
    answer = own.expected.float()
    assert "dtype" in judge(own.expected, own).problem
    assert "shape" in judge(answer[:1], own).problem
    assert "NoneType" in judge(None, own).problem
    assert "Parameter" in judge(torch.nn.Parameter(answer), own).problem


def test_null_models_are_what_they_are_called() -> None:
    random, needle = pair("2*1@40")
    assert torch.equal(null_output("stale output", random, needle), needle.expected)
    assert torch.equal(null_output("heads swapped", random, needle)[:, 0], random.expected[:, -1])
    shorter = standard(make("2*1@40"))
    assert float(row_errors(null_output("mask one short", needle, random), needle.expected).min()) > 0.3
    assert torch.equal(shorter.expected, random.expected)


def test_a_checksum_sees_a_single_bit_even_among_nan() -> None:
    inputs = make("1*1@40")
    before = checksum(inputs.tensors())
    assert before == checksum(inputs.tensors())
    page = int(inputs.batch.block_table[0, 0])
    inputs.kv.k[page, 3, 0, 5] += 1e-6
    assert checksum(inputs.tensors()) != before


def test_every_operation_can_be_held_to_narrower_limits_and_never_to_wider_ones() -> None:
    """The limit of an output follows its dtype; exact outputs stay exact."""
    model = catalog.model_shape("tiny")
    settings = InputSettings(16, "NHD", torch.bfloat16, torch.device("cpu"), 5)
    seen = 0
    for name in catalog.OPS:
        op = load_op(name)
        try:
            shape = catalog.resolve_shape(name, catalog.parse_shape("2*1@40"), model)
            inputs = op.build(shape, settings)[0]
        except UsageError:  # not an operation of this model or batch
            continue
        own = op.standard(inputs)
        limits = getattr(own, "limits", None) or (own.limit,)
        narrow = op.held_to(own, {torch.bfloat16: 1e-9})
        narrower = getattr(narrow, "limits", None) or (narrow.limit,)
        forms = op.outputs(inputs) or op.written(inputs)
        for before, after, form in zip(limits, narrower, forms, strict=False):
            assert after == (min(before, 1e-9) if form.dtype is torch.bfloat16 else before), name
        wide = op.held_to(own, {torch.bfloat16: 1.0, torch.float32: 1.0})
        assert (getattr(wide, "limits", None) or (wide.limit,)) == tuple(limits), name
        seen += 1
    assert seen > 15
