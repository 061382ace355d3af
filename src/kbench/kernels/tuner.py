"""Tuning: which configuration an implementation runs with, where that was learnt, and what learning it cost.

Owns the cache (one JSON file an entry, in a folder that the caller names), the four policies and their counters. It
knows no tensor and no clock: who times a configuration is the caller's `Timing`. An implementation takes part by two
optional methods: `configurations(shape)`, a list of plain dictionaries whose first is its own rule of thumb, and
`with_configuration(one)`, another instance that runs with it.

    heuristic   the rule of thumb, always
    build       what a cache holds that was tuned before (kbench tune); else the rule of thumb
    warm-up     as build, but the shapes that are foreseen are tuned when the process starts
    live        a shape without an entry is tuned when it comes: that call is as slow as all trials together
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal, get_args

from kbench.catalog import Point, Resolved, operation
from kbench.errors import UsageError
from kbench.hashing import sha256_of

Policy = Literal["heuristic", "build", "warm-up", "live"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Configuration = Mapping[str, int | float | str]
Timing = Callable[[Any], float | None]
"""Time of an implementation in µs; None where it is wrong or cannot do the case."""
ENTRY_VERSION = 1
GROWING = ("rows", "tokens", "m")
"""Axes that a batch makes larger: their sizes share buckets. All others are the model's, and exact."""


@dataclass(frozen=True, slots=True)
class Key:
    """What an entry holds for; another device, dtype, layout or version of the code is another entry."""

    op: str
    bucket: str
    dtype: str
    layout: str
    device: str
    implementation: str
    """Hash of its source."""

    @property
    def name(self) -> str:
        return sha256_of(asdict(self))[:40]


@dataclass(frozen=True, slots=True)
class Entry:
    key: Key
    configuration: Configuration
    time_us: float
    heuristic_us: float
    """Of the rule of thumb, in the same trials."""
    spent_us: float
    """All trials together."""


