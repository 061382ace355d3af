"""References to code: three forms, found without running it, identified by its text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kbench.errors import UsageError
from kbench.suite.plugins import Plugin, is_plugin, parse_plugin, plugin_hash, plugin_problems, plugin_source


def git(folder: Path, *words: str) -> None:
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text("def old(x): return x\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    (tmp_path / "sub" / "mine.py").write_text("def new(x): return x\n")
    return tmp_path


def test_three_forms_and_what_is_none() -> None:
    assert parse_plugin("a/b.py:fn") == Plugin("fn", file="a/b.py")
    assert parse_plugin("a/b.py:fn@HEAD~1") == Plugin("fn", file="a/b.py", ref="HEAD~1")
    assert parse_plugin("pkg.mod:fn") == Plugin("fn", module="pkg.mod")
    assert is_plugin("pkg.mod:fn") and is_plugin("a.py") and not is_plugin("sdpa-gather")
    for text in ("a.py", "a.py:", ":fn", "a.py:fn@", "a.py:fn@-x", "a b:fn", "a.py:1"):
        with pytest.raises(UsageError, match="names no function"):
            parse_plugin(text)


def test_a_baseline_is_the_file_as_it_was(repository: Path) -> None:
    folder = repository / "sub"
    assert b"old" in plugin_source(parse_plugin("mine.py:old@HEAD"), folder)
    assert plugin_hash("mine.py:old@HEAD", folder) == plugin_hash("mine.py:old@main", folder)
    assert plugin_hash("mine.py:old@HEAD", folder) != plugin_hash("mine.py:new", folder)
    assert list(plugin_problems("mine.py:old@HEAD", folder)) == []
    assert list(plugin_problems("sub/mine.py:new", repository)) == []
    [(what, _)] = plugin_problems("mine.py:old", folder)
    assert "has no 'old'" in what


@pytest.mark.parametrize("reference", ["mine.py:old@gone", "gone.py:old@HEAD", "gone.py:fn", "no_such_package.mod:fn"])
def test_what_is_not_there_is_one_problem_with_a_remedy(repository: Path, reference: str) -> None:
    [(what, remedy)] = plugin_problems(reference, repository / "sub")
    assert what and remedy and "\n" not in what


def test_a_module_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "strange_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "mod.py").write_text("def fn(x): return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(plugin_problems("strange_package.mod:fn", tmp_path)) == []
    [(what, _)] = plugin_problems("strange_package.mod:gone", tmp_path)
    assert "has no 'gone'" in what
