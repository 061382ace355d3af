"""Baseline or candidate, from a decided claim: what an engine loads, alone.

    selector = kbench.selector.load("selector.json")
    selector.choose(gpu=..., driver=..., engine=..., model=..., ..., context=4096, batch=8).use

Owns the reading of `selector.json` and the choice. It is one file of the standard library (Python 3.10 on) that an
engine may copy; it imports nothing of kbench and knows neither rules nor measurements.

It fails closed. Whatever is not exactly what was decided (a file that cannot be read or was altered, an expired one,
another GPU, driver, engine or model, a backend that is not the measured one, a feature that is missing, unknown or of
the wrong type, a situation that no regime covers) gets the baseline and the reason. Nothing here raises for any of it.
The checksum finds damage and careless edits; it is no signature.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property, lru_cache
from typing import Any

SCHEMA = "kbench.selector/1"
BASELINE, CANDIDATE = "baseline", "candidate"
ENABLE = "enable"
VERDICTS = frozenset({ENABLE, "disable", "inconclusive", "missing-evidence", "invalid"})
IDENTITY = ("gpu", "driver", "engine", "model")
"""What a file that enables anything must be valid for, at least."""
RANGES = ("context", "batch")
"""Whole numbers of a step: its longest KV length in tokens after the step, and its number of sequences."""
SITUATION = frozenset({*RANGES, "phase", "trace_class"})
CLOCK_SKEW = timedelta(hours=1)
"""How far the reader's clock may lag behind the writer's before it is not believed about the expiry either."""

_KEYS = frozenset(
    {
        "schema", "suite", "plan_hash", "ledger_head", "lock_hash", "rule_sha256", "created", "expires", "valid_for",
        "variants", "default", "on_mismatch", "assert_backend", "scope", "entries", "sha256",
    }
)  # fmt: skip
_ENTRY_KEYS = frozenset({"regime", "when", "trace_class", "use", "verdict", "note", "evidence", "est"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(r"[a-z][a-z0-9_]{0,31}")
_LIMIT = r"(?:>=|<=|==|>|<)\d{1,9}(?:\.\d{1,9})*"
_RANGE = re.compile(rf"(?P<prefix>[a-z]+@)?(?P<limits>{_LIMIT}(?:,{_LIMIT})*)")
_VERSION = re.compile(r"(\d{1,9}(?:\.\d{1,9})*)(?:\+[A-Za-z0-9.]+)?")
_LARGEST_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run, and why."""

    use: str
    """`baseline` or `candidate`."""
    reason: str
    """One line, for a log."""
    regime: str = ""
    """The regimes that decided, joined by commas; empty where none did."""
    reject: bool = False
    """This is not the engine that was measured, and the file says to refuse to start rather than to fall back."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One regime's verdict and the situations that it holds for. Bounds are inclusive; what is empty holds for all."""

    regime: str
    use: str
    verdict: str
    trace_class: tuple[str, ...] = ()
    phase: str = ""
    ranges: tuple[tuple[str, int, int], ...] = ()
    note: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def features(self) -> frozenset[str]:
        """What must be known to tell whether this entry applies."""
        named = {name for name, _, _ in self.ranges}
        named |= {"trace_class"} if self.trace_class else set()
        return frozenset(named | ({"phase"} if self.phase else set()))

    def applies(self, features: Mapping[str, Any]) -> bool:
        """Whether it speaks about this situation, all of `self.features` being known.

        A regime that cannot be told apart from others speaks about everything, unless it enables: then about nothing.
        """
        if not self.features:
            return self.verdict != ENABLE
        if self.trace_class and features["trace_class"] not in self.trace_class:
            return False
        if self.phase and features["phase"] != self.phase:
            return False
        return all(low <= features[name] <= high for name, low, high in self.ranges)


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)  # noqa: UP017 (engines on Python 3.10)


