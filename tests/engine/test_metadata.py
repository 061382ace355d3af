"""A plan becomes the attention batches, positions and slots that it describes."""

from __future__ import annotations

import torch

from kbench.engine.core import Request, Scheduled, StepPlan
from kbench.engine.inputs import StepInputs
from kbench.engine.metadata import MetadataBuilder
from kbench.engine.requests import TokenContent

PAGE = 4


def request(request_id: int, pages: list[int], tokens: int, computed: int) -> Request:
    made = Request(request_id, tokens, 8, TokenContent(range(100 * request_id, 100 * request_id + tokens), PAGE))
    made.pages = pages
    made.computed_tokens = computed
    return made


def build(builder: MetadataBuilder, plan: StepPlan) -> StepInputs:
    return builder.upload(builder.stage(builder.prepare(plan)))


def make_builder(max_tokens: int = 4, max_seqs: int = 2) -> MetadataBuilder:
    return MetadataBuilder(page_size=PAGE, max_tokens=max_tokens, max_seqs=max_seqs, device=torch.device("cpu"))


def test_decodes_come_first_and_logit_rows_follow_the_plan() -> None:
    chunk = request(1, [5, 2], 6, 0)
    decode = request(2, [7, 3, 9], 10, 9)
    middle = request(3, [4, 6], 8, 2)
    plan = StepPlan(
        (Scheduled(chunk, 6, 6, True), Scheduled(decode, 1, 10, True), Scheduled(middle, 3, 5, False)),
    )
    inputs = build(make_builder(), plan)  # larger than the builder was made for: buffers grow
    assert inputs.decode_tokens == 1
    assert inputs.tokens.tolist() == [209, 100, 101, 102, 103, 104, 105, 302, 303, 304]
    assert inputs.positions.tolist() == [9, 0, 1, 2, 3, 4, 5, 2, 3, 4]
    assert inputs.slots.flat.tolist() == [9 * 4 + 1, 20, 21, 22, 23, 8, 9, 18, 19, 24]
    assert inputs.slots.page.tolist() == [9, 5, 5, 5, 5, 2, 2, 4, 4, 6]
    assert inputs.slots.offset.tolist() == [1, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert inputs.logit_rows.tolist() == [6, 0]
    assert inputs.decode is not None
    assert inputs.prefill is not None
    assert inputs.decode.block_table.tolist() == [[7, 3, 9]]
    assert inputs.decode.seq_lens.tolist() == [10]
    assert inputs.prefill.query_start.tolist() == [0, 6, 9]
    assert inputs.prefill.query_lens == (6, 3)
    assert inputs.prefill.kv_lens == (6, 5)
    assert inputs.prefill.block_table.tolist() == [[5, 2], [4, 6]]
    assert (inputs.prefill.max_query, inputs.prefill.max_kv) == (6, 6)


def test_short_tables_are_padded_with_the_null_page_and_follow_growth() -> None:
    builder = make_builder()
    long, short = request(1, [1, 2, 3], 9, 8), request(2, [8], 3, 2)
    build(builder, StepPlan((Scheduled(long, 1, 9, True), Scheduled(short, 1, 3, True))))
    short.pages += [11]
    short.content.append(7)  # type: ignore[attr-defined]
    short.content.append(8)  # type: ignore[attr-defined]
    inputs = build(builder, StepPlan((Scheduled(long, 1, 9, True), Scheduled(short, 1, 5, True))))
    assert inputs.prefill is None
    assert inputs.decode is not None
    assert inputs.decode.block_table.tolist() == [[1, 2, 3], [8, 11, 0]]
    assert inputs.tokens.tolist()[1] == 8


def test_pages_of_a_preempted_request_are_read_anew() -> None:
    builder = make_builder()
    made = request(1, [1, 2], 8, 7)
    build(builder, StepPlan((Scheduled(made, 1, 8, True),)))
    made.pages = [6, 5]
    made.preemptions += 1
    inputs = build(builder, StepPlan((Scheduled(made, 8, 8, True),)))
    assert inputs.prefill is not None
    assert inputs.prefill.block_table.tolist() == [[6, 5]]


def test_a_step_without_samples_has_no_logit_rows() -> None:
    made = request(1, [1, 2], 8, 0)
    inputs = build(make_builder(), StepPlan((Scheduled(made, 5, 5, False),)))
    assert inputs.logit_rows.shape == (0,)
    assert inputs.decode is None
