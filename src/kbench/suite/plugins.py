"""References to code that is not ours: what they name, and what their text tells before anything of it runs.

Owns the grammar and the static look: does the file exist, is it Python, does it have the name. Importing it, and
holding it to the contract, is done where torch is: in a worker.

    FILE.py:NAME       a file, relative to the suite
    FILE.py:NAME@REF   the same file as it was at a git commit, branch or tag: a baseline that a working tree has left
    PACKAGE.MODULE:NAME   an installed module
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kbench.errors import UsageError

_DYNAMIC = frozenset({"globals", "exec", "setattr", "__getattr__", "vars"})
"""Names that can define others at run time: whether something is missing is then not to be seen in the text."""
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)(@(?P<ref>[A-Za-z0-9][\w./~^-]*))?")
FORMS = "write FILE.py:NAME, FILE.py:NAME@REF or PACKAGE.MODULE:NAME"


@dataclass(frozen=True, slots=True)
class Plugin:
    """`file` or `module`, never both; `ref` only with a file."""

    name: str
    file: str = ""
    ref: str = ""
    module: str = ""


def is_plugin(reference: str) -> bool:
    """Whether a reference is meant to name code rather than a catalogue entry."""
    return ":" in reference or reference.endswith(".py")


def parse_plugin(reference: str) -> Plugin:
    """Raises UsageError where the reference has none of the three forms."""
    found = _FILE.fullmatch(reference)
    if found is not None:
        return Plugin(found["name"], file=found["file"], ref=found["ref"] or "")
    if _MODULE.fullmatch(reference) and not reference.partition(":")[0].endswith(".py"):
        module, _, name = reference.partition(":")
        return Plugin(name, module=module)
    raise UsageError(f"plug-in {reference!r} names no function", remedy=FORMS)


def plugin_source(plugin: Plugin, root: Path) -> bytes:
    """The text that a reference stands for. Raises UsageError where there is none; imports nothing of it."""
    if plugin.module:
        return _module_file(plugin.module).read_bytes()
    path = root / plugin.file
    if plugin.ref:
        return _at_ref(plugin, path)
    if not path.is_file():
        raise UsageError(f"no plug-in file {path}", remedy="paths in a suite are relative to it")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"plug-in {path} cannot be read: {error.strerror or error}", remedy="check its permissions"
        ) from error


def plugin_hash(reference: str, root: Path) -> str:
    """SHA-256 of the text that a reference stands for."""
    return hashlib.sha256(plugin_source(parse_plugin(reference), root)).hexdigest()


def plugin_problems(reference: str, root: Path) -> Iterator[tuple[str, str]]:
    """What is wrong with a reference, and the remedy."""
    try:
        plugin = parse_plugin(reference)
        source = plugin_source(plugin, root)
    except UsageError as error:
        yield error.problems[0].what, error.problems[0].remedy
        return
    path = root / plugin.file if plugin.file else plugin.module
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else str(path)
        yield f"plug-in {place} is not Python: {error.msg}", "correct the line"
    except (ValueError, RecursionError) as error:
        yield f"plug-in {path} is not Python: {error}", "name a Python file"
    else:
        names = _names(tree)
        if plugin.name not in names and not names & _DYNAMIC:
            yield f"plug-in {path} has no {plugin.name!r}", f"define it, or correct {reference!r}"


def _at_ref(plugin: Plugin, path: Path) -> bytes:
    folder = path.parent if path.parent.is_dir() else Path()
    shown = subprocess.run(
        ["git", "show", f"{plugin.ref}:./{path.name}"], cwd=folder, capture_output=True, check=False, timeout=60
    )
    if shown.returncode:
        reason = shown.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["git failed"]
        raise UsageError(
            f"plug-in {plugin.file} at {plugin.ref}: {reason[0]}",
            remedy="name a commit, branch or tag that has the file",
        )
    return shown.stdout


def _module_file(module: str) -> Path:
    """The file of an installed module, found without importing anything: a package's `__init__` may do much."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and not rest and spec.origin and spec.origin.endswith(".py"):
        return Path(spec.origin)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder).joinpath(*rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    raise UsageError(f"no module {module}", remedy="install its package, or write FILE.py:NAME")


def _names(tree: ast.Module) -> frozenset[str]:
    """Everything that the file mentions as a name, at any depth; a star import may bring anything."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add("globals" if node.name == "*" else (node.asname or node.name.partition(".")[0]))
    return frozenset(found)
