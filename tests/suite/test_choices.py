"""Who computes what, as a variant says it: each contradiction is one line with its place, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbench.catalog import AUTO
from kbench.errors import SuiteError, UsageError
from kbench.plan import make_plan
from kbench.suite import load_suite
from kbench.suite.choices import brings_code, choice_of, registry_of

from .conftest import SUITE, Edit

B = 'extends = "a"\npage_size = 64\n'
FALLBACK = '[[variants.b.fallback]]\nop = "attention.decode"\nuse = "blocked"\n'


def variant(*lines: str, tables: str = "") -> tuple[str, str]:
    """Variant b with these lines; `tables` follow its own."""
    return B, B + "".join(f"{line}\n" for line in lines) + tables


def problems(load: Edit, *edits: tuple[str, str]) -> dict[str, str]:
    """Key → what is wrong, with file and line known for all."""
    with pytest.raises(SuiteError) as caught:
        load(*edits)
    assert all(problem.line for problem in caught.value.problems), str(caught.value)
    return {problem.key: problem.what for problem in caught.value.problems}


def test_a_declared_fallback_is_part_of_the_arm(load: Edit) -> None:
    entry = FALLBACK + f'benchmarked = "{"ab" * 32}"\n'
    loaded = load(variant('policy = "fallback"', tables=entry))
    choice = choice_of(loaded.candidate, "attention.decode")
    assert choice is not None and (choice.policy, choice.chain) == ("fallback", (("blocked", "ab" * 32),))
    other = choice_of(loaded.candidate, "attention.prefill")
    assert other is not None and other.chain == ()
    assert choice_of(loaded.baseline, "attention.decode").policy == "reject"  # type: ignore[union-attr]
    assert choice_of(loaded.candidate, "norm.rmsnorm") is None


@pytest.mark.parametrize(
    ("edit", "key", "what"),
    [
        (variant('policy = "fallback"'), "policy", "policy is fallback, and no fallback is declared"),
        (variant(tables=FALLBACK), "fallback", "fallbacks are declared, and policy is reject"),
        (variant('policy = "auto"', tables=FALLBACK), "fallback", "fallbacks are declared, and policy is auto"),
        (
            variant('policy = "fallback"', tables=FALLBACK.replace("blocked", "sdpa-gather")),
            "fallback[0].use",
            "sdpa-gather falls back to itself",
        ),
        (
            variant('policy = "fallback"', tables=FALLBACK + FALLBACK),
            "fallback[1].use",
            "blocked is declared twice for attention.decode",
        ),
        (
            variant('policy = "fallback"', tables=FALLBACK.replace("attention.decode", "norm.rmsnorm")),
            "fallback[0].op",
            "the variant names nobody for norm.rmsnorm",
        ),
        (
            variant('policy = "fallback"', tables=FALLBACK.replace("blocked", "nobody")),
            "fallback[0].use",
            "no implementation 'nobody' of attention.decode",
        ),
        (
            variant('register = { "blocked@attention.decode" = "mine.py:fn" }'),
            "register.blocked@attention.decode",
            "an implementation named 'blocked' is registered already",
        ),
        (
            variant('register = { "auto@attention.decode" = "mine.py:fn" }'),
            "register.auto@attention.decode",
            "an implementation cannot be named 'auto'",
        ),
        (
            variant('override = { "mine@attention.decode" = "mine.py:fn" }'),
            "override.mine@attention.decode",
            "no implementation 'mine' of attention.decode",
        ),
        (
            variant('register = { "mine@attention.decode" = "blocked" }'),
            "register.mine@attention.decode",
            "'blocked' is no code of yours",
        ),
        (
            variant('register = { "mine@attention.decode" = "none.py:fn" }'),
            "register.mine@attention.decode",
            "no plug-in file",
        ),
        (
            variant('attention = { prefill = "sdpa", decode = "custom" }'),
            "attention.decode",
            "the slot 'custom' of attention.decode is empty",
        ),
        (
            variant('draft = { prefill = "sdpa", decode = "nobody" }'),
            "draft.decode",
            "no implementation 'nobody' of attention.decode",
        ),
    ],
)
def test_every_contradiction_has_its_place(load: Edit, edit: tuple[str, str], key: str, what: str) -> None:
    (Path(load().path).parent / "mine.py").write_text("def fn(q, kv, batch, spec): ...\n")
    found = problems(load, edit)
    assert found[f"variants.b.{key}"].startswith(what), found


def test_a_slot_must_name_an_operation(load: Edit) -> None:
    for slot in ("mine", "mine@attention", "@attention.decode"):
        assert problems(load, variant(f'register = {{ "{slot}" = "mine.py:fn" }}'))


def test_all_reasons_of_all_who_may_serve_are_told_at_once(load: Edit) -> None:
    policy = 'policy = "fallback"'
    found = problems(load, ("page_size = 64", "page_size = 24"), ('"sdpa-gather"', '"blocked"'))
    assert found["variants.b.attention.decode"].startswith("blocked cannot serve this variant: page_size: wants 24")
    edits = (("page_size = 64\n", f"page_size = 24\n{policy}\n"), ('"sdpa-gather"', '"blocked"'))
    with pytest.raises(SuiteError) as caught:
        load(*edits, ("[variants.b.engine]", FALLBACK.replace('"blocked"', '"triton-paged"') + "[variants.b.engine]"))
    text = str(caught.value)
    assert "blocked cannot serve" in text and "triton-paged cannot serve" in text
    loaded = load(*edits, ("[variants.b.engine]", FALLBACK.replace('"blocked"', '"reference"') + "[variants.b.engine]"))
    assert loaded.candidate.fallback[0].use == "reference"


def test_a_suites_own_code_may_take_a_taken_name_only_by_override(load: Edit) -> None:
    root = Path(load().path).parent
    (root / "mine.py").write_text("def fn(q, kv, batch, spec): ...\n")
    loaded = load(variant('override = { "sdpa-gather@attention.decode" = "mine.py:fn" }'))
    assert registry_of(loaded.candidate).get("sdpa-gather", "attention.decode").entry == "mine.py:fn"
    assert registry_of(loaded.baseline).get("sdpa-gather", "attention.decode").entry.startswith("kbench.")
    assert brings_code(loaded.candidate) and not brings_code(loaded.baseline)


# ---------------------------------------------------------------------------------------------- the plan hash


def hashed(load: Edit, *edits: tuple[str, str]) -> tuple[str, str]:
    plan = make_plan(load(*edits))
    return plan.lock_hash, plan.plan_hash


def test_saying_where_the_evidence_is_changes_no_plan(load: Edit) -> None:
    declared = variant('policy = "fallback"', tables=FALLBACK)
    pointed = variant('policy = "fallback"', tables=FALLBACK + f'benchmarked = "{"ab" * 32}"\n')
    assert hashed(load, declared) == hashed(load, pointed)
    assert hashed(load)[0] != hashed(load, declared)[0], "the policy itself is declared"


def test_code_that_may_serve_belongs_to_the_plan(load: Edit) -> None:
    file = Path(load().path).parent / "mine.py"
    edit = variant('policy = "fallback"', tables=FALLBACK.replace("blocked", "mine.py:fn"))
    file.write_text("def fn(q, kv, batch, spec): ...\n")
    first = hashed(load, edit)
    file.write_text("def fn(q, kv, batch, spec): return q\n")
    second = hashed(load, edit)
    assert first[0] == second[0] and first[1] != second[1]
    auto = variant('attention = { prefill = "sdpa", decode = "auto" }')
    assert make_plan(load(auto)).candidate.decode == AUTO


def test_without_is_a_plan_of_its_own(load: Edit) -> None:
    loaded = load(variant('policy = "fallback"', tables=FALLBACK))
    whole, beside = make_plan(loaded), make_plan(load_suite(loaded.path, without=["sdpa-gather"]))
    assert beside.candidate.without == ("sdpa-gather",)
    assert whole.lock_hash == beside.lock_hash and whole.plan_hash != beside.plan_hash
    with pytest.raises(UsageError, match="--without nobody: no arm names it"):
        load_suite(loaded.path, without=["nobody"])


def test_a_suite_that_says_nothing_of_it_hashes_as_ever(load: Edit) -> None:
    """Evidence of before there were policies stays evidence."""
    plan = make_plan(load())
    assert "policy" not in str(plan.declaration) and SUITE.count("policy") == 0
