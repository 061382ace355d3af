"""The columns that a trace is made of, and the table of them.

Owns how one column lies in memory (values beside a mask, lists as offsets and values) and what the file calls it. It
does not know what the columns mean to each other: that is `integrity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Kind(Enum):
    """How a column lies in memory."""

    DENSE = "dense"  # int64 array, no nulls
    INTS = "ints"
    FLOATS = "floats"
    LISTS = "lists"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column of the file: its name, its shape in memory, its Parquet element type, whether a file must have it."""

    name: str
    kind: Kind
    element: str  # int64 | int32 | double | string
    required: bool = False


COLUMNS: tuple[ColumnSpec, ...] = (
    ColumnSpec("request_id", Kind.DENSE, "int64", required=True),
    ColumnSpec("session_id", Kind.DENSE, "int64", required=True),
    ColumnSpec("turn", Kind.DENSE, "int32", required=True),
    ColumnSpec("parent_ids", Kind.LISTS, "int64", required=True),
    ColumnSpec("arrival_us", Kind.INTS, "int64", required=True),
    ColumnSpec("think_us", Kind.INTS, "int64"),
    ColumnSpec("recorded_duration_us", Kind.INTS, "int64"),
    ColumnSpec("input_tokens", Kind.DENSE, "int32", required=True),
    ColumnSpec("output_tokens", Kind.DENSE, "int32", required=True),
    ColumnSpec("prefix_tokens", Kind.INTS, "int32"),
    ColumnSpec("shared_id", Kind.INTS, "int64"),
    ColumnSpec("shared_tokens", Kind.INTS, "int32"),
    ColumnSpec("block_ids", Kind.LISTS, "int64"),
    ColumnSpec("tail_id", Kind.INTS, "int64"),
    ColumnSpec("token_ids", Kind.LISTS, "int32"),
    ColumnSpec("output_token_ids", Kind.LISTS, "int32"),
    ColumnSpec("regime", Kind.TEXT, "string"),
    ColumnSpec("ttft_slo_ms", Kind.FLOATS, "double"),
    ColumnSpec("tpot_slo_ms", Kind.FLOATS, "double"),
)


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only array; a view is copied first, so that nobody else holds a writable door to it."""
    owned = array if array.flags.owndata else array.copy()
    owned.setflags(write=False)
    return owned


@dataclass(frozen=True, slots=True, eq=False)
class Ints:
    """Integers, each of which may be unknown; the value of an unknown one is 0 and means nothing."""

    values: Int64s
    known: Bools

    @classmethod
    def of(cls, items: Sequence[int | None]) -> Ints:
        known = np.fromiter((item is not None for item in items), np.bool_, len(items))
        values = np.fromiter((0 if item is None else item for item in items), np.int64, len(items))
        return cls(frozen(values), frozen(known))

    def get(self, index: int) -> int | None:
        return int(self.values[index]) if self.known[index] else None


@dataclass(frozen=True, slots=True, eq=False)
class Floats:
    """Numbers, each of which may be unknown; the value of an unknown one is 0.0 and means nothing."""

    values: NDArray[np.float64]
    known: Bools

    @classmethod
    def of(cls, items: Sequence[float | None]) -> Floats:
        known = np.fromiter((item is not None for item in items), np.bool_, len(items))
        values = np.fromiter((0.0 if item is None else item for item in items), np.float64, len(items))
        return cls(frozen(values), frozen(known))

    def get(self, index: int) -> float | None:
        return float(self.values[index]) if self.known[index] else None


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Lists of integers, each of which may be unknown; list `i` is `values[offsets[i]:offsets[i + 1]]`."""

    offsets: Int64s
    values: NDArray[np.integer[Any]]
    known: Bools

    @classmethod
    def of(cls, items: Sequence[Sequence[int] | NDArray[Any] | None]) -> Lists:
        known = np.fromiter((item is not None for item in items), np.bool_, len(items))
        lengths = np.fromiter((0 if item is None else len(item) for item in items), np.int64, len(items))
        flat = np.fromiter(_chain(items), np.int64, int(lengths.sum()))
        return cls.packed(lengths, flat, known)

    @classmethod
    def packed(cls, lengths: Int64s, values: NDArray[np.integer[Any]], known: Bools) -> Lists:
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(frozen(offsets), frozen(values), frozen(known))

    @property
    def lengths(self) -> Int64s:
        return np.diff(self.offsets)

    def get(self, index: int) -> NDArray[np.integer[Any]] | None:
        return self.values[self.offsets[index] : self.offsets[index + 1]] if self.known[index] else None

    def row_of_values(self) -> Int64s:
        """The row that each flat value belongs to."""
        return np.repeat(np.arange(len(self.known)), self.lengths)


def _chain(items: Iterable[Sequence[int] | NDArray[Any] | None]) -> Iterator[int]:
    for item in items:
        if item is not None:
            yield from item


AnyColumn = Int64s | Ints | Floats | Lists | tuple[str | None, ...]


def column_of(spec: ColumnSpec, items: Sequence[Any]) -> AnyColumn:
    """A column from one Python value a row."""
    if spec.kind is Kind.DENSE:
        return frozen(np.fromiter(items, np.int64, len(items)))
    if spec.kind is Kind.INTS:
        return Ints.of(items)
    if spec.kind is Kind.FLOATS:
        return Floats.of(items)
    if spec.kind is Kind.LISTS:
        return Lists.of(items)
    return tuple(items)


def unknown(spec: ColumnSpec, count: int) -> AnyColumn:
    """A column of which nothing is known."""
    nothing = frozen(np.zeros(count, np.bool_))
    if spec.kind is Kind.LISTS:
        return Lists.packed(np.zeros(count, np.int64), np.zeros(0, np.int64), nothing)
    if spec.kind is Kind.TEXT:
        return (None,) * count
    if spec.kind is Kind.FLOATS:
        return Floats(frozen(np.zeros(count)), nothing)
    return Ints(frozen(np.zeros(count, np.int64)), nothing)


def canonical_parts(column: AnyColumn) -> list[bytes | memoryview]:
    """The content of a column as bytes that no library version or encoding changes; empty when all of it is unknown."""
    if isinstance(column, tuple):
        # A length before each text, so that no two columns of texts have the same bytes.
        texts = [b"-" if text is None else b"%d:" % len(text.encode()) + text.encode() for text in column]
        return [b"".join(texts)] if any(text is not None for text in column) else []
    if isinstance(column, np.ndarray):
        return [_bytes_of(column, "<i8")]
    if not column.known.any():
        return []
    mask = _bytes_of(column.known, "u1")
    if isinstance(column, Lists):
        return [mask, _bytes_of(column.lengths, "<i8"), _bytes_of(column.values, "<i8")]
    return [mask, _bytes_of(column.values, "<f8" if isinstance(column, Floats) else "<i8")]


def _bytes_of(array: NDArray[Any], kind: str) -> memoryview:
    """An array's bytes without another copy of them where the type is already the right one."""
    return np.ascontiguousarray(array, kind).view(np.uint8).data