@dataclass(frozen=True)  # no slots: what does not change is worked out once, not at every step
class Selector:
    """A loaded file. Immutable, so that threads may share it; `bind` fixes features that do not change."""

    closed: str = ""
    """Why every choice is the baseline; empty for a file that is whole."""
    suite: str = ""
    plan_hash: str = ""
    ledger_head: str = ""
    created: datetime = datetime.min.replace(tzinfo=timezone.utc)  # noqa: UP017, RUF009 (a constant)
    expires: datetime = datetime.min.replace(tzinfo=timezone.utc)  # noqa: UP017, RUF009 (a constant)
    scope: str = "deployment"
    """`deployment`: ask once, at start-up. `step`: a dispatcher may ask at every step."""
    on_mismatch: str = "fallback"
    valid_for: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assert_backend: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Phase → the implementation that was measured as the candidate: feature `PHASE_backend` must equal it."""
    variants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Role (`baseline`, `candidate`) → the variant's name in the suite."""
    entries: tuple[Entry, ...] = ()
    bound: Mapping[str, object] = dataclasses.field(default_factory=dict)
    clock: Callable[[], datetime] = _utc_now

    @cached_property
    def features(self) -> frozenset[str]:
        """Every feature that `choose` understands."""
        return frozenset({*SITUATION, *self._measured})

    @cached_property
    def needed(self) -> frozenset[str]:
        """The features without which `choose` answers with the baseline."""
        situation = [] if self._agrees else [name for entry in self.entries for name in entry.features]
        return frozenset({*self._measured, *situation})

    def bind(self, **features: object) -> Selector:
        """The same selector with these features given from now on."""
        return dataclasses.replace(self, bound={**self.bound, **features})

    def choose(self, **features: object) -> Choice:
        """Baseline or candidate here and now.

        Features: every key of `valid_for` and a `PHASE_backend` for every phase of `assert_backend` (text, compared
        exactly, or with the range that stands there); `trace_class`, `phase` ("decode", "prefill" or "mixed"),
        `context` and `batch` (int). Further known features may be given and are ignored. Never raises for what it is
        given.
        """
        if self.closed:
            return Choice(BASELINE, self.closed)
        given = {**self.bound, **features}
        return self._refusal(given) or self._mismatch(given) or self._decided(given)

    @cached_property
    def _measured(self) -> dict[str, str]:
        """Feature → what it must equal."""
        return {**self.valid_for, **{f"{phase}_backend": name for phase, name in self.assert_backend.items()}}

    @cached_property
    def _agrees(self) -> bool:
        """A deployment whose every regime enables need not know its traffic."""
        return self.scope == "deployment" and all(entry.use == CANDIDATE for entry in self.entries)

    def _refusal(self, given: Mapping[str, object]) -> Choice | None:
        """What is wrong with the question or its time."""
        now = self.clock()
        if now >= self.expires:
            return Choice(BASELINE, f"expired on {self.expires.isoformat()}: measure again")
        if now < self.created - CLOCK_SKEW:
            return Choice(BASELINE, f"the clock says {now.isoformat()}, before this file was made: expiry unknown")
        for name in sorted(given.keys() - self.features):
            return Choice(BASELINE, f"unknown feature {_shown(name)}")
        for name in sorted(self.needed - given.keys()):
            return Choice(BASELINE, f"feature {name} is missing")
        for name, value in given.items():
            wanted, called = (int, "an int") if name in RANGES else (str, "a str")
            if type(value) is not wanted:
                return Choice(BASELINE, f"feature {name} is not {called}: {type(value).__name__}")
        return None

    def _mismatch(self, given: Mapping[str, object]) -> Choice | None:
        """Whether this is what was measured."""
        for name, measured in self._measured.items():
            if not holds(measured, given[name]):
                verb = "is what it is valid for" if is_range(measured) else "was measured"
                reason = f"{name} is {_shown(given[name])}, and {_shown(measured)} {verb}"
                return Choice(BASELINE, reason, reject=self.on_mismatch == "reject")
        return None

    def _decided(self, given: Mapping[str, Any]) -> Choice:
        if self._agrees and self.entries and "trace_class" not in given:
            return Choice(CANDIDATE, "every regime enables", _joined(self.entries))
        speaking = [entry for entry in self.entries if entry.applies(given)]
        if not speaking:
            return Choice(BASELINE, "no regime covers this")
        against = [entry for entry in speaking if entry.use != CANDIDATE]
        for entry in against:
            reason = f"regime {entry.regime}: {entry.verdict}" + (f", but {entry.note}" if entry.note else "")
            return Choice(BASELINE, reason, _joined(against))
        return Choice(CANDIDATE, f"regime {_joined(speaking)}: {ENABLE}", _joined(speaking))


