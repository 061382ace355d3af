"""The error tree and the exit codes.

    KbenchError
    ├── UsageError          2   a suite, trace, plug-in or option is not what it should be
    │   ├── SuiteError          all problems of one suite file at once
    │   └── TraceError          a trace file, row or field
    ├── EvidenceError       4   something that the question needs was not measured
    ├── IntegrityError      5   an edited rule, a broken ledger, the wrong backend
    └── MeasurementError    6   the measurement itself failed

Every error is one line for people: what is wrong, where, and what to do about it. This module knows nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status means; `worst` says which wins when several apply."""

    DONE = 0
    DISABLE = 1
    USAGE = 2
    INCONCLUSIVE = 3
    MISSING = 4
    INTEGRITY = 5
    MEASUREMENT = 6

    @staticmethod
    def worst(codes: Iterable[ExitCode]) -> ExitCode:
        """The code that wins: 2 (nothing could be asked), then 5 > 6 > 1 > 4 > 3 > 0."""
        order = (
            ExitCode.USAGE,
            ExitCode.INTEGRITY,
            ExitCode.MEASUREMENT,
            ExitCode.DISABLE,
            ExitCode.MISSING,
            ExitCode.INCONCLUSIVE,
            ExitCode.DONE,
        )
        present = set(codes)
        return next((code for code in order if code in present), ExitCode.DONE)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with one place in one file."""

    what: str
    file: str = ""
    line: int | None = None
    key: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        place = self.file + (f":{self.line}" if self.line is not None else "")
        parts = [part for part in (place, self.key) if part]
        head = ": ".join([*parts, self.what])
        return f"{head} ({self.remedy})" if self.remedy else head


class KbenchError(Exception):
    """A failure that a person can act on. `str()` is one line a problem."""

    exit_code: ExitCode = ExitCode.MEASUREMENT

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(what=what, file=where, remedy=remedy),)
        super().__init__(what, where, remedy)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class UsageError(KbenchError):
    """The user asked for something that does not exist or does not fit."""

    exit_code = ExitCode.USAGE


class SuiteError(UsageError):
    """A suite file with one or more problems, all of them reported at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        found = tuple(problems)
        super().__init__(found[0].what if found else "invalid suite")
        self.problems = found


class TraceError(UsageError):
    """A trace file, row or field that cannot be used."""

    def __init__(
        self, what: str, *, file: str = "", line: int | None = None, field: str = "", remedy: str = ""
    ) -> None:
        super().__init__(what)
        self.problems = (Problem(what=what, file=file, line=line, key=field, remedy=remedy),)


class EvidenceError(KbenchError):
    """Evidence that the question needs is missing."""

    exit_code = ExitCode.MISSING


class IntegrityError(KbenchError):
    """What was declared and what is there do not agree."""

    exit_code = ExitCode.INTEGRITY


class MeasurementError(KbenchError):
    """A measurement could not be taken or recorded."""

    exit_code = ExitCode.MEASUREMENT
