"""`kbench backends`, `--expect`, `--without`, and what a run leaves for Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .conftest import Said, kbench

FALLBACK = 'policy = "fallback"\n[[variants.b.fallback]]\nop = "attention.decode"\nuse = "sdpa-math"\n'


def record(requested: str, resolved: str = "", observed: str = "", **rest: Any) -> dict[str, Any]:
    return {"op": "attention.decode", "requested": requested, "resolved": resolved or requested, "observed": observed,
            "declared": True, **rest}  # fmt: skip


def served(monkeypatch: pytest.MonkeyPatch, **of: dict[str, Any]) -> None:
    monkeypatch.setenv("KBENCH_FAKE_SELECTION", json.dumps(of))


def step(folder: Path, *options: str) -> Said:
    return kbench("step", folder / "suite.toml", "--out", folder / "results", "--device", "cpu", *options)


# ---------------------------------------------------------------------------------------------- the matrix


def test_the_matrix_has_everybody_with_every_reason(fresh: Path) -> None:
    said = kbench("backends", fresh / "suite.toml", "--out", fresh / "results", "--device", "cpu", "--json")
    assert said.code == 0, said.err
    queries = {(query["variant"], query["op"], query["level"]): query for query in said.document["queries"]}
    assert set(queries) == {
        (variant, op, level)
        for variant in ("a", "b")
        for op, level in (
            ("attention.decode", "engine"), ("attention.prefill", "engine"), ("attention.decode", "kernel")
        )
    }  # fmt: skip
    query = queries["b", "attention.decode", "engine"]
    assert (query["requested"], query["resolved"], query["policy"], query["layers"]) == (
        "blocked", "blocked", "reject", "full",
    )  # fmt: skip
    candidates = {one["name"]: one for one in query["candidates"]}
    assert candidates["sdpa-gather"]["serves"] == 1 and not candidates["sdpa-gather"]["reasons"]
    assert {reason["field"] for reason in candidates["fa3"]["reasons"]} == {"package", "device", "dtype"}
    assert said.document["measured"] == []


def test_people_get_a_table(fresh: Path) -> None:
    said = kbench("backends", fresh / "suite.toml", "--out", fresh / "results", "--device", "cpu")
    assert said.code == 0 and said.out == ""
    for text in ("attention.decode on cpu", "attention.prefill on cpu", "RESOLVED", "serves", "why not"):
        assert text in said.err


def test_another_machine_can_be_asked_about(fresh: Path) -> None:
    (fresh / "suite.toml").write_text((fresh / "suite.toml").read_text().replace('"blocked"', '"triton-paged"'))
    here = kbench("backends", fresh / "suite.toml", "--device", "cpu", "--json")
    assert here.code == 2
    [refusal] = {query["refusal"] for query in here.document["queries"] if query["refusal"]}
    assert "triton-paged cannot serve attention.decode: device: wants cpu, has cuda" in refusal
    there = kbench("backends", fresh / "suite.toml", "--capability", "9.0", "--json")
    assert there.code == 0 and there.document["capability"] == "9.0"
    old = kbench("backends", fresh / "suite.toml", "--capability", "7.5", "--json")
    assert old.code == 2 and "capability: wants 7.5, has 8.0 and newer" in old.out
    for wrong in (["--capability", "x"], ["--capability", "9.0", "--device", "cpu"]):
        said = kbench("backends", fresh / "suite.toml", *wrong)
        assert said.code == 2 and len(said.err.splitlines()) == 1


def test_without_a_suite_a_model_is_asked_about() -> None:
    said = kbench("backends", "--device", "cpu", "--model", "tiny", "--page-size", "24", "--json")
    assert said.code == 0
    assert {query["resolved"] for query in said.document["queries"]} == {"sdpa-gather", "sdpa"}
    assert kbench("backends", "--device", "cpu", "--model", "nobody").code == 2
    assert kbench("backends", "--device", "cpu", "--dtype", "int3").code == 2


# ------------------------------------------------------------------------------------------- what was seen


def test_an_undeclared_stand_in_is_exit_5_wherever_it_is_asked(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(monkeypatch, a=record("sdpa-gather", observed="sdpa-gather"), b=record("blocked", observed="aten::bmm"))
    assert step(fresh).code == 5
    line = "step 1*1@127, b: resolved to blocked, but aten::bmm ran"
    assert line in step(fresh).err
    said = kbench("backends", fresh / "suite.toml", "--out", fresh / "results", "--device", "cpu", "--json")
    assert said.code == 5
    drifted = {row["variant"]: row["drift"] for row in said.document["measured"]}
    assert drifted == {"a": False, "b": True}
    assert kbench("decide", fresh / "suite.toml", "--out", fresh / "results").code == 5


def test_an_arm_that_was_two_is_exit_5(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared(fresh)
    served(monkeypatch, a=record("sdpa-gather"), b=record("blocked", policy="fallback"))
    assert step(fresh, "--exploratory").code == 0
    assert step(fresh, "--budget", "0.001").code == 0  # one session, then the backend disappears
    served(monkeypatch, a=record("sdpa-gather"), b=record("blocked", "sdpa-math", policy="fallback"))
    said = step(fresh)
    assert said.code == 5 and "two arms" in said.err, said.err


@pytest.mark.parametrize(
    ("expect", "observed", "code", "said"),
    [
        ("decode=blocked", "blocked", 0, ""),
        ("attention.decode=blocked", "blocked", 0, ""),
        ("b:attention=blocked", "blocked", 0, ""),
        ("candidate:decode=blocked", "blocked", 0, ""),
        ("baseline:decode=sdpa-gather", "blocked", 0, ""),
        ("decode=triton-paged", "blocked", 5, "expected b:decode=triton-paged, but blocked ran"),
        ("decode=triton-paged", "", 5, "expected b:decode=triton-paged, but blocked was resolved"),
        ("decode=blocked", "", 4, "expected b:decode=blocked, and nothing that was traced says who ran"),
        ("prefill=sdpa", "blocked", 4, "nothing that was traced says who ran"),
        ("nonsense", "blocked", 2, "is not NAME=BACKEND"),
        ("z:decode=blocked", "blocked", 2, "no variant 'z'"),
        ("norm.rmsnorm=blocked", "blocked", 2, "the suite has no 'norm.rmsnorm'"),
    ],
)
def test_expectations_end_as_they_were_met(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, expect: str, observed: str, code: int, said: str
) -> None:
    served(monkeypatch, a=record("sdpa-gather", observed="sdpa-gather"), b=record("blocked", observed=observed))
    found = step(fresh, "--exploratory", "--expect", expect)
    assert found.code == code, found.err
    assert said in found.err
    assert "Traceback" not in found.err


def test_an_expectation_holds_for_a_decision_too(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(monkeypatch, a=record("sdpa-gather"), b=record("blocked", observed="blocked"))
    assert step(fresh).code == 0
    where = (fresh / "suite.toml", "--out", fresh / "results")
    plain = kbench("decide", *where)
    assert kbench("decide", *where, "--expect", "decode=blocked").code == plain.code
    said = kbench("decide", *where, "--expect", "decode=other", "--json")
    assert said.code == 5 == said.document["exit_code"]


# ------------------------------------------------------------------------------------- declared fallbacks


def declared(folder: Path, benchmarked: str = "") -> None:
    """Give variant b its fallback, or give that another hash."""
    lines = [line for line in (folder / "suite.toml").read_text().splitlines() if not line.startswith("benchmarked")]
    text = "\n".join(lines) + "\n"
    entry = FALLBACK + (f'benchmarked = "{benchmarked}"\n' if benchmarked else "")
    old = FALLBACK if FALLBACK in text else '"blocked" }\n'
    (folder / "suite.toml").write_text(text.replace(old, entry if old == FALLBACK else old + entry))


def decided(folder: Path, *options: str) -> Said:
    """Both levels measured, then the decision."""
    where = (folder / "suite.toml", "--out", folder / "results", *options)
    for level in ("kernel", "step"):
        assert kbench(level, *where, "--device", "cpu").code == 0
    return kbench("decide", *where, "--json")


def test_nothing_is_enabled_while_a_fallback_is_not_benchmarked(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: refused, the stand-in measured as a plan of its own, its hash written down, enabled."""
    text = (fresh / "suite.toml").read_text()
    clause = text.index('  [[regime.require]]\n  level = "workload"')
    text = text[:clause].replace('[workload]\ntraces = { chat = "chat.parquet" }\n', "")
    text = text.replace('trace_class = ["chat"]', "when = { context = [127, 127], batch = [1, 1] }")
    (fresh / "suite.toml").write_text(text)
    declared(fresh)
    where = (fresh / "suite.toml", "--out", fresh / "results")
    served(monkeypatch, a=record("sdpa-gather"), b=record("blocked", observed="blocked", policy="fallback"))
    said = decided(fresh)
    assert said.code == 3, said.err
    [regime] = said.document["regimes"]
    assert "sdpa-math may stand in for blocked in b (attention.decode)" in regime["reasons"][0]
    assert "--without blocked" in regime["action"]
    selector = (fresh / "results" / "claim" / "selector.json").read_bytes()

    served(monkeypatch, a=record("sdpa-gather"), b=record("blocked", "sdpa-math", policy="fallback"))
    beside = decided(fresh, "--without", "blocked")
    assert beside.code == 3
    assert (fresh / "results" / "claim" / "selector.json").read_bytes() == selector
    stand_in = beside.document["plan_hash"]
    assert stand_in != said.document["plan_hash"]

    declared(fresh, "ab" * 32)
    wrong = kbench("decide", *where, "--json")
    assert wrong.code == 3 and "no run of plan abababababab measured it" in wrong.document["regimes"][0]["reasons"][0]
    declared(fresh, said.document["plan_hash"])
    assert kbench("decide", *where).code == 3, "that plan did not run the stand-in"
    declared(fresh, stand_in)
    done = kbench("decide", *where, "--json")
    assert done.code == 0, done.err
    assert done.document["plan_hash"] == said.document["plan_hash"], "saying so is no edit"
    written = json.loads((fresh / "results" / "claim" / "selector.json").read_text())
    assert written["assert_backend"]["decode"] == "blocked"


