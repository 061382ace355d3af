"""rule.require_committed: refused before anything is measured, and evidence does not survive a rewritten history."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from driver import FAKE

from kbench.errors import ExitCode, IntegrityError, UsageError
from kbench.plan import Plan, make_plan
from kbench.record import RunRecord
from kbench.run.committed import committed
from kbench.run.execute import execute
from kbench.run.history import History
from kbench.run.loop import Options
from kbench.run.session import Host
from kbench.suite import load_suite


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    found = subprocess.run(
        ("git", "-C", str(folder), *identity, *arguments), capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


@pytest.fixture
def repository(suite: Path) -> Path:
    suite.write_text(suite.read_text().replace("looks = [2]", "looks = [2]\nrequire_committed = true"))
    git(suite.parent, "init", "-q", "-b", "main")
    return suite


def commit(suite: Path) -> str:
    git(suite.parent, "add", suite.name)
    git(suite.parent, "commit", "-q", "-m", "rule")
    return git(suite.parent, "rev-parse", "HEAD")


def plan(suite: Path, **options: int) -> Plan:
    return make_plan(load_suite(suite, **options))


def run(suite: Path) -> RunRecord | None:
    return execute(plan(suite), Options(("step",), suite.parent / "r", Host("cpu", FAKE)))


def refused(suite: Path, **options: int) -> str:
    with pytest.raises(UsageError) as caught:
        committed(plan(suite, **options))
    assert caught.value.exit_code is ExitCode.USAGE
    assert "\n" not in str(caught.value) and caught.value.problems[0].remedy
    return str(caught.value)


def test_a_committed_and_unchanged_suite_is_measured_and_its_commit_kept(repository: Path) -> None:
    head = commit(repository)
    assert run(repository) is not None
    [entry] = [entry for entry in History.read(repository.parent / "r", "loop").entries if entry.kind == "plan"]
    assert entry.body["suite_commit"] == head


def test_nothing_is_measured_before_the_suite_is_committed(repository: Path) -> None:
    with pytest.raises(UsageError, match="not committed"):
        run(repository)
    assert not list((repository.parent / "r").rglob("ledger.jsonl"))
    git(repository.parent, "add", repository.name)  # added is not committed
    assert "not committed" in refused(repository)


def test_a_change_after_the_commit_is_refused(repository: Path) -> None:
    commit(repository)
    repository.write_text(repository.read_text() + "\n# a comment is a change of the file\n")
    assert "differs from the commit" in refused(repository)


def test_an_option_that_replaces_the_file_is_refused(repository: Path) -> None:
    commit(repository)
    assert "--seed replaces what is committed" in refused(repository, seed=7)


def test_no_repository_and_a_rule_that_does_not_ask(suite: Path) -> None:
    assert committed(plan(suite)) == {}
    suite.write_text(suite.read_text().replace("looks = [2]", "looks = [2]\nrequire_committed = true"))
    assert "not a git repository" in refused(suite)


def test_evidence_under_a_commit_that_left_the_history_is_an_integrity_failure(repository: Path) -> None:
    commit(repository)
    assert run(repository) is not None
    git(repository.parent, "commit", "-q", "--amend", "-m", "the same rule, another history")
    with pytest.raises(IntegrityError, match="no ancestor of HEAD") as caught:
        History.read(repository.parent / "r", "loop").require_unchanged(plan(repository))
    assert caught.value.exit_code is ExitCode.INTEGRITY


def test_a_later_commit_changes_nothing(repository: Path) -> None:
    commit(repository)
    assert run(repository) is not None
    (repository.parent / "other.txt").write_text("x")
    git(repository.parent, "add", "other.txt")
    git(repository.parent, "commit", "-q", "-m", "other")
    History.read(repository.parent / "r", "loop").require_unchanged(plan(repository))
