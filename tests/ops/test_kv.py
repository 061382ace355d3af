"""KV movement: token by token in Python, what must not be touched, and what is judged wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kbench.catalog import parse_shape, resolve_shape
from kbench.errors import KbenchError
from kbench.kernels.base import PlainKernel
from kbench.kernels.movers import TorchAppend, TorchConvert
from kbench.kernels.verify import check
from kbench.ops.attention import AttentionSpec, sequence_kv
from kbench.ops.base import InputSettings, Layout
from kbench.ops.inputs import build
from kbench.ops.registry import load_op
from kbench.ops.tensors import TensorInputs

AXES = ",kv_heads=2,head_dim=8"


def made(op: str, shape: str, page: int = 16, layout: Layout = "NHD", kind: str = "random") -> TensorInputs:
    settings = InputSettings(page, layout, torch.float32, torch.device("cpu"), 3)
    inputs: TensorInputs = load_op(op).build(resolve_shape(op, parse_shape(shape + AXES), None), settings, kind)[0]
    return inputs


def cell(pool: torch.Tensor, page: int, offset: int, layout: str) -> torch.Tensor:
    return pool[page, offset] if layout == "NHD" else pool[page, :, offset]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_writes_each_token_to_its_slot_and_nothing_else(layout: Layout) -> None:
    inputs = made("kv.append", "2*1@37+1*19@40", layout=layout, kind="padding")
    given_ = inputs.arguments
    expected = {name: inputs.initial[name].clone() for name in ("k_to", "v_to")}
    for token, slot in enumerate(given_["slots"].tolist()):
        if slot >= 0:
            for rows, name in (("k", "k_to"), ("v", "v_to")):
                cell(expected[name], slot // 16, slot % 16, layout).copy_(given_[rows][token])
    found = load_op("kv.append").moved(inputs)
    for have, want in zip(found, expected.values(), strict=True):
        assert torch.equal(have.view(torch.int32), want.view(torch.int32))
    assert (given_["slots"] < 0).any() and torch.isnan(expected["k_to"][0]).all()


@pytest.mark.parametrize(("op", "axes"), [("kv.convert_pages", ",page_to=64"), ("kv.convert_layout", "")])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_conversion_moves_each_token(op: str, axes: str, layout: Layout) -> None:
    inputs = made(op, f"1*1@70+1*1@15{axes}", layout=layout)
    given_ = inputs.arguments
    moved = dict(zip(("k_to", "v_to"), load_op(op).moved(inputs), strict=True))
    for row, length in enumerate(given_["lengths"].tolist()):
        for token in range(length):
            places = {}
            for side in ("from", "to"):
                size = given_[f"page_size_{side}"]
                places[side] = (int(given_[f"table_{side}"][row, token // size]), token % size)
            for name in ("k", "v"):
                have = cell(moved[f"{name}_to"], *places["to"], given_["layout_to"])
                assert torch.equal(have, cell(given_[f"{name}_from"], *places["from"], layout))


@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4), pages=st.sampled_from([(16, 64), (64, 16)]))
def test_there_and_back_again(lengths: list[int], pages: tuple[int, int]) -> None:
    """A conversion is undone by the conversion with both sides exchanged."""
    point = "+".join(f"1*1@{length}" for length in lengths)
    inputs = made("kv.convert_pages", f"{point},page_to={pages[1]}", page=pages[0])
    kernel = TorchConvert()
    kernel.run(inputs.arguments, kernel.plan(inputs.arguments), ())
    back = {**inputs.arguments}
    for name in ("table", "page_size", "layout"):
        back[f"{name}_from"], back[f"{name}_to"] = back[f"{name}_to"], back[f"{name}_from"]
    for name in ("k", "v"):
        back[f"{name}_from"] = inputs.arguments[f"{name}_to"]
        back[f"{name}_to"] = torch.full_like(inputs.arguments[f"{name}_from"], float("nan"))
    kernel.run(back, kernel.plan(back), ())
    for name in ("k", "v"):
        have, want = back[f"{name}_to"], inputs.arguments[f"{name}_from"]
        assert torch.equal(have.view(torch.int32), want.view(torch.int32))


def test_it_converts_the_pool_of_paged_attention() -> None:
    """The other way in: a cache that attention reads, converted, and read again by attention's own gather."""
    settings = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), 5)
    cache = build(parse_shape("2*1@37").point, AttentionSpec(4, 2, 8), settings)  # type: ignore[arg-type]
    target = [torch.full((4, 64, 2, 8), float("nan")) for _ in range(2)]
    arguments: dict[str, Any] = {
        "k_from": cache.kv.k,
        "v_from": cache.kv.v,
        "k_to": target[0],
        "v_to": target[1],
        "table_from": cache.batch.block_table,
        "table_to": torch.tensor([[2], [1]], dtype=torch.int32),
        "lengths": cache.batch.seq_lens,
        "page_size_from": 16,
        "page_size_to": 64,
        "layout_from": "NHD",
        "layout_to": "NHD",
    }
    kernel = TorchConvert()
    kernel.run(arguments, kernel.plan(arguments), ())
    for row, page in enumerate((2, 1)):
        keys, values = sequence_kv(cache.kv, cache.batch, row, 37)
        assert torch.equal(target[0][page, :37], keys) and torch.equal(target[1][page, :37], values)
    assert all(torch.isnan(pool[[0, 3]]).all() for pool in target)


