"""What `run` and `decide` leave for a CI system: `--junit`, `--github`, `--fail-on`.

Owns where each output goes. Whatever happens, a verdict or an error, the outputs that were asked for say it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.errors import ExitCode, KbenchError, MeasurementError, UsageError

if TYPE_CHECKING:
    from kbench.decide import Decision, Verdict

Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write the verdicts as JUnit XML.")]
GitHub = Annotated[
    bool,
    typer.Option(
        "--github",
        help="Print GitHub annotations on stdout (with --json on stderr); append to $GITHUB_STEP_SUMMARY.",
    ),
]
FailOn = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="KINDS",
        help="Only these verdicts end non-zero: a comma list of disable, inconclusive, missing. "
        "Usage, integrity and measurement errors always do.",
    ),
]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The CI outputs of one command."""

    suite: Path
    as_json: bool
    junit: Path | None
    github: bool
    fail_on: frozenset[Verdict] | None
    """None: every verdict but enable ends non-zero."""

    @classmethod
    def of(
        cls, suite: Path, as_json: bool, junit: Path | None, github: bool, fail_on: str | None, evidence: bool = True
    ) -> Outputs:
        """Check the options before anything is measured. An old JUnit file goes: it must not speak for this command."""
        if not evidence and (junit is not None or github):
            raise UsageError(
                "--junit and --github tell verdicts, and this command reaches none",
                remedy="leave them out, or leave out --exploratory and --dry-run",
            )
        kinds = None
        if fail_on is not None:
            from kbench.report.ci import parse_fail_on

            kinds = parse_fail_on(fail_on)
        if junit is not None:
            try:
                junit.unlink(missing_ok=True)
            except OSError as error:
                what = error.strerror or str(error)
                raise UsageError(
                    f"--junit: cannot replace it: {what}", where=str(junit), remedy="name a file"
                ) from error
        return cls(suite, as_json, junit, github, kinds)

    def exit_code(self, decision: Decision) -> ExitCode:
        from kbench.report.ci import softened

        return softened(decision, self.fail_on)

    def tell(self, decision: Decision, ledger_head: str) -> None:
        """A verdict, in every output that was asked for."""
        from kbench.report import ci, junit

        lines = ci.regime_lines(self.suite, decision) if self.github or self.junit else {}
        if self.junit is not None:
            junit.write_junit(junit.junit(decision, self._file, lines), self.junit)
        if not self.github:
            return
        self._annotate(ci.github_annotations(decision, self._file, lines))
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            try:
                ci.append_summary(decision, Path(summary), ledger_head=ledger_head)
            except MeasurementError as error:
                typer.echo(f"kbench: warning: {error}", err=True)

    @contextmanager
    def whatever_happens(self) -> Iterator[None]:
        """Tell an error that ends the command in the same outputs, and let it end the command."""
        try:
            yield
        except KbenchError as error:
            self._tell_error(error)
            raise

    def _tell_error(self, error: KbenchError) -> None:
        from kbench.report import ci, junit

        if self.github:
            self._annotate(ci.error_annotations(error.problems, self._file))
        if self.junit is not None:
            try:
                junit.write_junit(junit.junit_error(self.suite.stem, error.problems, self._file), self.junit)
            except MeasurementError as second:
                typer.echo(f"kbench: warning: {second}", err=True)

    def _annotate(self, commands: tuple[str, ...]) -> None:
        # GitHub reads commands from both streams; with --json stdout holds one document and nothing else.
        for command in commands:
            typer.echo(command, err=self.as_json)

    @property
    def _file(self) -> str:
        """The suite relative to the repository, as annotations want it."""
        root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd()).resolve()
        file = self.suite.resolve()
        return file.relative_to(root).as_posix() if file.is_relative_to(root) else self.suite.as_posix()
