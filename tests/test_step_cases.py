"""The grammar of step cases: chunks, drafts and attributes, one spelling each, and one line for what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbench.catalog import PLAIN, Case, RoutingControl, parse_point, parse_shape, parse_step
from kbench.catalog.attributes import NAMES
from kbench.catalog.lengths import shared_tokens, tailed
from kbench.errors import UsageError


@pytest.mark.parametrize(
    ("text", "spelt"),
    [
        ("32*1@4096;graph=auto", "32*1@4096"),
        ("1@127;tail=full;page=64", "1*1@127;page=64;tail=full"),
        ("1@127 ; scatter=shuffled ; sampling=greedy", "1*1@127"),
        ("8*1@900;scatter=frag:0.50;prefix_share=0.5", "8*1@900;prefix_share=0.5;scatter=frag:0.5"),
        ("8*1@900;scatter=frag:0", "8*1@900;scatter=seq"),
        ("8*1@900;moe=zipf:1.20", "8*1@900;moe=zipf:1.2"),
        ("8*1@900;moe=recorded:loads/a.json", "8*1@900;moe=recorded:loads/a.json"),
        ("8*1@900+512@2048c;graph=off", "8*1@900+1*512@2048c;graph=off"),
        ("4*4@900:3", "4*4@900:3"),
        ("2q2k_32q1s4k;graph=on", "2*2048+32*1@4096;graph=on"),
    ],
)
def test_a_step_has_one_spelling(text: str, spelt: str) -> None:
    shape = parse_step(text)
    assert str(shape) == spelt
    assert parse_step(spelt) == shape
    case = Case("step", "step", "tiny", str(shape.point), shape.attributes.pairs())
    assert Case.parse(str(case)) == case
    assert case.step_attributes == shape.attributes


def test_attributes_are_read_into_one_record() -> None:
    read = parse_step("8*1@900;moe=hot;page=32;sampling=topkp;tail=partial;scatter=seq").attributes
    assert (read.moe, read.page, read.sampling, read.tail, read.scatter) == (
        RoutingControl("hot"), 32, "topkp", "partial", 0.0,
    )  # fmt: skip
    assert not read.keeps_attention
    assert parse_step("8*1@900;graph=off;moe=hot").attributes.keeps_attention
    assert parse_shape("8*1@900").attributes == PLAIN


@pytest.mark.parametrize(
    "text",
    [
        "1*1@9;page=0",
        "1*1@9;page=x",
        "1*1@9;page=65537",
        "1*1@9;tail=half",
        "1*1@9;scatter=frag",
        "1*1@9;scatter=frag:2",
        "1*1@9;prefix_share=1.1",
        "1*1@9;prefix_share=nan",
        "1*1@9;moe=zipf:x",
        "1*1@9;moe=zipf:",
        "1*1@9;moe=hot:3",
        "1*1@9;moe=recorded",
        "1*1@9;sampling=beam",
        "1*1@9;graph=yes",
        "1*1@9;graph=on;graph=on",
        "1*1@9;speed=2",
        "1*1@9;graph",
        "1*1@9;graph=",
        "1*1@9;",
        "rows=32;graph=on",
        "1*1@9,window=8;graph=on",
        "1*1@9:1",
        "1*1@9C",
        "1*1@9c:",
        "1q1s9c",
    ],
)
def test_what_cannot_be_read_is_one_line_with_a_remedy(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape(text)
    assert "\n" not in str(caught.value)
    assert caught.value.problems[0].remedy


def test_axes_are_no_step() -> None:
    for text in ("m=4,n=4,k=4", "32*1@4096,window=128"):
        with pytest.raises(UsageError, match="is not a batch"):
            parse_step(text)


def test_tails_become_partial_or_full_in_pages_of_16_and_64_alike() -> None:
    point = parse_point("4*1@4096+2*1@127+1*512+3*1@1")
    for page in (16, 64):
        partial, full = tailed(point, "partial", page), tailed(point, "full", page)
        assert str(partial) == "4*1@4095+2*1@127+1*511+3*1"
        assert str(full) == "4*1@4096+2*1@128+1*512+3*1@64" or str(full) == "4*1@4096+2*1@128+1*512+3*64"
        assert all(kv % page for _, kv in partial.sequences)
        assert not any(kv % page for _, kv in full.sequences)
    assert tailed(point, "as-written", 16) is point


def test_shared_prefixes_are_whole_pages_of_the_shortest_history() -> None:
    point = parse_point("4*1@1000+1*100@400")
    assert shared_tokens(point, 0.5, 16) == shared_tokens(point, 0.5, 64) == 128
    assert shared_tokens(point, 1.0, 16) == 256
    assert shared_tokens(parse_point("2*64"), 1.0, 16) == 0


def test_the_docs_list_every_attribute() -> None:
    text = (Path(__file__).parents[1] / "docs" / "step.md").read_text()
    rows = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")]
    assert set(rows) >= set(NAMES)
