"""Reading a suite: what stands in the file is what is loaded, and everything wrong is said at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbench.errors import SuiteError
from kbench.suite import load_suite
from suite.conftest import SUITE, Edit, problems

SHIPPED = sorted((Path(__file__).parents[2] / "suites").glob("*.toml"))


def test_a_suite_is_what_its_file_says(load: Edit) -> None:
    loaded = load()
    assert loaded.warnings == ()
    assert loaded.suite.claim.name == "claim"
    assert loaded.suite.rule.looks == (6, 8)
    assert [clause.metric for clause in loaded.suite.regime[0].require] == ["step_time", "goodput"]


def test_a_variant_takes_what_it_extends_and_overrides_the_rest(load: Edit) -> None:
    loaded = load()
    a, b = loaded.baseline, loaded.candidate
    assert (a.name, a.page_size, a.engine.max_seqs, a.decode) == ("a", 16, 16, "sdpa-gather")
    assert (b.name, b.page_size, b.engine.max_seqs, b.decode) == ("b", 64, 8, "sdpa-gather")
    assert a.engine.kv_tokens == b.engine.kv_tokens == 4096
    assert a.layout == b.layout == "NHD"


def test_all_problems_at_once_each_with_its_line_and_key(load: Edit) -> None:
    found = problems(
        load,
        ("seed = 1", "sed = 1"),
        ('preset = "tiny"', 'preset = "tinny"'),
        ("kv_tokens = 4096", 'kv_tokens = "4096"'),
        ("max_seqs = 8", "max_seq = 8"),
        ('points = ["1*1@127"]\n[step]', 'points = ["1*1@127",\n "1*1at127"]\n[step]'),
        ('baseline = "a"\n', ""),
        ("margin = 0.03", "margin = -0.03"),
    )
    # One line is gone before line 6 and one is new after line 20.
    assert {(problem.line, problem.key) for problem in found} == {
        (2, "sed"),
        (3, "claim.baseline"),
        (7, "model.preset"),
        (9, "engine.kv_tokens"),
        (18, "variants.b.engine.max_seq"),
        (21, "kernel.points[1]"),
        (41, "regime[0].require[1].margin"),
    }


def test_unknown_keys_are_refused_in_every_table(load: Edit) -> None:
    tables = ["[claim]", "[model]", "[engine]", "[variants.a]", "[kernel]", "[step]", "[workload]", "[rule]"]
    tables += ["[[regime]]", "  [[regime.require]]"]
    for table in tables:
        [problem] = problems(load, (f"{table}\n", f"{table}\nnonsense = 1\n"))
        assert problem.what == "unknown key"
        line = SUITE[: SUITE.index(f"{table}\n")].count("\n") + 2
        assert (problem.line, problem.key.rpartition(".")[2]) == (line, "nonsense")


@pytest.mark.parametrize(
    ("text", "line"),
    [("seed = ", 1), ('schema = "x"\n\n[claim\n', 3), ("a = 1\na = 2\n", 2), ('x = "\n', 1)],
)
def test_what_is_not_toml_has_its_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(text)
    with pytest.raises(SuiteError) as caught:
        load_suite(path)
    [problem] = caught.value.problems
    assert problem.line == line
    assert "not TOML" in problem.what


def test_an_unfinished_file_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text('[claim]\nname = """\nnever closed')
    with pytest.raises(SuiteError) as caught:
        load_suite(path)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("kind", ["absent", "folder", "bytes", "empty"])
def test_what_is_no_suite(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "suite.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    elif kind == "empty":
        path.touch()
    with pytest.raises(SuiteError) as caught:
        load_suite(path)
    assert all(problem.file == str(path) and problem.remedy for problem in caught.value.problems)


def test_values_keep_their_types(load: Edit) -> None:
    """A whole number is a number wherever one is wanted; a string, a date or a truth value never is."""
    assert load(("margin = 0.03", "margin = 1")).suite.regime[0].require[1].margin == 1.0
    for value in ('"0.03"', "true", "1979-05-27", "nan", "inf"):
        [problem] = problems(load, ("margin = 0.03", f"margin = {value}"))
        assert problem.line == 41


def test_the_command_line_replaces_seed_and_traces(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(SUITE)
    mine = tmp_path / "mine.parquet"
    mine.touch()
    loaded = load_suite(path, seed=7, traces={"chat": str(mine)})
    assert loaded.suite.seed == 7
    assert loaded.candidate.seed == 7
    assert loaded.suite.workload is not None
    assert loaded.suite.workload.traces == {"chat": str(mine)}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_suites_that_ship_are_sound(path: Path) -> None:
    """But for traces and grids that the user brings."""
    try:
        loaded = load_suite(path)
    except SuiteError as error:
        assert all("trace" in item.remedy or "costs" in item.remedy for item in error.problems), str(error)
    else:
        assert loaded.suite.regime
