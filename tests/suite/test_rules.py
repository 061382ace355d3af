"""Keys of [rule]: closed, with today's defaults, and refused where they could have no effect."""

from __future__ import annotations

import pytest

from kbench.plan import make_plan

from .conftest import Edit, problems

RULE = "[rule]\nlooks = [6, 8]\n"


def rule(text: str) -> tuple[str, str]:
    return RULE, f"{RULE}{text}\n"


def test_the_defaults_are_those_of_before(load: Edit) -> None:
    found = load().suite.rule
    assert found.void_codes == ("baseline_crash",)
    assert (found.max_void_fraction, found.max_runs, found.require_committed, found.power) == (1.0, None, False, None)
    assert found.diagnostics.contaminated == "report"
    assert found.validity.model_dump() == {"gpu": None, "driver": None, "torch": None, "kbench": None}


@pytest.mark.parametrize(
    "text",
    [
        'void_codes = ["throttle", "ecc", "gpu_lost", "wrong_backend", "host_contention", "baseline_crash"]',
        "void_codes = []",
        "max_void_fraction = 0.1",
        "max_runs = 3",
        "require_committed = true",
        "[rule.power]\nat_saving = 0.05",
        '[rule.validity]\ngpu = "NVIDIA H200*"\ndriver = ">=570,<600"\ntorch = ">=2.9"\nkbench = "==0.1"',
        '[rule.diagnostics]\ncontaminated = "inconclusive"',
        "[rule.tolerance.float32]\nkernel = 9e-7",
        "[rule.tolerance.float32]\nattention = 1e-5\nlogits = 1e-5",
    ],
)
def test_every_key_is_accepted_and_part_of_the_lock(load: Edit, text: str) -> None:
    before = make_plan(load())
    after = make_plan(load(rule(text)))
    assert before.lock_hash != after.lock_hash and before.plan_hash != after.plan_hash


def test_a_default_that_is_written_out_is_no_change(load: Edit) -> None:
    text = 'void_codes = ["baseline_crash"]\nmax_void_fraction = 1.0\nrequire_committed = false\n'
    assert make_plan(load(rule(text))).lock_hash == make_plan(load()).lock_hash


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('void_codes = ["bad_weather"]', "rule.void_codes[0]"),
        ('void_codes = ["ecc", "ecc"]', "rule.void_codes[1]"),
        ("max_void_fraction = 1.5", "rule.max_void_fraction"),
        ("max_runs = 0", "rule.max_runs"),
        ('require_committed = "yes"', "rule.require_committed"),
        ("[rule.power]\ntarget = 0.9", "rule.power.at_saving"),
        ("[rule.power]\nat_saving = 0.02", "rule.power.at_saving"),
        ("[rule.power]\nat_saving = 0.05\ntarget = 0.4", "rule.power.target"),
        ('[rule.validity]\ndriver = "570"', "rule.validity.driver"),
        ('[rule.validity]\ntorch = ">=2.9 "', "rule.validity.torch"),
        ('[rule.validity]\ngpu = "*"', "rule.validity.gpu"),
        ('[rule.validity]\ncuda = ">=13"', "rule.validity.cuda"),
        ('[rule.diagnostics]\ncontaminated = "disable"', "rule.diagnostics.contaminated"),
        ("[rule.tolerance.bfloat16]\nfactor = 2.0", "rule.tolerance.bfloat16.factor"),
        ("[rule.tolerance.float64]\nkernel = 1e-13", "rule.tolerance.float64"),
        ("[rule.tolerance.float32]\nkernel = 0.0", "rule.tolerance.float32.kernel"),
        ("[rule.tolerance.float32]\nkernel = nan", "rule.tolerance.float32.kernel"),
        ("[rule.tolerance.float32]\nkernel = 1e-6", "rule.tolerance.float32.kernel"),
        ("[rule.tolerance.float16]\nkernel = 1e-3", "rule.tolerance.float16.kernel"),
        ("[rule.tolerance.bfloat16]\nkernel = 1e-2", "rule.tolerance.bfloat16.kernel"),
        ("[rule.tolerance.bfloat16]\nattention = 2e-2", "rule.tolerance.bfloat16.attention"),
        ("[rule.tolerance.float32]\nlogits = 2e-4", "rule.tolerance.float32.logits"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(load: Edit, text: str, key: str) -> None:
    found = problems(load, rule(text))
    assert [problem.key for problem in found] == [key]
    assert found[0].line


def test_throttle_needs_a_level_that_reads_the_device_s_clock(load: Edit) -> None:
    [found] = problems(load, rule('void_codes = ["throttle"]'), ('[kernel]\npoints = ["1*1@127"]\n', ""))
    assert "nothing can raise throttle" in found.what


def test_a_loose_tolerance_names_the_default_and_the_remedy(load: Edit) -> None:
    [found] = problems(load, rule("[rule.tolerance.bfloat16]\nkernel = 1e-2"))
    assert found.what == "0.01 is not stricter than the default 0.004 of bfloat16"
    assert found.remedy == "a value below 0.004, or leave it out"


def test_a_tolerance_below_rounding_and_one_of_no_model_are_warned_about(load: Edit) -> None:
    said = [problem.what for problem in load(rule("[rule.tolerance.float32]\nkernel = 1e-9")).warnings]
    assert any("only exact answers pass" in what for what in said)
    said = [problem.what for problem in load(rule("[rule.tolerance.bfloat16]\nlogits = 5e-3")).warnings]
    assert any("no step is bfloat16" in what for what in said)


def test_odd_rules_are_warned_about(load: Edit) -> None:
    said = [problem.what for problem in load(rule("void_codes = []")).warnings]
    assert any("crash of the baseline is no void" in what for what in said)
    edits = ('test = "superiority"\n  min_saving = 0.02', 'test = "noninferiority"\n  margin = 0.02')
    said = [problem.what for problem in load(rule("[rule.power]\nat_saving = 0.05"), edits).warnings]
    assert any("no clause asks for a saving" in what for what in said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  margin = 0.03\n", '  margin = 0.03\n  across = "weighted"\n', "no cells to weigh"),
        (
            '  metric = "step_time"\n',
            '  metric = "conversion_time"\n  across = "weighted"\n',
            "conversion_time is taken once a session",
        ),
    ],
)
def test_a_clause_that_cannot_be_weighed_is_refused(load: Edit, old: str, new: str, said: str) -> None:
    [found] = problems(load, (old, new))
    assert said in found.what and found.key.endswith(".across")
