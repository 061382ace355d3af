from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kbench.catalog import parse_point
from kbench.kernels.plugin import FunctionAttention
from kbench.kernels.reference import ReferenceAttention
from kbench.kernels.verify import Verification
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV, oracle, same_dtype
from kbench.ops.base import InputSettings
from kbench.protocol import Status

from .holding import hold

SPEC = AttentionSpec(4, 2, 32)


def right(q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
    return same_dtype(q, kv, batch, spec, torch.empty_like(q))


def outcome(function: object, point: str = "2*1@4096", dtype: torch.dtype = torch.float32) -> Verification:
    settings = InputSettings(16, "NHD", dtype, torch.device("cpu"), 1)
    return hold(FunctionAttention("it", function), "attention.decode", parse_point(point), SPEC, settings)  # type: ignore[arg-type]


def test_a_right_function_passes() -> None:
    assert outcome(right).status is Status.OK


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda q, kv, b, s: torch.zeros_like(q), "relative L2"),
        (lambda q, kv, b, s: oracle(q, kv, b, s, drop_last_page=True).to(q.dtype), "relative L2"),
        (lambda q, kv, b, s: oracle(q, kv, b, s, shift=-1).to(q.dtype), "relative L2"),
        (lambda q, kv, b, s: right(q, kv, b, s).roll(1, dims=1), "relative L2"),
        (lambda q, kv, b, s: right(q, kv, b, s) * float("nan"), "NaN"),
        (lambda q, kv, b, s: right(q, kv, b, s)[:, :1], "shape"),
        (lambda q, kv, b, s: right(q, kv, b, s).double(), "dtype"),
        (lambda q, kv, b, s: None, "NoneType"),
        (lambda q, kv, b, s: right(q.bfloat16(), kv, b, s).to(q.dtype), "relative L2"),
    ],
    ids=["zeros", "dropped page", "off by one", "heads", "nan", "shape", "dtype", "nothing", "half precision inside"],
)
def test_wrong_functions_are_incorrect_and_say_what_is_wrong(wrong: object, said: str) -> None:
    found = outcome(wrong)
    assert found.status is Status.INCORRECT and said in found.message


def test_a_stale_answer_is_incorrect() -> None:
    kept: list[Tensor] = []

    def stale(q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        if not kept or kept[0].shape != q.shape:
            kept[:] = [right(q, kv, batch, spec)]
        return kept[0]

    found = outcome(stale)
    assert found.status is Status.INCORRECT and found.message.startswith("needle")


def test_an_answer_given_only_over_poison_is_incorrect() -> None:
    class Sensing(ReferenceAttention):
        def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
            return super().run(q, kv, plan, out) if bool(out.isnan().all()) else out

    settings = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), 1)
    found = hold(Sensing(), "attention.decode", parse_point("2*1@100"), SPEC, settings)
    assert found.status is Status.INCORRECT


def test_changed_inputs_are_incorrect_even_with_a_right_answer() -> None:
    def writes(q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        answer = right(q, kv, batch, spec)
        kv.v[0, 0, 0, 0] = 0.0
        return answer

    found = outcome(writes)
    assert found.status is Status.INCORRECT and "changed" in found.message


def test_a_kernel_that_only_fails_on_an_edge_is_incorrect_and_names_it() -> None:
    def whole_pages_only(q: Tensor, kv: PagedKV, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        if 1 in batch.kv_lens:
            return torch.zeros_like(q)
        return right(q, kv, batch, spec)

    found = outcome(whole_pages_only)
    assert found.status is Status.INCORRECT and "edge case 'one token' (1*1)" in found.message
    assert "1 more" in found.message and found.facts["edge_cases_passed"] == 6


def test_a_limit_without_power_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbench.ops.correctness.REFERENCE_FACTOR", 1e9)
    found = outcome(right)
    assert found.status is Status.NON_DISCRIMINATING and "dropped last page" in found.message


def test_exceptions_pass_through() -> None:
    def breaks(*_: object) -> Tensor:
        raise ZeroDivisionError("one")

    with pytest.raises(ZeroDivisionError):
        outcome(breaks)
