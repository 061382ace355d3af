"""Read a suite: TOML, types and cross-references, all problems at once, each with file, line, key and remedy."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from kbench.errors import Problem, SuiteError, UsageError
from kbench.suite import checks
from kbench.suite.choices import references
from kbench.suite.lines import key_lines, line_of
from kbench.suite.schema import Arm, Suite
from kbench.suite.shapes import Recorded, expanded


@dataclass(frozen=True, slots=True)
class LoadedSuite:
    """A suite, the file that it came from, and what is odd about it."""

    suite: Suite
    path: Path
    warnings: tuple[Problem, ...]
    overridden: tuple[str, ...] = ()
    """Options of the command line that replace something in the file."""
    recorded: Recorded | None = None
    """How often which shape is called, where a file of `[kernel]` says so."""
    without: tuple[str, ...] = ()
    """Implementations to be treated as gone, in both arms."""

    @property
    def root(self) -> Path:
        """Folder that the suite's paths start from."""
        return self.path.parent

    @property
    def baseline(self) -> Arm:
        return self._arm(self.suite.claim.baseline)

    @property
    def candidate(self) -> Arm:
        return self._arm(self.suite.claim.candidate)

    def _arm(self, name: str) -> Arm:
        arm = checks.arm_of(self.suite, name, self.root)
        return arm.model_copy(update={"without": self.without}) if self.without else arm


def load_suite(
    path: Path,
    *,
    seed: int | None = None,
    traces: dict[str, str] | None = None,
    costs: dict[str, str] | None = None,
    without: Sequence[str] = (),
) -> LoadedSuite:
    """Read and check a suite; options of the command line replace its seed, traces and cost grids.

    `without`: implementations to be treated as gone. Raises SuiteError with every problem found.
    """
    text = _read(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SuiteError([_syntax(path, text, error)]) from error
    except RecursionError as error:
        raise SuiteError([Problem("not a suite: nested too deeply", str(path), remedy="correct the file")]) from error
    lines = key_lines(text)

    def problem(where: tuple[str | int, ...], what: str, remedy: str) -> Problem:
        where = tuple(part for part in where if part != "[key]")  # pydantic's mark of a key that is wrong by itself
        line = line_of(lines, where) or lines.get((*where, 0))  # of a list of tables: where the first one stands
        return Problem(what, str(path), line, _dotted(where), remedy)

    _override(data, seed, traces or {}, costs or {})
    try:
        # JSON mode: TOML arrays become tuples and whole numbers floats, while types stay strict otherwise.
        suite = Suite.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise SuiteError(problem(item["loc"], *_explain(item)) for item in _causes(error)) from error
    root = path.parent
    try:
        suite, recorded = expanded(suite, root)
    except UsageError as error:
        raise SuiteError([problem(("kernel",), str(error), "")]) from error
    found = [problem(*item) for item in checks.problems(suite, root)]
    if found:
        raise SuiteError(found)
    given = (
        ("--seed", seed is not None),
        ("--trace", bool(traces)),
        ("--costs", bool(costs)),
        ("--without", bool(without)),
    )
    options = tuple(name for name, used in given if used)
    odd = [problem(*item) for item in checks.warnings(suite)]
    odd += [problem(("kernel",), note, "") for note in (recorded.notes if recorded else ())]
    loaded = LoadedSuite(suite, path, tuple(odd), options, recorded, tuple(sorted(set(without))))
    named = {reference for arm in (loaded.baseline, loaded.candidate) for _, reference in references(arm)}
    for name in loaded.without:
        if name not in named:
            raise UsageError(f"--without {name}: no arm names it", remedy=f"one of {', '.join(sorted(named))}")
    return loaded


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError as error:
        raise SuiteError([Problem("no such suite", str(path), remedy="see kbench list suites")]) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SuiteError([Problem(f"cannot read the suite: {reason}", str(path), remedy="name a TOML file")]) from error


def _syntax(path: Path, text: str, error: tomllib.TOMLDecodeError) -> Problem:
    what, _, place = str(error).partition(" (at ")
    words = place.rstrip(")").replace(",", "").split()
    # Otherwise it is the end of the document.
    line = int(words[1]) if len(words) > 1 and words[0] == "line" else text.rstrip().count("\n") + 1
    return Problem(f"not TOML: {what}", str(path), line, remedy="correct the line")


def _override(data: dict[str, object], seed: int | None, traces: dict[str, str], costs: dict[str, str]) -> None:
    if seed is not None:
        data["seed"] = seed
    workload = data.get("workload")
    if workload is None and (traces or costs):
        option = "--trace" if traces else "--costs"
        raise UsageError(f"{option} given, but the suite has no [workload]", remedy="add the table, or drop the option")
    if isinstance(workload, dict):
        for key, given in (("traces", traces), ("costs", costs)):
            # A path on the command line starts at the working folder, one in the suite at the suite.
            absolute = {name: str(Path(file).absolute()) for name, file in given.items()}
            declared = workload.get(key, {})
            if absolute and isinstance(declared, dict):
                workload[key] = {**declared, **absolute}


def _causes(error: ValidationError) -> list[dict[str, Any]]:
    """Every problem but the consequences of another: a list whose only item is wrong is not also too short."""
    found: list[dict[str, Any]] = [dict(item) for item in error.errors()]
    places = [item["loc"] for item in found]

    def follows(item: dict[str, Any]) -> bool:
        own = item["loc"]
        return item["type"] == "too_short" and any(len(at) > len(own) and at[: len(own)] == own for at in places)

    return [item for item in found if not follows(item)]


def _explain(item: dict[str, Any]) -> tuple[str, str]:
    kind, message = str(item["type"]), str(item["msg"])
    if kind == "extra_forbidden":
        return "unknown key", _known_keys(item["loc"])
    if kind == "missing":
        return "required key is missing", "add it"
    message = message.removeprefix("Value error, ")
    what, _, remedy = message.partition(" | ")
    shown = repr(item.get("input"))
    return f"{what[0].lower()}{what[1:]}" + (f", got {shown}" if len(shown) < 60 else ""), remedy or "correct it"


def _known_keys(where: tuple[str | int, ...]) -> str:
    """The keys of the table that the last part of `where` stands in, the likeliest one first."""
    table: Any = Suite
    for part in where[:-1]:
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            # Inside a list or a mapping of tables: the index or the name leads to the table itself.
            tables = [inner for inner in get_args(table) if isinstance(inner, type) and issubclass(inner, BaseModel)]
            table = tables[0] if tables else None
            continue
        named = {info.alias or name: info.annotation for name, info in table.model_fields.items()}
        table = named.get(str(part))
        tables = [inner for inner in get_args(table) if isinstance(inner, type) and issubclass(inner, BaseModel)]
        if get_origin(table) in (Union, UnionType):
            table = tables[0] if tables else None
    if not (isinstance(table, type) and issubclass(table, BaseModel)):
        return "remove it"
    keys = [info.alias or name for name, info in table.model_fields.items()]
    close = get_close_matches(str(where[-1]), keys, n=1)
    return f"did you mean {close[0]}?" if close else f"remove it, or use one of {', '.join(keys)}"


def _dotted(where: tuple[str | int, ...]) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text
