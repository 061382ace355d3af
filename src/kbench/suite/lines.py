"""Where a key stands in a TOML file.

`tomllib` gives values without positions, so errors could not name a line. This reader follows headers, keys and the
nesting of values; it does not interpret values, and trusts that `tomllib` has accepted the text.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field

Path = tuple[str | int, ...]

_TOKEN = re.compile(
    r"""
    (?P<string>\"\"\"(?:\\.|[^\\])*?\"{3,5}|'''.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*')
    |(?P<comment>\#[^\n]*)
    |(?P<newline>\n)
    |(?P<sign>[\[\]{}=.,])
    |(?P<bare>[^\s"'\#\[\]{}=.,]+)
    """,
    re.VERBOSE | re.DOTALL,
)


def key_lines(text: str) -> dict[Path, int]:
    """Line (from 1) of every table header, key and array element, by path; arrays carry their index."""
    reader = _Reader(_tokens(text))
    while reader.more:
        reader.statement()
    return reader.lines


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """The line of `path`, or of the nearest table around it."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return None


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int
    at: int
    """Position in the file: `[[` is two signs that touch."""


def _tokens(text: str) -> list[_Token]:
    found = []
    line = 1
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        if kind != "comment":
            found.append(_Token(kind, match[0], line, match.start()))
        line += match[0].count("\n")
    return [*found, _Token("newline", "\n", line, len(text))]


@dataclass(slots=True)
class _Reader:
    """One pass over the tokens, statement by statement."""

    tokens: list[_Token]
    next: int = 0
    table: Path = ()
    lines: dict[Path, int] = field(default_factory=dict)
    counts: dict[Path, int] = field(default_factory=dict)
    """Array tables → index of the last element."""

    @property
    def more(self) -> bool:
        return self.next < len(self.tokens)

    @property
    def token(self) -> _Token:
        return self.tokens[self.next]

    def statement(self) -> None:
        if self.token.kind == "newline":
            self.next += 1
        elif self.token.text == "[":
            self._header()
        else:
            self._pair(self.table)

    def _header(self) -> None:
        first, second = self.tokens[self.next : self.next + 2]
        is_array = second.text == "[" and second.at == first.at + 1
        self.next += 1 + is_array
        self.table = self._open(self._key(), is_array)
        self.next += 1 + is_array
        self.lines.setdefault(self.table, first.line)

    def _open(self, parts: Path, is_array: bool) -> Path:
        """Resolve `[a.b]` or `[[a.b]]` to a path with the index of every array table on the way."""
        path: Path = ()
        for position, part in enumerate(parts):
            path = (*path, part)
            if is_array and position == len(parts) - 1:
                self.counts[path] = self.counts.get(path, -1) + 1
            if path in self.counts:
                path = (*path, self.counts[path])
        return path

    def _pair(self, inside: Path) -> None:
        """`key.key = value`, in a table or between braces."""
        line = self.token.line
        path = (*inside, *self._key())
        for end in range(len(inside) + 1, len(path) + 1):
            self.lines.setdefault(path[:end], line)
        self.next += 1  # the equals sign
        self._value(path)

    def _key(self) -> Path:
        parts: list[str | int] = []
        while self.token.kind in ("bare", "string") or self.token.text == ".":
            if self.token.kind != "sign":
                parts.append(_plain(self.token))
            self.next += 1
        return tuple(parts)

    def _value(self, path: Path) -> None:
        opening = self.token.text
        if opening not in ("[", "{"):
            while self.token.kind != "newline" and self.token.text not in (",", "]", "}"):
                self.next += 1
            return
        self.next += 1
        count = 0
        while self.token.text not in ("]", "}"):
            if self.token.kind == "newline" or self.token.text == ",":
                self.next += 1
            elif opening == "{":
                self._pair(path)
            else:
                self.lines.setdefault((*path, count), self.token.line)
                self._value((*path, count))
                count += 1
        self.next += 1


def _plain(token: _Token) -> str:
    """The key that a token spells."""
    return token.text if token.kind == "bare" else str(tomllib.loads(f"key = {token.text}")["key"])
