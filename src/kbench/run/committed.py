"""Whether a suite file stands in git as it is read: who committed the rule cannot have written it afterwards.

Owns the questions to git. It changes nothing, and asks nothing of a suite that does not require it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from kbench.errors import IntegrityError, UsageError
from kbench.plan import Plan

GIT_TIMEOUT_S = 30.0


def committed(plan: Plan) -> dict[str, Any]:
    """What the ledger keeps of it: `suite_commit`, nothing where the rule does not require one.

    UsageError (exit 2) where the file is not in HEAD as it is on disk, or is not what the plan was made from.
    """
    if not plan.loaded.suite.rule.require_committed:
        return {}
    file = plan.loaded.path.resolve()
    folder, spelled = file.parent, f"./{file.name}"
    head = _git(folder, "rev-parse", "--verify", "--quiet", f"HEAD:{spelled}")
    if head is None:
        raise _refused(file, "rule.require_committed: the suite is not committed", "git add it and commit it, then run")
    if _git(folder, "hash-object", "--", spelled) != head:
        raise _refused(
            file, "rule.require_committed: the suite differs from the commit", "commit the change, or git restore it"
        )
    if plan.loaded.overridden:
        named = ", ".join(plan.loaded.overridden)
        raise _refused(file, f"rule.require_committed: {named} replaces what is committed", "write it into the suite")
    commit = _git(folder, "log", "-1", "--format=%H", "--", spelled)
    if not commit:
        raise _refused(file, "rule.require_committed: git names no commit of the suite", "commit it, then run")
    return {"suite_commit": commit}


def require_ancestor(plan: Plan, commit: str) -> None:
    """IntegrityError (exit 5) where the commit that evidence was measured under is no longer part of HEAD's history."""
    if not plan.loaded.suite.rule.require_committed:
        return
    folder = plan.loaded.path.resolve().parent
    if _git(folder, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        raise IntegrityError(
            f"rule.require_committed: evidence rests on commit {commit[:12]}, which is no ancestor of HEAD",
            where=str(plan.loaded.path),
            remedy="check out a branch that holds it; a rewritten history proves nothing",
        )


def _refused(file: Path, what: str, remedy: str) -> UsageError:
    return UsageError(what, where=str(file), remedy=remedy)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it says no. UsageError where there is no git or no repository."""
    # Variables of a surrounding hook must not point to another repository, and no lock is taken for a question.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment = {**kept, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        found = subprocess.run(
            ("git", "-C", str(folder), *arguments),
            capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        remedy = "install git, or leave out rule.require_committed"
        raise _refused(
            folder, f"rule.require_committed: git does not answer: {type(error).__name__}", remedy
        ) from error
    if found.returncode == 0:
        return found.stdout.strip()
    if "not a git repository" in found.stderr or "dubious ownership" in found.stderr:
        said = found.stderr.strip().splitlines()[0].removeprefix("fatal: ")
        raise _refused(folder, f"rule.require_committed: {said}", "keep the suite in a git repository of your own")
    return None
