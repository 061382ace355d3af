"""Cells of a source, read strictly: each is what it should be, or a BadRow that names the field and shows the value."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from typing import Any


class BadRow(Exception):
    """A row that cannot be used; the reader decides whether that ends the import."""

    def __init__(self, field: str, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.field, self.what, self.remedy = field, what, remedy


def shown(value: object) -> str:
    """A cell as an error shows it: short, and on one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}…"


def token_count(text: Any, field_name: str, *, least: int = 1) -> int:
    """A length from a cell: an integer or its decimal text, at least `least`. Raises BadRow."""
    value = text
    if isinstance(text, str) and len(text) < 32:
        with suppress(ValueError):
            value = int(text)
    if type(value) is not int:
        raise BadRow(field_name, f"not a number of tokens: {shown(text)}")
    if not least <= value < 2**31:
        raise BadRow(field_name, f"{shown(value)} tokens: {least} or more are needed")
    return value


def number(value: Any, field_name: str, unit: str) -> float:
    """A finite number from a cell or its text. Raises BadRow."""
    found = value
    if isinstance(value, str) and len(value) < 64:
        with suppress(ValueError):
            found = float(value)
    if type(found) not in (int, float) or not isfinite(found) or abs(found) > 1e18:
        raise BadRow(field_name, f"not a number of {unit}: {shown(value)}")
    return float(found)


def time_us(value: Any, field_name: str, *, us_per_unit: float, unit: str) -> int:
    """A time that is 0 or more, from a cell in its own unit, in microseconds. Raises BadRow."""
    found = number(value, field_name, unit) * us_per_unit
    if found < 0:
        raise BadRow(field_name, f"a time cannot be negative: {shown(value)}")
    if found > 1e17:  # 3,000 years: no epoch is so far away
        raise BadRow(field_name, f"no time in {unit}: {shown(value)}")
    return round(found)


def json_value(text: str) -> Any:
    """Raises BadRow for what is not JSON, and for what nests too deeply to be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
        raise BadRow("json", f"not JSON: {reason}") from error


def json_object(text: str, needed: Sequence[str] = ()) -> dict[str, Any]:
    record = json_value(text)
    if not isinstance(record, dict):
        raise BadRow("json", "not a JSON object")
    for name in needed:
        if name not in record:
            raise BadRow(name, "missing")
    return record


def id_list(value: Any, field_name: str) -> array[int]:
    """Whole numbers from 0 to 2**63. Raises BadRow."""
    what = "not a list of ids (whole numbers, 0 or more)"
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise BadRow(field_name, what)
    try:
        ids = array("q", value)
    except OverflowError as error:
        raise BadRow(field_name, what) from error
    if ids and min(ids) < 0:
        raise BadRow(field_name, what)
    return ids


def full_blocks(ids: array[int], input_tokens: int, block_tokens: int, field_name: str) -> array[int]:
    """The ids of the full blocks, from one id a block with the partial last one. Raises BadRow."""
    blocks = -(-input_tokens // block_tokens)
    if len(ids) != blocks:
        what = f"{len(ids)} ids for {input_tokens} tokens, where blocks of {block_tokens} make {blocks}"
        raise BadRow(field_name, what, "is --block-tokens the block size of this trace?")
    return ids[: input_tokens // block_tokens]