# ---------------------------------------------------------------------------------------- what a run leaves


def test_samples_and_metrics_say_who_computed_them(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = 'a"b\\c\nd'
    reasons = [{"name": "blocked", "reasons": [{"field": "page_size", "want": "24", "have": hostile}]}]
    b = record("blocked", "sdpa-math", "sdpa-math", policy="fallback", candidates=reasons, layers="full")
    served(monkeypatch, a=record("sdpa-gather", observed="sdpa-gather"), b=b)
    declared(fresh)
    assert step(fresh).code == 0
    [run] = (fresh / "results" / "claim").glob("*/samples.parquet")
    rows = pq.read_table(run).to_pylist()
    names = ("variant", "requested", "resolved", "observed", "policy", "drift")
    told = {tuple(row[name] for name in names) for row in rows}
    assert told == {
        ("a", "sdpa-gather", "sdpa-gather", "sdpa-gather", "reject", ""),
        ("b", "blocked", "sdpa-math", "sdpa-math", "fallback", ""),
    }
    [rejected] = {row["rejected"] for row in rows if row["variant"] == "b"}
    assert rejected == f"blocked: page_size: wants 24, has {hostile}"
    page = (fresh / "results" / "claim" / "backends.prom").read_text()
    found = {
        (sample.name, sample.labels["variant"]): (sample.labels, sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "variant" in sample.labels
    }
    labels, value = found["kbench_backend_info", "b"]
    assert value == 1 and hostile in labels["reason"]
    wanted = {"engine": "kbench-embedded", "role": "target", "phase": "decode", "layer_kind": "full"}
    wanted |= {"requested": "blocked", "resolved": "sdpa-math", "observed": "sdpa-math", "policy": "fallback"}
    assert wanted.items() <= labels.items()
    assert [found[f"kbench_backend_{kind}", "b"][1] for kind in ("drift", "fallback")] == [0, 1]
    assert [found[f"kbench_backend_{kind}", "a"][1] for kind in ("drift", "fallback")] == [0, 0]
    other = fresh / "own.prom"
    kbench("backends", fresh / "suite.toml", "--out", fresh / "results", "--device", "cpu", "--prom", other)
    assert other.read_text() == page
    report = fresh / "report.md"
    assert kbench("report", fresh / "suite.toml", "--out", fresh / "results", "-o", report).code == 0
    assert "Backends, asked for and seen" in report.read_text()
