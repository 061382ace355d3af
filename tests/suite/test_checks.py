"""What one table of a suite says about another."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.conftest import Edit, problems

SUPERIORITY = '  test = "superiority"\n  min_saving = 0.02\n'
CASES = {
    "no such variant": (('candidate = "b"', 'candidate = "c"'), 6, "claim.candidate", "no variant 'c'"),
    "the same variant": (('candidate = "b"', 'candidate = "a"'), 6, "claim.candidate", "same variant"),
    "two models": (('preset = "tiny"', 'preset = "tiny"\ncheckpoint = "x"'), 7, "model", "exactly one"),
    "no model": (('preset = "tiny"', ""), 7, "model", "exactly one"),
    "extends itself": (('extends = "a"', 'extends = "b"'), 15, "variants.b", "b → b"),
    "extends nobody": (('extends = "a"', 'extends = "z"'), 15, "variants.b", "no variant 'z'"),
    "no attention": (('extends = "a"', ""), 15, "variants.b", "no attention"),
    "no such kernel": (('"sdpa-gather"', '"magic"'), 13, "variants.a.attention.decode", "magic"),
    "kernel of another phase": (('prefill = "sdpa"', 'prefill = "blocked"'), 13, "variants.a.attention.prefill", ""),
    "no such plug-in": (('"sdpa-gather"', '"no.py:fn"'), 13, "variants.a.attention.decode", "no plug-in file"),
    "no such trace": (('chat = "chat.parquet"', 'chat = "gone.parquet"'), 25, "workload.traces.chat", "no trace"),
    "grid of nobody": (("[rule]", 'costs = { z = "chat.parquet" }\n[rule]'), 26, "workload.costs.z", "no variant"),
    "no such grid": (("[rule]", 'costs = { a = "g.parquet" }\n[rule]'), 26, "workload.costs.a", "no cost grid"),
    "two rates": (
        ("[rule]", 'rate = "1x"\nrequests_per_s = 2.0\n[rule]'),
        26,
        "workload.rate",
        "exclude each other",
    ),
    "two limits": (
        ("[rule]", 'slo = { ttft = "5x", ttft_ms = 3.0 }\n[rule]'),
        26,
        "workload.slo.ttft",
        "exclude each other",
    ),
    "no limit": (("[rule]", "slo = {}\n[rule]"), 26, "workload.slo", "no limit"),
    "looks go back": (("looks = [6, 8]", "looks = [8, 6]"), 27, "rule.looks", "[8, 6]"),
    "looks repeat": (("looks = [6, 8]", "looks = [6, 6]"), 27, "rule.looks", "[6, 6]"),
    "one session": (("looks = [6, 8]", "looks = [1]"), 27, "rule.looks", "[1]"),
    "no such class": (('trace_class = ["chat"]', 'trace_class = ["chit"]'), 30, "regime[0].trace_class", "chit"),
    "a small pool": (("kv_tokens = 4096", "kv_tokens = 64"), 15, "variants.b", "holds no two pages"),
    "metric of another level": (('metric = "step_time"', 'metric = "goodput"'), 34, "regime[0].require[0].metric", ""),
    "threshold missing": (("  min_saving = 0.02\n", ""), 32, "regime[0].require[0]", "needs min_saving"),
    "another threshold": (
        (SUPERIORITY, SUPERIORITY + "  margin = 0.1\n"),
        37,
        "regime[0].require[0].margin",
        "not margin",
    ),
    "a mode too many": (
        ('metric = "step_time"', 'metric = "step_time"\n  mode = "exec"'),
        35,
        "regime[0].require[0].mode",
        "has no mode",
    ),
    "modelled outputs": (
        ('metric = "goodput"', 'metric = "output_divergence"'),
        37,
        "regime[0].require[1].mode",
        "really computed",
    ),
    "a workload without classes": (
        ('trace_class = ["chat"]\n', ""),
        36,
        "regime[0].require[1]",
        "needs trace classes",
    ),
    "a step without points": (
        ('trace_class = ["chat"]\npoints = ["1*1@127"]\n', 'trace_class = ["chat"]\n'),
        31,
        "regime[0].require[0]",
        "needs points",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_contradiction_is_named_where_it_stands(load: Edit, name: str) -> None:
    edit, line, key, what = CASES[name]
    found = problems(load, edit)
    assert any((item.line, item.key) == (line, key) and what in item.what for item in found), [*map(str, found)]


def test_a_level_that_a_clause_needs_must_be_there(load: Edit) -> None:
    [problem] = problems(load, ('[step]\npoints = ["1*1@127"]\n', ""))
    assert (problem.key, problem.what) == ("regime[0].require[0].level", "the suite has no [step]")


def test_shared_state_cannot_be_switched_per_step(load: Edit) -> None:
    edits = [
        ('candidate = "b"', 'candidate = "b"\nchanges_shared_state = true'),
        ('id = "first"', 'id = "first"\nwhen = { context = [1, 127] }'),
    ]
    assert "regime[0].when" in {problem.key for problem in problems(load, *edits)}


def test_two_regimes_need_two_names(load: Edit) -> None:
    again = '[[regime]]\nid = "first"\npoints = ["1*1@127"]\n[[regime.require]]\nlevel = "step"\n'
    again += 'metric = "step_time"\ntest = "superiority"\nmin_saving = 0.02\n'
    [problem] = problems(load, ("margin = 0.03\n", "margin = 0.03\n" + again))
    assert (problem.line, problem.key) == (43, "regime[1].id")


def test_a_plugin_beside_the_suite_is_found(load: Edit, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def attend(q, kv, batch, spec): ...\n")
    assert load(('"sdpa-gather"', '"mine.py:attend"')).baseline.decode == "mine.py:attend"


def test_what_is_odd_but_allowed_is_a_warning(load: Edit) -> None:
    unnamed = load(('traces = { chat = "chat.parquet" }', 'traces = { chat = "chat.parquet", b = "chat.parquet" }'))
    assert [warning.key for warning in unnamed.warnings] == ["workload.traces.b"]
    unmeasured = load(('trace_class = ["chat"]\npoints = ["1*1@127"]', 'trace_class = ["chat"]\npoints = ["2*1@127"]'))
    assert [warning.key for warning in unmeasured.warnings] == ["regime[0].points"]
    assert "missing-evidence" in unmeasured.warnings[0].remedy


def test_a_point_is_measured_however_it_is_written(load: Edit) -> None:
    loaded = load(('trace_class = ["chat"]\npoints = ["1*1@127"]', 'trace_class = ["chat"]\npoints = ["1@127"]'))
    assert loaded.warnings == ()
