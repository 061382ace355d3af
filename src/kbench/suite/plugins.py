"""What the text of a plug-in file tells before anything of it runs: does it exist, is it Python, does it have the name.

Owns the static look only. Importing the file, and holding it to the contract, is done where torch is: in a worker.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_DYNAMIC = frozenset({"globals", "exec", "setattr", "__getattr__", "vars"})
"""Names that can define others at run time: whether something is missing is then not to be seen in the text."""


def is_plugin(reference: str) -> bool:
    """Whether a reference is meant to name a file rather than a catalogue entry."""
    return ".py:" in reference or reference.endswith(".py")


def plugin_problems(reference: str, root: Path) -> Iterator[tuple[str, str]]:
    """What is wrong with `FILE.py:NAME`, and the remedy."""
    file, _, name = reference.rpartition(":")
    if not file or not name:
        yield f"plug-in {reference!r} names no function", "write FILE.py:NAME"
        return
    path = root / file
    if not path.is_file():
        yield f"no plug-in file {path}", "paths in a suite are relative to it"
        return
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else str(path)
        yield f"plug-in {place} is not Python: {error.msg}", "correct the line"
    except (ValueError, RecursionError) as error:
        yield f"plug-in {path} is not Python: {error}", "name a Python file"
    except OSError as error:
        yield f"plug-in {path} cannot be read: {error.strerror or error}", "check its permissions"
    else:
        names = _names(tree)
        if name not in names and not names & _DYNAMIC:
            yield f"plug-in {path} has no {name!r}", f"define it, or correct {reference!r}"


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
