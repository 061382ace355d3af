"""Whether an implementation is still the one that was resolved: its class, its code, what it declares.

Owns the comparison of an instance with itself, before its first call and after its last. It sees code that was
replaced, not what the same code decides to do: that is seen in a trace (`measure.exec_observe`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from kbench.kernels.declare import declared
from kbench.selection import Mutation

METHODS = ("convert", "plan", "run")


@dataclass(frozen=True, slots=True)
class Identity:
    """What an instance was, facet by facet."""

    facets: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, implementation: Any) -> Identity:
        return cls(tuple(_facets(implementation)))

    def changes(self, implementation: Any) -> tuple[Mutation, ...]:
        """Every facet that is another one now. A facet that came later is none: what is compiled at its first call
        may be kept."""
        now = dict(_facets(implementation))
        return tuple(
            Mutation(name, before, now.get(name, "nothing"))
            for name, before in self.facets
            if now.get(name, "nothing") != before
        )


def _facets(made: Any) -> Iterator[tuple[str, str]]:
    kind = type(made)
    yield "class", f"{kind.__module__}.{kind.__qualname__}"
    yield "name", str(getattr(made, "name", ""))
    yield "declaration", str(declared(made))
    for method in METHODS:
        yield f"{method}()", _code(getattr(made, method, None))
    for name, value in sorted(getattr(made, "__dict__", {}).items()):
        if isinstance(value, FunctionType | MethodType):
            yield name, _code(value)


def _code(function: object) -> str:
    """A short hash of a function's code; of what has none (built in, compiled), its name."""
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    if isinstance(code, CodeType):
        return f"code {hashlib.sha256(_bytes(code)).hexdigest()[:12]}"
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _bytes(code: CodeType) -> bytes:
    inner = [_bytes(item) if isinstance(item, CodeType) else repr(item).encode() for item in code.co_consts]
    return b"|".join((code.co_code, repr(code.co_names).encode(), *inner))
