"""Who computes which operation: what ships, what installed packages bring, what one variant registers.

Owns `Registry`, which never changes: registering makes another one, so that two engines of one process may know
different names. It knows names and capabilities, imports no implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import entry_points
from types import MappingProxyType

from kbench.catalog.built_in import BUILT_IN
from kbench.catalog.capability import AUTO, CUSTOM, GraphSupport, Implementation
from kbench.catalog.ops import OPS
from kbench.errors import UsageError

ENTRY_POINTS = "kbench.kernels"
_EMPTY_SLOT = 'fill it: register = {{ "custom@{op}" = "FILE.py:NAME" }} in the variant'


class Registry:
    """Implementations by operation and name. A name that is registered for one operation overrides it for that alone.

    Raises UsageError where an implementation names an operation that does not exist, or takes a name without override.
    """

    def __init__(
        self, known: Iterable[Implementation] = (), own: Mapping[tuple[str, str], Implementation] | None = None
    ) -> None:
        self._known: dict[str, Implementation] = {}
        for item in known:
            _require_ops(item)
            if item.name in self._known:
                raise UsageError(
                    f"an implementation named {item.name!r} is registered already", remedy="rename it, or override it"
                )
            self._known[item.name] = item
        self._own = MappingProxyType(dict(own or {}))

    def registered(self, item: Implementation, *, override: bool = False) -> Registry:
        """A registry with one more. A name that is known for one of its operations needs `override`.

        A built-in that is overridden keeps its place in the order of `auto`.
        """
        _require_ops(item)
        if item.name == AUTO:
            raise UsageError(f"an implementation cannot be named {AUTO!r}", remedy="rename it")
        added = {}
        for op in item.ops:
            before = self.find(item.name, op)
            if before is not None and not override:
                raise UsageError(
                    f"an implementation named {item.name!r} is registered already", remedy="rename it, or override it"
                )
            priority = before.priority if before is not None else item.priority
            added[op, item.name] = replace(item, ops=(op,), priority=priority)
        return Registry(self._known.values(), {**self._own, **added})

    def find(self, name: str, op: str) -> Implementation | None:
        """The implementation of `op` by that name, or None."""
        known = self._own.get((op, name)) or self._known.get(name)
        return known if known is not None and known.serves(op) else None

    def named(self, name: str) -> Implementation | None:
        """By name alone, for whichever operation."""
        return self._known.get(name) or next((item for (_, own), item in self._own.items() if own == name), None)

    def of(self, op: str | None = None) -> list[Implementation]:
        """All that serve `op` (default: all), those that a variant registered last."""
        kept = [item for item in self._known.values() if op is None or item.serves(op)]
        kept = [item for item in kept if op is None or (op, item.name) not in self._own]
        return kept + [item for (own_op, _), item in self._own.items() if op is None or own_op == op]

    def in_order(self, op: str) -> list[Implementation]:
        """Those that `auto` chooses from, the first choice first."""
        able = [item for item in self.of(op) if item.priority > 0]
        return sorted(able, key=lambda item: -item.priority)

    def get(self, name: str, op: str | None = None) -> Implementation:
        """Raises UsageError, with the names that there are, where nobody of that name computes `op`."""
        found = self.named(name) if op is None else self.find(name, op)
        if found is not None:
            return found
        of = f" of {op}" if op else ""
        if name == CUSTOM:
            raise UsageError(f"the slot {CUSTOM!r}{of} is empty", remedy=_EMPTY_SLOT.format(op=op or "OP"))
        names = ", ".join(item.name for item in self.of(op)) or "none"
        raise UsageError(f"no implementation {name!r}{of}", remedy=f"one of {names}; see kbench list kernels")


def _require_ops(item: Implementation) -> None:
    unknown = [op for op in item.ops if op not in OPS]
    if unknown or not item.ops:
        raise UsageError(f"{item.name}: unknown op {unknown}", remedy=f"one of {', '.join(OPS)}")


SHIPPED = Registry(BUILT_IN)


@lru_cache(maxsize=1)
def registry() -> Registry:
    """What ships, and entry points of the group `kbench.kernels`, named NAME@OP: `mine@norm.rmsnorm = "mine.norms:fn"`.

    Only their names are read. One that names no operation of ours, or a name that is taken, is left out: a package that
    somebody installed for another reason must not break a run.
    """
    found = list(SHIPPED.of())
    taken = {item.name for item in found} | {AUTO, CUSTOM}
    for point in entry_points(group=ENTRY_POINTS):
        name, _, op = point.name.partition("@")
        if name and op in OPS and name not in taken:
            summary = f"from {point.dist.name}" if point.dist is not None else "installed"
            graph = GraphSupport.ALWAYS
            found.append(Implementation(name, (op,), point.value, summary, graph=graph, installed=True))
            taken.add(name)
    return Registry(found)


def implementations(op: str | None = None) -> list[Implementation]:
    return registry().of(op)


def implementation(name: str, op: str | None = None) -> Implementation:
    return registry().get(name, op)
