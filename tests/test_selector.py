"""Nothing but an exact enable, on what was measured, ever yields the candidate."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbench import selector
from kbench.hashing import canonical, sha256_of
from kbench.selector import BASELINE, CANDIDATE, VERDICTS, Choice, load, sealed

NOW = datetime(2026, 6, 1, tzinfo=UTC)
HERE = {
    "gpu": "NVIDIA H200",
    "driver": "570.124.06",
    "engine": "kbench@0.1.0",
    "torch": "2.13.0",
    "model": "llama-3-8b",
    "dtype": "bfloat16",
    "prefill_backend": "sdpa",
    "decode_backend": "triton-paged",
}
STEP = {"phase": "decode", "context": 4096, "batch": 8}
DOCS = Path(__file__).parents[1] / "docs"


def entry(regime: str = "long", use: str = CANDIDATE, verdict: str = "enable", **rest: Any) -> dict[str, Any]:
    return {
        "regime": regime, "use": use, "verdict": verdict, "when": {}, "trace_class": [], "note": "",
        "evidence": ["run-1"], "est": [], **rest,
    }  # fmt: skip


def of_class(name: str, *rest: Any, **more: Any) -> dict[str, Any]:
    return entry(*rest, trace_class=[name], **more)


def of_range(*rest: Any, context: Any = (2048, 32768), batch: Any = (1, 32), **more: Any) -> dict[str, Any]:
    return entry(*rest, when={"phase": "decode", "context": list(context), "batch": list(batch)}, **more)


def document(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    backends = {name: value for name, value in HERE.items() if name.endswith("_backend")}
    content: dict[str, Any] = {
        "schema": selector.SCHEMA,
        "suite": "practice",
        "plan_hash": "a" * 64,
        "ledger_head": "b" * 64,
        "lock_hash": "c" * 64,
        "rule_sha256": "d" * 64,
        "created": NOW.isoformat(),
        "expires": (NOW + timedelta(days=90)).isoformat(),
        "valid_for": {name: value for name, value in HERE.items() if name not in backends},
        "variants": {"baseline": "page16", "candidate": "page64"},
        "default": BASELINE,
        "on_mismatch": "fallback",
        "assert_backend": {name.removesuffix("_backend"): value for name, value in backends.items()},
        "scope": "deployment",
        "entries": list(entries),
    }
    return sealed({**content, **changes})


def chosen(data: Any, now: datetime = NOW, **features: Any) -> Choice:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "selector.json"
        file.write_bytes(text)
        return load(file, clock=lambda: now).choose(**features)


def test_a_deployment_is_chosen_by_its_trace_class() -> None:
    table = document(of_class("long"), of_class("chat", "chat", BASELINE, "disable"))
    assert chosen(table, **HERE, trace_class="long") == Choice(CANDIDATE, "regime long: enable", "long")
    assert chosen(table, **HERE, trace_class="chat") == Choice(BASELINE, "regime chat: disable", "chat")
    assert chosen(table, **HERE, trace_class="agents") == Choice(BASELINE, "no regime covers this")
    assert chosen(table, **HERE) == Choice(BASELINE, "feature trace_class is missing")


def test_a_deployment_whose_every_regime_enables_need_not_know_its_traffic() -> None:
    table = document(of_class("long"), of_class("chat", "chat"))
    assert chosen(table, **HERE) == Choice(CANDIDATE, "every regime enables", "long, chat")
    assert chosen(table, **HERE, trace_class="chat").use == CANDIDATE
    assert chosen(table, **HERE, trace_class="agents").use == BASELINE


def test_all_regimes_of_a_class_must_enable_it_in_any_order() -> None:
    pair = [of_class("long"), of_class("long", "short", BASELINE, "inconclusive")]
    for entries in (pair, pair[::-1]):
        assert chosen(document(*entries), **HERE, trace_class="long").use == BASELINE


def test_a_regime_that_cannot_be_told_apart_keeps_everything_unless_it_enables() -> None:
    for verdict, use in (("disable", BASELINE), ("inconclusive", BASELINE), ("enable", CANDIDATE)):
        table = document(of_class("long"), entry("points", BASELINE, verdict, note="unrecognisable"))
        assert chosen(table, **HERE, trace_class="long").use == use


@pytest.mark.parametrize(
    ("features", "use"),
    [
        ({}, CANDIDATE),
        ({"context": 2048, "batch": 1}, CANDIDATE),
        ({"context": 32768, "batch": 32}, CANDIDATE),
        ({"context": 2047}, BASELINE),
        ({"context": 32769}, BASELINE),
        ({"batch": 0}, BASELINE),
        ({"batch": 33}, BASELINE),
        ({"batch": -1}, BASELINE),
        ({"phase": "prefill"}, BASELINE),
        ({"context": 4096.0}, BASELINE),
        ({"context": "4096"}, BASELINE),
        ({"context": True}, BASELINE),
        ({"context": None}, BASELINE),
        ({"contxt": 4096}, BASELINE),
        ({"trace_class": ["long"]}, BASELINE),
    ],
)
def test_a_step_is_chosen_inside_the_range_only(features: dict[str, Any], use: str) -> None:
    assert chosen(document(of_range(), scope="step"), **{**HERE, **STEP, **features}).use == use


def test_a_baseline_range_wins_over_a_candidate_range_that_it_cuts() -> None:
    table = document(of_range(), of_range("cut", BASELINE, "disable", context=(4000, 5000)), scope="step")
    assert chosen(table, **HERE, **STEP) == Choice(BASELINE, "regime cut: disable", "cut")
    assert chosen(table, **HERE, **{**STEP, "context": 5001}).use == CANDIDATE


@pytest.mark.parametrize("name", [*HERE, *STEP])
def test_every_needed_feature_missing_or_other_gives_the_baseline(name: str) -> None:
    table = document(of_range(), scope="step")
    features: dict[str, Any] = {**HERE, **STEP}
    assert chosen(table, **features).use == CANDIDATE
    other = {**features, name: 10**9 if isinstance(features[name], int) else features[name] + " "}
    assert chosen(table, **other).use == BASELINE
    del features[name]
    choice = chosen(table, **features)
    assert (choice.use, choice.reason) == (BASELINE, f"feature {name} is missing")


def test_reject_says_so_on_a_mismatch_and_only_there() -> None:
    table = document(of_class("long"), on_mismatch="reject")
    assert chosen(table, **{**HERE, "gpu": "NVIDIA A100"}).reject
    assert chosen(table, **{**HERE, "decode_backend": "sdpa"}).reject
    assert not chosen(table, **HERE, trace_class="chat").reject
    assert not chosen(document(of_class("long")), **{**HERE, "gpu": "NVIDIA A100"}).reject


@pytest.mark.parametrize(
    ("now", "use"),
    [
        (NOW, CANDIDATE),
        (NOW - timedelta(minutes=59), CANDIDATE),
        (NOW - timedelta(minutes=61), BASELINE),
        (datetime(1970, 1, 1, tzinfo=UTC), BASELINE),
        (NOW + timedelta(days=90, seconds=-1), CANDIDATE),
        (NOW + timedelta(days=90), BASELINE),
    ],
)
def test_time(now: datetime, use: str) -> None:
    assert chosen(document(of_class("long")), now, **HERE).use == use


def test_the_clock_is_asked_at_every_choice(tmp_path: Path) -> None:
    file = tmp_path / "selector.json"
    file.write_text(json.dumps(document(of_class("long"))))
    times = iter([NOW, NOW + timedelta(days=91)])
    loaded = load(file, clock=lambda: next(times)).bind(**HERE)
    assert [loaded.choose().use, loaded.choose().use] == [CANDIDATE, BASELINE]


def changed_places(value: Any) -> Iterator[tuple[list[Any], Any]]:
    """Every leaf of the document, as the path to it."""
    if isinstance(value, dict | list) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            for path, leaf in changed_places(inner):
                yield [key, *path], leaf
    else:
        yield [], value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([*VERDICTS, "use"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FULL = document(of_class("long"), of_class("chat", "chat", BASELINE, "disable"))
PLACES = [path for path, _ in changed_places(FULL)]


@given(place=st.sampled_from(PLACES), value=JSON)
def test_a_changed_leaf_without_a_new_checksum_closes_the_file(place: list[Any], value: Any) -> None:
    altered = copy.deepcopy(FULL)
    inner = altered
    for key in place[:-1]:
        inner = inner[key]
    same = repr(inner[place[-1]]) == repr(value)
    inner[place[-1]] = value
    assert same or chosen(altered, **HERE, trace_class="long").use == BASELINE


@given(place=st.sampled_from([path for path in PLACES if path[0] == "entries"]), value=JSON)
def test_an_entry_with_a_new_checksum_still_needs_an_exact_enable(place: list[Any], value: Any) -> None:
    altered = copy.deepcopy(FULL)
    inner = altered
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    try:
        data = sealed(altered)
    except ValueError:  # NaN has no checksum
        return
    if chosen(data, **HERE, trace_class="long").use == CANDIDATE:
        first = data["entries"][0]
        assert (first["use"], first["verdict"], first["trace_class"]) == (CANDIDATE, "enable", ["long"])


USES = st.sampled_from([BASELINE, CANDIDATE, "", "Candidate"])
CLASSES = st.lists(st.sampled_from(["long", "chat"]), max_size=2)
ENTRIES = st.builds(
    lambda use, verdict, classes, when, evidence: entry(
        "r", use, verdict, trace_class=classes, when=when, evidence=evidence
    ),
    USES,
    st.sampled_from([*sorted(VERDICTS), "ENABLE", ""]),
    CLASSES,
    st.sampled_from([{}, {"phase": "decode"}, {"context": [1, 9]}, {"context": [9, 1]}, {"batch": [True, 3]}]),
    st.sampled_from([["run-1"], []]),
)


@given(entries=st.lists(ENTRIES, max_size=4), scope=st.sampled_from(["deployment", "step"]), context=st.integers(0, 12))
def test_only_exact_enables_that_all_agree_yield_the_candidate(
    entries: list[dict[str, Any]], scope: str, context: int
) -> None:
    situation = {"trace_class": "long", "phase": "decode", "context": context, "batch": 2}
    if chosen(document(*entries, scope=scope), **HERE, **situation).use != CANDIDATE:
        return
    speaking = [
        item
        for item in entries
        if (item["trace_class"] or item["when"] or item["verdict"] != "enable")
        and "long" in (item["trace_class"] or ["long"])
        and ("context" not in item["when"] or 1 <= context <= 9)
    ]
    assert speaking
    assert all(
        (item["use"], item["verdict"], item["evidence"]) == (CANDIDATE, "enable", ["run-1"]) for item in speaking
    )


@given(name=st.sampled_from(sorted(FULL)), value=JSON)
def test_no_header_that_kbench_would_not_write_raises(name: str, value: Any) -> None:
    try:
        data = sealed({**FULL, name: value})
    except ValueError:
        return
    choice = chosen(data, **HERE, trace_class="chat")
    assert choice.use == BASELINE and choice.reason.isprintable()


@given(data=st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_other_bytes_are_closed(data: bytes) -> None:
    choice = chosen(data, **HERE, trace_class="long")
    assert choice.use == BASELINE and choice.reason.isprintable()


@given(
    features=st.dictionaries(st.sampled_from([*HERE, *STEP, "trace_class", "x"]), JSON | st.just("long"), max_size=9)
)
def test_no_feature_raises_and_none_but_the_measured_enable(features: dict[str, Any]) -> None:
    choice = chosen(FULL, **{**HERE, "trace_class": "long", **features})
    assert choice.reason.isprintable()
    if choice.use == CANDIDATE:
        assert {**HERE, **features}.items() >= HERE.items() and features.get("trace_class", "long") == "long"


@pytest.mark.parametrize(
    "change",
    [
        {"valid_for": {}},
        {"valid_for": {**FULL["valid_for"], "context": "4096"}},
        {"valid_for": {**FULL["valid_for"], "decode_backend": "x"}},
        {"assert_backend": {}},
        {"default": CANDIDATE},
        {"scope": "world"},
        {"on_mismatch": "ignore"},
        {"created": "2026-06-01T00:00:00"},
        {"expires": "never"},
        {"expires": "0001-01-01T00:00:00+00:00"},
        {"entries": [entry()]},
        {"entries": [of_range()]},
        {"entries": [of_class("long", evidence=[])]},
        {"entries": [of_class("long", verdict="inconclusive")]},
        {"entries": [of_class("long", "a\nb")]},
        {"entries": [of_class("long"), of_class("chat", "chat", BASELINE, "enable", note="a\nb")]},
    ],
)
def test_what_kbench_would_not_write_is_closed(change: dict[str, Any]) -> None:
    choice = chosen(document(of_class("long")) | sealed({**document(of_class("long")), **change}), **HERE)
    assert choice.use == BASELINE and choice.reason.startswith("not a valid selector")


def test_keys_given_twice_and_foreign_keys_are_closed() -> None:
    text = json.dumps(FULL)
    twice = text.replace('"use": "baseline"', '"use": "baseline", "use": "candidate"')
    assert "given twice" in chosen(twice.encode(), **HERE, trace_class="chat").reason
    assert chosen(sealed({**FULL, "signature": "x"}), **HERE, trace_class="long").use == BASELINE
    assert chosen(b"[" * 100_000, **HERE).use == BASELINE
    assert "too large" in chosen(text.encode() + b" " * 2**23, **HERE, trace_class="long").reason


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, "a\0b"):
        assert load(path).choose(**HERE).use == BASELINE


def test_the_checksum_is_that_of_the_ledger_s_canonical_form() -> None:
    content = {name: value for name, value in FULL.items() if name != "sha256"}
    assert FULL["sha256"] == sha256_of(content) and canonical(content)


def test_it_can_be_vendored(tmp_path: Path) -> None:
    """One file, alone, in an interpreter that has nothing but the standard library."""
    shutil.copy(str(selector.__file__), tmp_path / "vendored.py")
    (tmp_path / "selector.json").write_text(json.dumps(FULL))
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import vendored\n"
        f"print(vendored.load({str(tmp_path / 'selector.json')!r}).choose().use)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "baseline\n"


def test_the_documented_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"```python\n(.*?)```", (DOCS / "selector.md").read_text(), re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    recent = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    content = {**FULL, "created": recent, "expires": later}
    Path("selector.json").write_text(json.dumps(sealed(content)))
    exec(compile(block[1], "selector.md", "exec"), {})
    Path("selector.json").write_text(json.dumps(content))
    exec(compile(block[1], "selector.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "attention: candidate (regime long: enable)"
    assert said[1].startswith("attention: baseline (not a valid selector: it was altered")


@pytest.mark.parametrize(
    ("stated", "given", "held"),
    [
        ("570.1", "570.1", True),
        ("570.1", "570.10", False),
        (">=570", "570", True),
        (">=570", "569.99", False),
        (">=570,<600", "580.159.04", True),
        (">=570,<600", "600", False),
        (">=570,<600", "600.0.0", False),
        (">570.1", "570.1.0", False),
        ("==2.13", "2.13.0+cu130", True),
        ("<=2.13.1", "2.13.1", True),
        (">=2.9", "2.10.0", True),
        (">=2.9", "2.10.0rc1", False),
        (">=2.9", "", False),
        (">=2.9", "latest", False),
        (">=2.9", 3, False),
        (">=2.9", ">=2.9", False),
        ("kbench@>=0.1,<0.2", "kbench@0.1.7", True),
        ("kbench@>=0.1,<0.2", "kbench@0.2.0", False),
        ("kbench@>=0.1,<0.2", "vllm@0.1.7", False),
        ("NVIDIA H200*", "NVIDIA H200 NVL", True),
        ("NVIDIA H200*", "NVIDIA H100", False),
    ],
)
def test_a_range_holds_for_what_lies_in_it_and_nothing_else(stated: str, given: Any, held: bool) -> None:
    assert selector.holds(stated, given) is held


@given(st.lists(st.integers(0, 999), min_size=1, max_size=3), st.lists(st.integers(0, 999), min_size=1, max_size=3))
def test_ranges_of_versions_agree_with_packaging(a: list[int], b: list[int]) -> None:
    from packaging.specifiers import SpecifierSet

    found, limit = (".".join(map(str, numbers)) for numbers in (a, b))
    for sign in (">=", "<=", "==", ">", "<"):
        assert selector.holds(sign + limit, found) is (found in SpecifierSet(sign + limit))