@dataclass(slots=True)
class Counters:
    """What tuning did in this process."""

    hits: int = 0
    misses: int = 0
    tuned: int = 0
    spent_us: float = 0.0
    outliers: int = 0
    """Calls that had to wait for trials."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Tuned:
    """All trials of one shape."""

    best: Configuration
    times_us: list[float | None]
    """In the order of the configurations."""
    spent_us: float


class TuningCache:
    """Entries by key. Several processes may write: a file appears whole or not at all, the last one counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Key, Entry] = {}

    def get(self, key: Key) -> Entry | None:
        if key not in self._known:
            found = self._read(self._folder / f"{key.name}.json")
            if found is None or found.key != key:
                return None
            self._known[key] = found
        return self._known[key]

    def put(self, entry: Entry) -> None:
        path = self._folder / f"{entry.key.name}.json"
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"version": ENTRY_VERSION, **asdict(entry)}, indent=1, allow_nan=False))
            draft.replace(path)
        except OSError as error:
            what = f"tuning cannot be kept: {error.strerror or error}"
            raise UsageError(what, where=str(self._folder), remedy="name a folder that can be written") from error
        self._known[entry.key] = entry

    def entries(self) -> list[Entry]:
        found = (self._read(path) for path in sorted(self._folder.glob("*.json")))
        return [entry for entry in found if entry is not None]

    @staticmethod
    def _read(path: Path) -> Entry | None:
        """None where there is none, or it is of another version or damaged: then the shape is tuned again."""
        try:
            data = json.loads(path.read_text())
            if data["version"] != ENTRY_VERSION or not isinstance(data["configuration"], dict):
                return None
            times = (float(data[name]) for name in ("time_us", "heuristic_us", "spent_us"))
            return Entry(Key(**data["key"]), data["configuration"], *times)
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(slots=True)
class Tuner:
    """One policy over one cache."""

    policy: Policy
    cache: TuningCache
    counters: Counters = field(default_factory=Counters)

    def configured(self, implementation: Any, key: Key, shape: Resolved, timing: Timing) -> Any:
        """`implementation` as the policy wants it run at `shape`; one that has nothing to tune is returned as it is."""
        if not tunable(implementation):
            return implementation
        choices = list(implementation.configurations(shape))
        if not choices or self.policy == "heuristic":
            return implementation.with_configuration(choices[0]) if choices else implementation
        entry = self.cache.get(key)
        if entry is not None and entry.configuration in choices:
            self.counters.hits += 1
            return implementation.with_configuration(entry.configuration)
        self.counters.misses += 1
        if self.policy != "live":
            return implementation.with_configuration(choices[0])
        found = self.tune(implementation, key, shape, timing)
        self.counters.outliers += 1
        return implementation.with_configuration(choices[0] if found is None else found.best)

    def warm(self, implementation: Any, key: Key, shape: Resolved, timing: Timing) -> None:
        """Tune a shape that is foreseen, unless an entry is there."""
        if tunable(implementation) and self.cache.get(key) is None:
            self.tune(implementation, key, shape, timing)

    def tune(self, implementation: Any, key: Key, shape: Resolved, timing: Timing) -> Tuned | None:
        """Time every configuration and keep the fastest right one; None where none is right.

        The fastest of several noisy readings is fast by luck, too: it is timed again beside the rule of thumb, and must
        beat the better of that one's two readings. Its time is that of the second turn.
        """
        choices = list(implementation.configurations(shape))
        started = perf_counter_ns()
        times = [timing(implementation.with_configuration(one)) for one in choices]
        ranked = sorted((time_us, place) for place, time_us in enumerate(times) if time_us is not None)
        time_us, place = ranked[0] if ranked else (0.0, 0)
        thumb_us = times[0] if times and times[0] is not None else time_us
        if place and times[0] is not None:
            second, thumb = (timing(implementation.with_configuration(choices[own])) for own in (place, 0))
            thumb_us = thumb_us if thumb is None else min(thumb_us, thumb)
            if second is None or second >= thumb_us:
                time_us, place = thumb_us, 0
            else:
                time_us = second
        spent_us = (perf_counter_ns() - started) / 1_000
        self.counters.tuned += 1
        self.counters.spent_us += spent_us
        if not ranked:
            return None
        self.cache.put(Entry(key, dict(choices[place]), time_us, thumb_us, spent_us))
        return Tuned(choices[place], times, spent_us)


def tunable(implementation: Any) -> bool:
    return callable(getattr(implementation, "configurations", None)) and callable(
        getattr(implementation, "with_configuration", None)
    )


def bucket_of(shape: Resolved) -> str:
    """Shapes that share an entry: what a batch makes larger up to the next power of two, all else exact."""
    defaults = operation(shape.op).axes
    parts = [rounded(shape.point)] if shape.point is not None else []
    for name, value in sorted(shape.axes.items()):
        if name in GROWING:
            parts.append(f"{name}={_up(int(value))}")
        elif value != defaults.get(name):
            parts.append(f"{name}={value}")
    return ",".join(parts)


def rounded(point: Point) -> str:
    """Decodes and prefills apart: how many, and their mean lengths."""
    parts = []
    for single in (True, False):
        own = [group for group in point.groups if (group.query_tokens == 1) == single]
        count = sum(group.count for group in own)
        if count:
            query = sum(group.count * group.query_tokens for group in own) / count
            context = sum(group.count * group.kv_tokens for group in own) / count
            parts.append(f"{_up(count)}*{_up(query)}@{max(_up(query), _up(context))}")
    return "+".join(parts)


def _up(value: float) -> int:
    whole = max(1, -int(-value // 1))
    return 1 << (whole - 1).bit_length()


def implementation_hash(implementation: Any) -> str:
    """SHA-256 of the source files of its class and of the classes that it is made from."""
    digest = hashlib.sha256()
    for own in type(implementation).__mro__:
        if own.__module__ in ("builtins", "typing"):
            continue
        try:
            digest.update(Path(inspect.getfile(own)).read_bytes())
        except (TypeError, OSError):  # made at run time: its name is all that there is
            digest.update(f"{own.__module__}.{own.__qualname__}".encode())
    return digest.hexdigest()
