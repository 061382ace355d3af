"""The line of every key agrees with where the text was written, whatever TOML is around it."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.suite.lines import key_lines, line_of

TEXT = """\
# a comment with [brackets] and = signs
top = "a # no comment"
a.b = 1                     # dotted
"quoted key".'x.y' = 2

[table]   # [not.this]
text = \"\"\"
[fake]
key = 1
\"\"\"
after = 3
raw = '''
[fake2]'''
list = [
  "[[fake3]]",  # ]
  { inner = 1, deep = { x = 2 } },
]
last = { one = 1, two = [1, 2] }

[[array]]
n = 0
  [array.sub]
  s = 0
  [[array.inner]]
  i = 0
  [[array.inner]]
  i = 1
[[array]]
n = 1
  [[array.inner]]
  i = 0
[ spaced . "name" ]
z = 1.5
"""
EXPECTED = {
    ("top",): 2,
    ("a",): 3,
    ("a", "b"): 3,
    ("quoted key", "x.y"): 4,
    ("table",): 6,
    ("table", "text"): 7,
    ("table", "after"): 11,
    ("table", "raw"): 12,
    ("table", "list"): 14,
    ("table", "list", 0): 15,
    ("table", "list", 1): 16,
    ("table", "list", 1, "inner"): 16,
    ("table", "list", 1, "deep", "x"): 16,
    ("table", "last"): 18,
    ("table", "last", "two", 1): 18,
    ("array", 0): 20,
    ("array", 0, "n"): 21,
    ("array", 0, "sub", "s"): 23,
    ("array", 0, "inner", 0, "i"): 25,
    ("array", 0, "inner", 1, "i"): 27,
    ("array", 1): 28,
    ("array", 1, "n"): 29,
    ("array", 1, "inner", 0, "i"): 31,
    ("spaced", "name", "z"): 33,
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_kind_of_key_has_its_line(newline: str) -> None:
    tomllib.loads(TEXT.replace("\n", newline))
    lines = key_lines(TEXT.replace("\n", newline))
    assert {path: lines.get(path) for path in EXPECTED} == EXPECTED
    assert not any("fake" in str(path) for path in lines)


def test_a_missing_key_has_the_line_of_the_table_around_it() -> None:
    lines = key_lines(TEXT)
    assert line_of(lines, ("array", 0, "inner", 1, "missing")) == 26
    assert line_of(lines, ("table", "list", 1, "deep", "missing")) == 16
    assert line_of(lines, ("nowhere",)) is None


def test_only_line_feeds_end_lines() -> None:
    assert key_lines('a = "\u2028\x85"\nb = 1\n')[("b",)] == 2


def paths(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return {path} | {deep for key, inner in items for deep in paths(inner, (*path, key))}


keys = st.one_of(
    st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True),
    st.text(st.characters(codec="utf-8", categories=("L", "P", "S", "Zs")), min_size=1, max_size=6),
)
scalars = st.one_of(
    st.integers(-9, 9),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.text(st.sampled_from("ab\"'\\#[]{}=.,\n\u2028 "), max_size=12),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=8,
)
tables = st.dictionaries(keys, values, max_size=4)
documents = st.dictionaries(keys, st.one_of(tables, st.lists(tables, min_size=1, max_size=3)), max_size=4)


class Writer:
    """Writes a document as TOML and remembers on which line it put what."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._choose = lambda *options: draw(st.sampled_from(options))
        self.text = ""
        self.lines: dict[tuple[str | int, ...], int] = {}

    def write(self, document: dict[str, Any]) -> None:
        for name, table in document.items():
            for index, each in enumerate(table) if isinstance(table, list) else [(None, table)]:
                path = (name,) if index is None else (name, index)
                self._add(self._choose("", "\n", "# [x]\ny = 1\n".replace("y", "# y")))
                self.lines[path] = self._line
                self._add(f"[{self._key(name)}]\n" if index is None else f"[[ {self._key(name)}]] # c\n")
                for key, value in each.items():
                    self.lines[(*path, key)] = self._line
                    self._add(f"{self._choose('', '  ')}{self._key(key)} = ")
                    self._value(value, (*path, key))
                    self._add(self._choose("\n", " # [[a]] = {\n", "\n\n"))

    @property
    def _line(self) -> int:
        return self.text.count("\n") + 1

    def _add(self, text: str) -> None:
        self.text += text

    def _key(self, key: str) -> str:
        bare = key.isascii() and all(letter.isalnum() or letter in "_-" for letter in key)
        return key if bare and self._choose(True, False) else json.dumps(key, ensure_ascii=False)

    def _value(self, value: Any, path: tuple[str | int, ...], *, inline: bool = False) -> None:
        """`inline`: between braces, where TOML allows no line to end outside of a string."""
        if isinstance(value, list):
            self._add("[")
            for index, each in enumerate(value):
                self._add("" if inline else self._choose("", "\n  ", " # ]\n"))
                self.lines[(*path, index)] = self._line
                self._value(each, (*path, index), inline=inline)
                self._add(",")
            self._add("]")
        elif isinstance(value, dict):
            self._add("{")
            for position, (key, each) in enumerate(value.items()):
                self._add(", " if position else " ")
                self.lines[(*path, key)] = self._line
                self._add(f"{self._key(key)} = ")
                self._value(each, (*path, key), inline=True)
            self._add("}")
        elif isinstance(value, str):
            self._string(value)
        else:
            self._add(json.dumps(value))

    def _string(self, value: str) -> None:
        styles = ["basic", "long"]
        if "'" not in value and "\n" not in value:
            styles.append("literal")
        if "'''" not in value and not value.endswith("'") and not value.startswith("\n"):
            styles.append("long literal")
        style = self._choose(*styles)
        escaped = value.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        if escaped.endswith('"'):
            escaped = escaped[:-1] + '\\"'
        written = {
            "basic": json.dumps(value, ensure_ascii=False),
            "long": f'"""\n{escaped}"""',
            "literal": f"'{value}'",
            "long literal": f"'''{value}'''",
        }
        self._add(written[style])


@settings(max_examples=60, deadline=None)
@given(st.data(), documents)
def test_generated_tables(data: st.DataObject, document: dict[str, Any]) -> None:
    writer = Writer(lambda strategy: data.draw(strategy))
    writer.write(document)
    assert tomllib.loads(writer.text) == document
    lines = key_lines(writer.text)
    assert {path: lines.get(path) for path in writer.lines} == writer.lines
    # Nothing is found that is not there: an array table itself has no line, only its elements have.
    assert set(lines) <= paths(document)
