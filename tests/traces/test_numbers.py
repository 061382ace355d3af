"""Numbers of pages: equal exactly where page keys are, and few."""

from __future__ import annotations

import pytest

from kbench.traces.content import PageKeys
from kbench.traces.numbers import PageNumbers
from kbench.traces.schema import RequestRow, Trace, TraceMeta, trace_from_rows
from kbench.traces.synth import PRESETS, synthesise


def check(made: Trace, page_size: int) -> PageNumbers:
    keys, numbers = PageKeys(made, page_size), PageNumbers(made, page_size)
    number_of: dict[int, int] = {}
    for request in range(len(made)):
        found = numbers.of(request).tolist()
        for key, number in zip(keys(request), found, strict=True):
            assert number_of.setdefault(key, number) == number
            assert 0 <= number < numbers.count
    assert len(set(number_of.values())) == len(number_of)
    return numbers


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_numbers_are_page_keys(preset: str, page_size: int) -> None:
    made = synthesise(preset, 60, 3, scale=0.1)
    assert check(made, page_size).own_output.all()


def blocks(*ids: list[int]) -> Trace:
    rows = [
        RequestRow(session_id=number, arrival_us=0, input_tokens=4 * len(each) + 1, output_tokens=9, block_ids=each)
        for number, each in enumerate(ids)
    ]
    return trace_from_rows(rows, TraceMeta(source="test", importer="test", block_tokens=4))


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_blocks_share_their_numbers(page_size: int) -> None:
    made = blocks([1, 2, 3], [1, 2, 4], [1, 2, 3, 5, 6, 7])
    numbers = check(made, page_size)
    assert numbers.own_output.all()
    assert numbers.count <= sum(len(numbers.of(request)) for request in range(3))
    assert numbers.of(0).tolist()[: 8 // page_size] == numbers.of(1).tolist()[: 8 // page_size]


def test_recorded_tokens_are_nobodys_own_where_somebody_else_has_them() -> None:
    def row(number: int, prompt: list[int], output: list[int]) -> RequestRow:
        return RequestRow(
            session_id=number,
            arrival_us=0,
            input_tokens=len(prompt),
            output_tokens=len(output),
            token_ids=prompt,
            output_token_ids=output,
        )

    made = trace_from_rows(
        [row(0, [1, 2], [3, 4]), row(1, [1, 2, 3], [9]), row(2, [5, 6], [7])], TraceMeta(source="t", importer="t")
    )
    assert check(made, 1).own_output.tolist() == [False, True, True]
