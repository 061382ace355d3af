"""Every objection to an implementation is given, not the first one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from kbench.catalog import CUSTOM, GraphSupport, Implementation, Registry, implementation, implementations
from kbench.catalog.implementations import SHIPPED
from kbench.errors import UsageError
from kbench.selection import (
    Choice,
    Mutation,
    Query,
    Reason,
    SelectionRecord,
    SelectionRefused,
    absent,
    check,
    resolve,
    selections_of,
)

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


# ------------------------------------------------------------------------------------- the whole contract

ABLE = Implementation(
    "able",
    ("attention.decode",),
    "x:y",
    "",
    devices=("cuda",),
    lowest_capability=(8, 0),
    highest_capability=(9, 0),
    kv_dtypes=("float8_e4m3fn",),
    features=("window",),
    longest_query=4,
    graph=GraphSupport.UNIFORM,
    roles=("target",),
)
ASKED = Query("attention.decode", "cuda", "float32", 16, "NHD", 8, 2, 32, features=("window",), capability=(9, 0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"capability": (7, 5)}, "capability: wants 7.5, has 8.0 to 9.0"),
        ({"capability": (10, 0)}, "capability: wants 10.0, has 8.0 to 9.0"),
        ({"kv_dtype": "int8"}, "kv_dtype: wants int8, has that of the queries or float8_e4m3fn"),
        ({"role": "draft"}, "role: wants draft, has target"),
        ({"query_len": 5}, "query_len: wants 5, has up to 4"),
        ({"v_head_dim": 64}, "v_head_dim: wants 64, has that of the keys, 32"),
        ({"tensor_parallel": 3}, "tensor_parallel: wants 3, has a divisor of 8 query and 2 KV heads"),
        ({"context_parallel": 2}, "feature: wants lse, has window"),
        ({"features": ("window", "sinks")}, "feature: wants sinks, has window"),
        ({"graph": GraphSupport.ALWAYS}, "graph: wants always capture, has up to uniform"),
        ({"mask": "block-sparse"}, "mask: wants block-sparse, has causal"),
        ({"kv_heads": 0}, "heads: wants 8/0, has q a multiple of kv"),
    ],
)
def test_every_condition_of_the_contract_is_judged(change: dict[str, Any], said: str) -> None:
    assert check(ABLE, ASKED) == []
    assert said in [str(reason) for reason in check(ABLE, replace(ASKED, **change))]


@pytest.mark.parametrize(
    "change",
    [
        {"capability": None},
        {"capability": (8, 0)},
        {"kv_dtype": "float8_e4m3fn"},
        {"kv_dtype": "float32"},
        {"query_len": 4},
        {"v_head_dim": 32},
        {"tensor_parallel": 2},
        {"tensor_parallel": 8},
        {"graph": GraphSupport.UNIFORM},
    ],
)
def test_what_is_within_the_limits_is_no_objection(change: dict[str, Any]) -> None:
    assert check(ABLE, replace(ASKED, **change)) == []


def test_other_operations_are_asked_less() -> None:
    gemm = Query("gemm.qkv", "cpu", "float16", 3, "odd", 7, 2, 5)
    assert check(implementation("torch-gemm"), gemm) == []
    assert [reason.field for reason in check(implementation("torch-moe"), gemm)] == ["op"]
    captured = Query("moe.fused", "cpu", "float32", 1, "NHD", 1, 1, 0, graph=GraphSupport.ALWAYS)
    assert [reason.field for reason in check(implementation("torch-moe"), captured)] == ["graph"]


def test_a_package_that_is_gone_is_a_reason() -> None:
    needy = replace(ABLE, requires=("kbench", "no_such_package", "no.such.package"))
    assert [reason.want for reason in absent(needy)] == ["no_such_package", "no.such.package"]


# ----------------------------------------------------------------------------------------------- policies


def gone(*names: str) -> Any:
    """A look at a world in which these cannot be imported any longer."""

    def look(name: str, op: str) -> tuple[Implementation, tuple[Reason, ...]]:
        return SHIPPED.get(name, op), (Reason("import", name, "libfast.so: not found"),) if name in names else ()

    return look


def test_reject_names_every_reason_of_the_one_that_was_named() -> None:
    with pytest.raises(SelectionRefused) as caught:
        resolve(Choice("blocked"), replace(GOOD, page_size=24), look=gone("blocked"))
    assert caught.value.reasons == [
        "blocked: import: wants blocked, has libfast.so: not found",
        "blocked: page_size: wants 24, has a multiple of 16",
    ]


def test_a_fallback_is_taken_in_its_order_and_says_why() -> None:
    chain = (("triton-paged", ""), ("sdpa-gather", "ab" * 32), ("reference", ""))
    found = resolve(Choice("blocked", "fallback", chain), GOOD, look=gone("blocked"))
    assert (found.requested, found.resolved, found.benchmarked) == ("blocked", "sdpa-gather", "ab" * 32)
    assert (found.declared, found.drift, found.fell_back) == (True, False, True)
    assert [candidate.name for candidate in found.candidates] == ["blocked", "triton-paged", "sdpa-gather"]
    assert [reason.field for reason in found.candidates[1].reasons] == ["device"]
    preferred = resolve(Choice("blocked", "fallback", chain), GOOD)
    assert (preferred.resolved, preferred.fell_back) == ("blocked", False)


def test_a_chain_that_ends_is_refused_with_the_reasons_of_all() -> None:
    choice = Choice("blocked", "fallback", (("triton-paged", ""),))
    with pytest.raises(SelectionRefused) as caught:
        resolve(choice, GOOD, look=gone("blocked"))
    text = str(caught.value)
    assert "blocked: import" in text and "triton-paged: device" in text and "these can: " in text
    assert "blocked" not in caught.value.problems[0].remedy.split(", ")


def test_auto_takes_the_first_in_the_registrys_order_that_can() -> None:
    order = [found.name for found in SHIPPED.in_order("attention.decode")]
    able = [name for name in order if not check(SHIPPED.get(name), GOOD)]
    assert resolve(Choice("auto"), GOOD).resolved == able[0] == "sdpa-gather"
    assert resolve(Choice("auto"), GOOD, look=gone(able[0])).resolved == able[1]
    named = resolve(Choice("triton-paged", "auto"), GOOD)
    assert (named.resolved, named.fell_back, named.drift) == ("sdpa-gather", True, False)
    assert "reference" not in order, "what has priority 0 is never taken by itself"


def test_somebody_can_be_treated_as_gone() -> None:
    found = resolve(Choice("auto", without=("sdpa-gather",)), GOOD)
    assert found.resolved == "blocked"
    with pytest.raises(SelectionRefused, match="left out by --without"):
        resolve(Choice("blocked", without=("blocked",)), GOOD)


@pytest.mark.parametrize("policy", ["reject", "fallback", "auto"])
def test_the_custom_slot_refuses_until_it_is_filled(policy: Any) -> None:
    choice = Choice(CUSTOM, policy, (("sdpa-gather", ""),))
    with pytest.raises(UsageError, match=r"slot .custom. of attention\.decode is empty"):
        resolve(choice, GOOD)
    mine = replace(ABLE, name=CUSTOM, devices=("cpu",), entry="mine.py:fn", features=(), installed=True)
    filled = resolve(choice, GOOD, known=SHIPPED.registered(mine))
    assert (filled.resolved, filled.source) == (CUSTOM, "mine.py:fn")


def test_two_registries_resolve_the_same_name_differently() -> None:
    mine = replace(ABLE, name="blocked", devices=("cpu",), entry="mine.py:fn", features=(), installed=True)
    with pytest.raises(UsageError, match="registered already"):
        SHIPPED.registered(mine)
    own = SHIPPED.registered(mine, override=True)
    assert resolve("blocked", GOOD, known=own).source == "mine.py:fn"
    assert resolve("blocked", GOOD, known=SHIPPED).source == ""
    assert isinstance(own, Registry) and SHIPPED.get("blocked").entry.startswith("kbench.")


# --------------------------------------------------------------------------------------------- the record


def test_each_resolution_writes_exactly_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kbench.selection"):
        resolve(Choice("blocked", "fallback", (("sdpa-gather", ""),)), GOOD, look=gone("blocked"))
        resolve("blocked", GOOD)
        with pytest.raises(SelectionRefused):
            resolve("triton-paged", GOOD)
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("kbench.select op=attention.decode role=target layers=all requested=blocked ")
    assert "resolved=sdpa-gather policy=fallback declared=yes" in first
    assert 'rejected="blocked: import: wants blocked, has libfast.so: not found"' in first
    assert "resolved=blocked policy=reject" in second and "rejected" not in second


def test_a_line_stays_one_line_whatever_names_hold() -> None:
    record = SelectionRecord("op", "a\nb", 'x="1" y', candidates=())
    assert len(record.line().splitlines()) == 1
    assert 'requested="a b" resolved="x=\'1\' y"' in record.line()


def test_a_record_survives_json() -> None:
    found = resolve(Choice("blocked", "fallback", (("sdpa-gather", "ab" * 32),)), GOOD, look=gone("blocked"))
    changed = replace(found, observed="other", mutations=(Mutation("page_size", "16", "64"),))
    assert SelectionRecord.from_json(changed.to_json()) == changed
    assert changed.drift


def test_records_of_before_there_were_policies_are_read() -> None:
    old = SelectionRecord.from_json({"requested": "a", "resolved": "b", "observed": ""})
    assert old.drift and not old.declared
    assert not SelectionRecord.from_json({"requested": "a", "resolved": "a", "observed": ""}).drift
    facts = {"selection": {"decode": {"resolved": "a"}, "prefill": {"resolved": "b"}, "odd": 3}}
    assert [(role, data["resolved"]) for role, data in selections_of(facts)] == [("decode", "a"), ("prefill", "b")]
    assert list(selections_of({"selection": "blocked"})) == []


def test_what_changed_after_it_was_resolved_is_drift() -> None:
    assert SelectionRecord("op", "a", "a", mutations=(Mutation("run()", "code 1", "code 2"),)).drift
