"""Every objection to an implementation is given, not the first one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kbench.catalog import GraphSupport, Implementation, implementation, implementations
from kbench.errors import UsageError
from kbench.selection import Query, SelectionRecord, check, resolve

GOOD = Query("attention.decode", "cpu", "float32", 16, "NHD", 8, 2, 32)
FUSSY = Implementation(
    "fussy",
    ("attention.decode",),
    "x:y",
    "",
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    page_multiple_of=16,
    page_sizes=(64,),
    layouts=("HND",),
    head_dims=(64, 128),
    power_of_two_head_dim=True,
)
BAD = Query("attention.prefill", "cpu", "float32", 24, "NHD", 7, 2, 8, graph=GraphSupport.SINGLE_TOKEN, mask="window")


def test_all_objections_at_once() -> None:
    reasons = check(FUSSY, BAD)
    assert [(reason.field, reason.want, reason.have) for reason in reasons] == [
        ("op", "attention.prefill", "attention.decode"),
        ("device", "cpu", "cuda"),
        ("dtype", "float32", "float16 or bfloat16"),
        ("layout", "NHD", "HND"),
        ("page_size", "24", "a multiple of 16"),
        ("page_size", "24", "64"),
        ("head_dim", "8", "64 or 128"),
        ("head_dim", "8", "a power of two of at least 16"),
        ("heads", "7/2", "q a multiple of kv"),
        ("graph", "single-token capture", "eager only"),
        ("mask", "window", "causal"),
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"device": "cuda:9"}, "device"),
        ({"dtype": "float64"}, "dtype"),
        ({"layout": "NDH"}, "layout"),
        ({"page_size": 24}, "page_size"),
        ({"q_heads": 7}, "heads"),
        ({"graph": GraphSupport.SINGLE_TOKEN}, "graph"),
        ({"mask": "sink"}, "mask"),
    ],
)
def test_one_change_gives_one_objection(change: dict[str, object], field: str) -> None:
    blocked = implementation("blocked")
    assert check(blocked, GOOD) == []
    [reason] = check(blocked, replace(GOOD, **change))  # type: ignore[arg-type]
    assert reason.field == field


def test_resolving_is_naming_and_nothing_else() -> None:
    found = resolve("blocked", GOOD)
    assert (found.requested, found.resolved, found.observed, found.drift) == ("blocked", "blocked", "", False)


def test_a_refusal_names_every_reason_and_who_could() -> None:
    with pytest.raises(UsageError) as caught:
        resolve("blocked", replace(GOOD, page_size=24, mask="sink"))
    assert "page_size" in str(caught.value) and "mask" in str(caught.value)
    assert "these can: none" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        resolve("blocked", replace(GOOD, page_size=24))
    able = {
        found.name for found in implementations("attention.decode") if not check(found, replace(GOOD, page_size=24))
    }
    assert able
    assert all(name in caught.value.problems[0].remedy for name in able)


def test_what_ran_instead_is_drift() -> None:
    assert SelectionRecord("attention.decode", "a", "b", declared=False).drift
    assert not SelectionRecord("attention.decode", "a", "b", policy="fallback").drift
    assert SelectionRecord("attention.decode", "a", "a", observed="b").drift
    assert not SelectionRecord("attention.decode", "a", "a", observed="a").drift