class Careless(PlainKernel):
    """Right, but it also writes a page that is not its own."""

    name = "careless"

    def __init__(self, page: int, kernel: Any) -> None:
        self._page, self._kernel = page, kernel

    def plan(self, state: dict[str, Any]) -> Any:
        return self._kernel.plan(state)

    def run(self, state: dict[str, Any], plan: Any, out: Any) -> Any:
        answer = self._kernel.run(state, plan, out)
        state["k_to"][self._page, 0, 0, 0] = 1.0
        return answer


class Elsewhere(PlainKernel):
    """Answers a right pool of its own and leaves the given one as it was."""

    name = "elsewhere"

    def run(self, state: dict[str, Any], plan: Any, out: Any) -> Any:
        own = {**state, "k_to": state["k_to"].clone(), "v_to": state["v_to"].clone()}
        kernel = TorchAppend()
        return kernel.run(own, kernel.plan(own), ())


def test_a_write_to_somebody_elses_page_is_found() -> None:
    op, inputs = load_op("kv.convert_pages"), made("kv.convert_pages", "2*1@37")
    assert check(TorchConvert(), op, op.standard(inputs)).ok
    own = set(inputs.arguments["table_to"].flatten().tolist())
    spare = next(page for page in range(1, len(inputs.arguments["k_to"])) if page not in own)
    for page in (0, spare):
        judgement = check(Careless(page, TorchConvert()), op, op.standard(inputs))
        assert "not the call's to write" in judgement.problem


def test_a_pool_of_its_own_is_no_answer() -> None:
    op, inputs = load_op("kv.append"), made("kv.append", "2*1@37")
    assert "elements differ" in check(Elsewhere(), op, op.standard(inputs)).problem


def test_cost_is_that_of_the_tokens() -> None:
    inputs = made("kv.append", "4*1@100")
    cost = load_op("kv.append").cost(inputs)
    assert cost.bytes_written == 4 * 2 * 2 * 8 * 4 and cost.bytes_read == cost.bytes_written + 4 * 8
    whole = load_op("kv.convert_pages").cost(made("kv.convert_pages", "4*1@100"))
    assert whole.bytes_written == 400 * 2 * 2 * 8 * 4


def test_it_needs_a_batch() -> None:
    with pytest.raises(KbenchError, match=r"batch|measured"):
        resolve_shape("kv.append", parse_shape("kv_heads=2,head_dim=8"), None)
