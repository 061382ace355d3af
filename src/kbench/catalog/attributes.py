"""What a step case says beside its batch: pages, tails, scatter, sharing, experts, sampling, launches.

Owns the attributes of a step, `32*1@4096;graph=off;tail=partial`: their names, values and one spelling. What the engine
makes of them is the engine's; whether a suite's arms can be measured so is `suite.step_points`'.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal, get_args

from kbench.catalog.routing import RoutingControl, RoutingKind
from kbench.errors import UsageError

Graph = Literal["auto", "off", "on"]
Sampled = Literal["greedy", "topkp", "grammar"]
Tail = Literal["as-written", "partial", "full"]

_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
LARGEST_PAGE = 65_536


@dataclass(frozen=True, slots=True)
class StepAttributes:
    """What is asked of one step case beside its batch; the same of both arms. Every default is the suite's own way.

    `str` is the one spelling: attributes in alphabetical order, those at their default left out.
    """

    graph: Graph = "auto"
    """Launch kernel by kernel (off) or replay a captured graph (on), whatever `engine.graph` says."""
    moe: RoutingControl | None = None
    """Declared load of experts; None: as the routers choose."""
    page: int = 0
    """Tokens a KV page; 0: each arm's own."""
    prefix_share: float = 0.0
    """Share of the shortest history that all sequences have in common, on the same pages."""
    sampling: Sampled = "greedy"
    """topkp: temperature 0.8, top-k 50, top-p 0.95; grammar: greedy among one allowed token in eight."""
    scatter: float = 1.0
    """Share of the pages that are out of order in the pool: 1 (shuffled), 0 (seq: neighbours), or frag:SHARE."""
    tail: Tail = "as-written"
    """Last pages: partial (KV lengths made odd), full (rounded up to whole pages), or as the lengths say."""

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Name and canonical text of every attribute that is not at its default, sorted by name."""
        texts = {
            "graph": self.graph,
            "moe": "" if self.moe is None else str(self.moe),
            "page": str(self.page),
            "prefix_share": f"{self.prefix_share:g}",
            "sampling": self.sampling,
            "scatter": {0.0: "seq", 1.0: "shuffled"}.get(self.scatter, f"frag:{self.scatter:g}"),
            "tail": self.tail,
        }
        return tuple((name, texts[name]) for name in NAMES if getattr(self, name) != getattr(PLAIN, name))

    def __str__(self) -> str:
        return "".join(f";{name}={text}" for name, text in self.pairs())

    @property
    def keeps_attention(self) -> bool:
        """Whether attention computes what it computes for the bare batch: level 1 at the same point speaks for it."""
        return not (self.page or self.prefix_share or self.scatter != 1.0 or self.tail != "as-written")


NAMES = tuple(sorted(field.name for field in fields(StepAttributes)))
PLAIN = StepAttributes()


def parse_attributes(items: list[str]) -> StepAttributes:
    """Read `name=value` items. Raises UsageError with the offending item and what may be written."""
    found: dict[str, object] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if name not in NAMES or not equals:
            raise UsageError(f"no attribute {item!r} of a step", remedy=f"one of {', '.join(NAMES)}, as name=value")
        if name in found:
            raise UsageError(f"attribute {name} is named twice", remedy="name it once")
        if _VALUE.fullmatch(text) is None:
            raise UsageError(f"attribute {item!r} has no value that can be read", remedy=_REMEDIES[name])
        found[name] = _READERS[name](name, text)
    return StepAttributes(**found)  # type: ignore[arg-type]


def _refused(name: str, text: str) -> UsageError:
    return UsageError(f"attribute {name}={text}", remedy=_REMEDIES[name])


def _choice(name: str, text: str) -> str:
    if text not in _CHOICES[name]:
        raise _refused(name, text)
    return text


def _page(name: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST_PAGE:
        raise _refused(name, text)
    return int(text)


def _share(name: str, text: str) -> float:
    if _NUMBER.fullmatch(text) is None or not 0.0 <= float(text) <= 1.0:
        raise _refused(name, text)
    return float(text)


def _scatter(name: str, text: str) -> float:
    named = {"seq": 0.0, "shuffled": 1.0}
    if text in named:
        return named[text]
    kind, _, share = text.partition(":")
    if kind != "frag":
        raise _refused(name, text)
    return _share(name, share)


def _moe(name: str, text: str) -> RoutingControl:
    kind, colon, rest = text.partition(":")
    try:
        if kind not in get_args(RoutingKind) or (colon and not rest):
            raise _refused(name, text)
        if kind == "zipf":
            if _NUMBER.fullmatch(rest or "1") is None:
                raise _refused(name, text)
            return RoutingControl("zipf", alpha=float(rest or "1"))
        return RoutingControl(kind, recorded=rest)  # type: ignore[arg-type]
    except UsageError as error:
        problem = error.problems[0]
        raise UsageError(f"attribute {name}={text}: {problem.what}", remedy=_REMEDIES[name]) from error


_CHOICES: dict[str, tuple[str, ...]] = {
    "graph": get_args(Graph),
    "sampling": get_args(Sampled),
    "tail": get_args(Tail),
}
_READERS = {
    "graph": _choice,
    "moe": _moe,
    "page": _page,
    "prefix_share": _share,
    "sampling": _choice,
    "scatter": _scatter,
    "tail": _choice,
}
_REMEDIES = {
    "graph": "graph is auto, off or on",
    "moe": "moe is balanced, zipf:ALPHA with 0 to 20, hot, empty or recorded:FILE",
    "page": f"page is a number of tokens from 1 to {LARGEST_PAGE}",
    "prefix_share": "prefix_share is a share from 0 to 1",
    "sampling": "sampling is greedy, topkp or grammar",
    "scatter": "scatter is seq, shuffled or frag:SHARE with a share from 0 to 1",
    "tail": "tail is partial, full or as-written",
}
