"""Numbers and names as text for people.

Owns units, digits, and the cleaning of names that could carry control characters into a terminal or a log. It knows no
medium's own syntax.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable

MISSING = "–"
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def clean(text: object) -> str:
    """`text` on one line, without control, format (bidirectional) or surrogate characters: they become `?`."""
    spaced = " ".join(str(text).split())
    return "".join("?" if unicodedata.category(char) in _UNSAFE_CATEGORIES else char for char in spaced)


def duration(value_us: float | None) -> str:
    """A time with its unit: 12.3 µs, 1.23 ms, 4.56 s."""
    if value_us is None or not math.isfinite(value_us):
        return MISSING
    for limit, scale, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms"), (math.inf, 1e6, "s")):
        if abs(value_us) < limit * 0.99995:
            return f"{_digits(value_us / scale)} {unit}"
    return MISSING


def interval_duration(low_us: float | None, high_us: float | None) -> str:
    if low_us is None or high_us is None:
        return "no interval"
    return f"{duration(low_us)} to {duration(high_us)}"


def percent(share: float | None, *, signed: bool = False) -> str:
    if share is None or not math.isfinite(share):
        return MISSING
    return f"{100 * share:+.2f} %" if signed else f"{100 * share:.2f} %"


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else _digits(value)


def count(n: int, noun: str) -> str:
    """`1 session`, `6 sessions`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def joined(parts: Iterable[str], empty: str = MISSING) -> str:
    return ", ".join(parts) or empty


def _digits(value: float) -> str:
    """Four significant digits."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
