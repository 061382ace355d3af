"""One canonical spelling of plain data, its SHA-256, and what differs between two declarations.

Owns the bytes that plan hashes and ledger hashes are taken over. It knows no schema; it imports nothing of kbench.

Canonical is: keys sorted, no white space, ASCII only, numbers as Python's shortest repr, no NaN or infinity, string
keys only. 1 and 1.0 are different declarations; a tuple is a list.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_SHOWN_CHARACTERS = 80


def canonical(value: object) -> bytes:
    """The one spelling of plain data: dict with string keys, list, tuple, str, bool, int, float, None.

    ValueError names the place of anything else: two values that mean different things must never share a hash.
    """
    _require_plain(value, "")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def sha256_of(value: object) -> str:
    """The SHA-256 of `canonical(value)`, 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Readable lines, one for each leaf that differs: `rule.regime[0].require[1].margin: 0.03 → 0.05`.

    Equal exactly where `canonical` is equal: no lines, same hash. A part that only one side has is shown whole.
    """
    canonical(old), canonical(new)  # refuse what has no hash
    return list(_differences("", old, new))


def _differences(place: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{place}.{key}" if place else key
            if key not in new:
                yield f"{inner}: {_shown(old[key])} → (absent)"
            elif key not in old:
                yield f"{inner}: (absent) → {_shown(new[key])}"
            else:
                yield from _differences(inner, old[key], new[key])
    elif _plain_lists(old, new):
        yield f"{place}: {_shown(old)} → {_shown(new)}"
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        for i in range(max(len(old), len(new))):
            if i >= len(new):
                yield f"{place}[{i}]: {_shown(old[i])} → (absent)"
            elif i >= len(old):
                yield f"{place}[{i}]: (absent) → {_shown(new[i])}"
            else:
                yield from _differences(f"{place}[{i}]", old[i], new[i])
    elif canonical(old) != canonical(new):
        yield f"{place}: {_shown(old)} → {_shown(new)}"


def _plain_lists(old: object, new: object) -> bool:
    """Whether these are lists of plain values, one longer than the other: they are read better whole."""
    if not (isinstance(old, list | tuple) and isinstance(new, list | tuple)) or len(old) == len(new):
        return False
    return not any(isinstance(item, Mapping | list | tuple) for item in (*old, *new))


def _shown(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _require_plain(value: object, place: str) -> None:
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{place or 'value'} is {value}, which has no canonical spelling")
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place or 'value'} has the key {key!r}, keys must be text")
            _require_plain(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _require_plain(inner, f"{place}[{i}]")
    else:
        raise ValueError(f"{place or 'value'} is a {type(value).__name__}, which has no canonical spelling")