def load(path: str | os.PathLike[str], *, clock: Callable[[], datetime] = _utc_now) -> Selector:
    """Read a `selector.json`. Never raises for a bad file: the selector that comes back then chooses the baseline.

    clock: the time, aware of its zone; for tests and replays.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except (OSError, ValueError, TypeError) as error:
        return Selector(closed=f"cannot read the selector: {type(error).__name__}", clock=clock)
    if len(data) > _LARGEST_BYTES:
        return Selector(closed="the selector is too large to be one", clock=clock)
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        return dataclasses.replace(_parsed(document), clock=clock)
    except _InvalidError as error:
        return Selector(closed=f"not a valid selector: {error}", clock=clock)
    except (ValueError, RecursionError, OverflowError):
        return Selector(closed="not a valid selector: no JSON document that kbench wrote", clock=clock)


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """`document` with the checksum that `load` compares. ValueError where it holds NaN or infinity."""
    content = {name: value for name, value in document.items() if name != "sha256"}
    spelled = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return {**content, "sha256": hashlib.sha256(spelled.encode("ascii")).hexdigest()}


def is_range(value: str) -> bool:
    """Whether a value of `valid_for` names several: `>=570,<600`, `kbench@>=0.1`, `NVIDIA H200*`."""
    return value.endswith("*") or _bounds(value) is not None


def holds(value: str, given: object) -> bool:
    """Whether what is `given` is the value, or lies in its range. What cannot be compared does not."""
    if not isinstance(given, str):
        return False
    bounds = _bounds(value)
    if bounds is not None:
        prefix, limits = bounds
        found = _version(given[len(prefix) :]) if given.startswith(prefix) else None
        return found is not None and all(_compares(found, sign, limit) for sign, limit in limits)
    if value.endswith("*"):
        return given.startswith(value[:-1])
    return given == value


@lru_cache(maxsize=64)
def _bounds(value: str) -> tuple[str, list[tuple[str, tuple[int, ...]]]] | None:
    """Prefix and limits of a range of versions, None for any other text."""
    matched = _RANGE.fullmatch(value)
    if matched is None:
        return None
    limits = []
    for part in matched["limits"].split(","):
        sign, text = (part[:2], part[2:]) if part[1] == "=" else (part[:1], part[1:])
        limits.append((sign, tuple(int(digits) for digits in text.split("."))))
    return matched["prefix"] or "", limits


def _version(text: str) -> tuple[int, ...] | None:
    """The numbers of a plain version, its local part after + left out. A pre-release is no version to rely on."""
    matched = _VERSION.fullmatch(text)
    return tuple(int(digits) for digits in matched[1].split(".")) if matched else None


def _compares(found: tuple[int, ...], sign: str, limit: tuple[int, ...]) -> bool:
    length = max(len(found), len(limit))
    a, b = (numbers + (0,) * (length - len(numbers)) for numbers in (found, limit))
    return {">=": a >= b, "<=": a <= b, "==": a == b, ">": a > b, "<": a < b}[sign]


class _InvalidError(ValueError):
    """One sentence about a file."""


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _InvalidError(otherwise)


def _parsed(document: Any) -> Selector:
    """The selector of a document. `_InvalidError` for anything that kbench would not have written."""
    _require(isinstance(document, dict), "it is no JSON object")
    _require(document.get("schema") == SCHEMA, f"its schema is not {SCHEMA}")
    _require(document.keys() == _KEYS, "it lacks keys or has others")
    _require(sealed(document)["sha256"] == document["sha256"], "it was altered: the checksum does not fit")
    _require(document["default"] == BASELINE, "its default is not the baseline")
    _require(document["scope"] in ("deployment", "step"), "its scope is neither deployment nor step")
    _require(document["on_mismatch"] in ("fallback", "reject"), "on_mismatch is neither fallback nor reject")
    valid_for, backends = _texts(document["valid_for"], "valid_for"), _texts(document["assert_backend"], "backend")
    names = [*valid_for, *(f"{phase}_backend" for phase in backends), *SITUATION]
    _require(len(set(names)) == len(names), "one feature has two meanings")
    _require(isinstance(document["entries"], list), "its entries are no list")
    entries = tuple(_entry(item, document["scope"]) for item in document["entries"])
    if any(entry.use == CANDIDATE for entry in entries):
        _require(set(IDENTITY) <= valid_for.keys(), f"it enables without {', '.join(IDENTITY)} to be valid for")
        _require(bool(backends), "it enables without a backend to assert")
    return Selector(
        suite=_text(document["suite"], "suite"),
        plan_hash=_text(document["plan_hash"], "plan_hash"),
        ledger_head=_text(document["ledger_head"], "ledger_head"),
        created=_time(document["created"]),
        expires=_time(document["expires"]),
        scope=document["scope"],
        on_mismatch=document["on_mismatch"],
        valid_for=valid_for,
        assert_backend=backends,
        variants=_texts(document["variants"], "variants"),
        entries=entries,
    )


def _entry(item: Any, scope: str) -> Entry:
    _require(isinstance(item, dict) and item.keys() == _ENTRY_KEYS, "an entry lacks keys or has others")
    regime = _text(item["regime"], "regime")
    _require(_NAME.fullmatch(regime) is not None, "an entry's regime is no name")
    _require(_text(item["verdict"], "verdict") in VERDICTS, f"regime {regime} has no verdict")
    _require(item["use"] in (BASELINE, CANDIDATE), f"regime {regime} uses neither baseline nor candidate")
    when = item["when"]
    _require(isinstance(when, dict) and when.keys() <= {*RANGES, "phase"}, f"regime {regime}: `when` has other keys")
    entry = Entry(
        regime=regime,
        use=item["use"],
        verdict=item["verdict"],
        trace_class=_list_of_texts(item["trace_class"], "trace_class"),
        phase=_text(when["phase"], "phase") if "phase" in when else "",
        ranges=tuple((name, *_range(when[name])) for name in RANGES if name in when),
        note=_text(item["note"], "note", empty=True),
        evidence=_list_of_texts(item["evidence"], "evidence"),
    )
    _require(entry.note.isprintable(), f"regime {regime} has a note of more than a line")
    if entry.use == CANDIDATE:
        _require(entry.verdict == ENABLE, f"regime {regime} uses the candidate without an enable")
        _require(bool(entry.features), f"regime {regime} uses the candidate everywhere")
        _require(bool(entry.evidence), f"regime {regime} uses the candidate without evidence")
        by_class = bool(entry.trace_class) and not when
        _require(scope == "step" or by_class, f"regime {regime} of a deployment is not given by trace classes alone")
    return entry


def _range(value: Any) -> tuple[int, int]:
    whole = isinstance(value, list) and len(value) == 2 and all(type(bound) is int for bound in value)
    _require(whole and 0 <= value[0] <= value[1], "a range is not [low, high]")
    return value[0], value[1]


def _text(value: Any, name: str, *, empty: bool = False) -> str:
    _require(type(value) is str and (empty or value != ""), f"{name} is no text")
    return str(value)


def _texts(value: Any, name: str) -> dict[str, str]:
    _require(isinstance(value, dict) and all(_KEY.fullmatch(key) for key in value), f"{name} is no table of names")
    return {key: _text(item, name) for key, item in value.items()}


def _list_of_texts(value: Any, name: str) -> tuple[str, ...]:
    _require(isinstance(value, list), f"{name} is no list")
    return tuple(_text(item, name) for item in value)


def _time(value: Any) -> datetime:
    try:
        time = datetime.fromisoformat(_text(value, "time"))
    except ValueError as error:
        raise _InvalidError("a time is not ISO 8601") from error
    _require(time.tzinfo is not None and 2000 <= time.year < 9999, "a time has no zone, or is not of our age")
    return time


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _require(len(found) == len(pairs), "a key is given twice")
    return found


def _no_constant(name: str) -> None:
    raise _InvalidError(f"{name} is no number")


def _joined(entries: list[Entry] | tuple[Entry, ...]) -> str:
    return ", ".join(dict.fromkeys(entry.regime for entry in entries))


def _shown(value: object) -> str:
    """For a log: on one line, without control characters, not endless."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:79] + "~"
