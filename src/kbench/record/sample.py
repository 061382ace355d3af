"""One measured value, and many of them in columns.

Owns the tidy record `Sample` and `SampleTable`, its columnar form. Strings are dictionary-encoded, so that a million
samples are a few numpy arrays: deciding reads nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kbench.errors import IntegrityError, MeasurementError
from kbench.record.selected import COLUMNS, Texts

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLES_VERSION = 1

TEXT = ("case", "level", "variant", "metric", "unit", "scope", "mode", "clock", "flags")
WHOLE = ("session", "block", "position", "segment")


@dataclass(frozen=True, slots=True)
class Sample:
    """One value. `scope` says which of the integers mean something.

    window   session, block and position: one of the four windows of an ABBA or BAAB block
    session  session: taken once in a worker's life
    segment  segment: one slice of a replayed trace (and session, where the replay was repeated)
    run      none of them
    """

    case: str
    level: str
    variant: str
    metric: str
    unit: str
    value: float
    scope: str = "window"
    session: int = 0
    block: int = 0
    position: int = 0
    segment: int = 0
    mode: str = ""
    """Workload only: `exec` (measured) or `virtual` (modelled)."""
    clock: str = "wall"
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Samples in columns. `codes[name][i]` indexes `values[name]` for the text columns."""

    codes: dict[str, NDArray[np.int32]]
    values: dict[str, list[str]]
    whole: dict[str, NDArray[np.int64]]
    value: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.value)

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> SampleTable:
        rows = list(samples)
        codes: dict[str, NDArray[np.int32]] = {}
        values: dict[str, list[str]] = {}
        for name in TEXT:
            texts = [",".join(row.flags) if name == "flags" else getattr(row, name) for row in rows]
            known: dict[str, int] = {}
            codes[name] = np.array([known.setdefault(text, len(known)) for text in texts], dtype=np.int32)
            values[name] = list(known)
        whole = {name: np.array([getattr(row, name) for row in rows], dtype=np.int64) for name in WHOLE}
        return cls(codes, values, whole, np.array([row.value for row in rows], dtype=np.float64))

    @classmethod
    def join(cls, tables: Iterable[SampleTable]) -> SampleTable:
        parts = list(tables)
        if not parts:
            return cls.of([])
        codes: dict[str, NDArray[np.int32]] = {}
        values: dict[str, list[str]] = {}
        for name in TEXT:
            known: dict[str, int] = {}
            mapped = []
            for part in parts:
                lookup = [known.setdefault(text, len(known)) for text in part.values[name]]
                mapped.append(np.array(lookup, dtype=np.int32)[part.codes[name]] if len(part) else part.codes[name])
            codes[name], values[name] = np.concatenate(mapped), list(known)
        whole = {name: np.concatenate([part.whole[name] for part in parts]) for name in WHOLE}
        return cls(codes, values, whole, np.concatenate([part.value for part in parts]))

    def where(self, mask: NDArray[np.bool_]) -> SampleTable:
        codes = {name: column[mask] for name, column in self.codes.items()}
        whole = {name: column[mask] for name, column in self.whole.items()}
        return SampleTable(codes, self.values, whole, self.value[mask])

    def select(self, **wanted: str) -> SampleTable:
        """The rows whose text columns equal all of `wanted`, e.g. `select(level="step", metric="step_time")`."""
        mask = np.ones(len(self), dtype=bool)
        for name, text in wanted.items():
            known = self.values[name]
            mask &= (self.codes[name] == known.index(text)) if text in known else False
        return self.where(mask)

    def distinct(self, name: str) -> list[str]:
        return [self.values[name][code] for code in np.unique(self.codes[name])]

    def rows(self) -> Iterator[Sample]:
        for index in range(len(self)):
            texts = {name: self.values[name][self.codes[name][index]] for name in TEXT}
            flags = tuple(texts.pop("flags").split(",")) if texts["flags"] else ()
            texts.pop("flags", None)
            whole = {name: int(self.whole[name][index]) for name in WHOLE}
            yield Sample(**texts, **whole, value=float(self.value[index]), flags=flags)  # type: ignore[arg-type]

    def write(self, path: Path, selected: Texts | None = None) -> None:
        """Write Parquet beside `path` and rename: a reader sees the whole file or none.

        `selected`: texts by case and variant, as columns more; `read` leaves them where they are.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {
            name: pa.DictionaryArray.from_arrays(pa.array(self.codes[name]), pa.array(self.values[name], pa.string()))
            for name in TEXT
        }
        columns |= {name: pa.array(self.whole[name]) for name in WHOLE}
        columns["value"] = pa.array(self.value)
        for name, (codes, texts) in self._selected(selected or {}).items():
            columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(texts, pa.string()))
        table = pa.table(columns).replace_schema_metadata({"kbench.samples.version": str(SAMPLES_VERSION)})
        partial = path.with_suffix(".partial")
        try:
            pq.write_table(table, partial, compression="zstd")
            partial.replace(path)
        except OSError as error:
            raise MeasurementError(
                f"cannot write: {error.strerror or error}",
                where=str(path),
                remedy="free space, then run again with --resume",
            ) from error

    def _selected(self, selected: Texts) -> dict[str, tuple[NDArray[np.int32], list[str]]]:
        """Codes and texts of every column of `selected`, a row at a time."""
        cases, variants = self.values["case"], self.values["variant"]
        pairs = self.codes["case"].astype(np.int64) * max(1, len(variants)) + self.codes["variant"]
        found = {}
        for name in COLUMNS:
            texts: dict[str, int] = {}
            lookup = np.array(
                [
                    texts.setdefault(selected.get((case, variant), {}).get(name, ""), len(texts))
                    for case in cases
                    for variant in variants
                ],
                dtype=np.int32,
            )
            found[name] = (lookup[pairs] if len(self) else np.empty(0, np.int32), list(texts))
        return found

    @classmethod
    def read(cls, path: Path) -> SampleTable:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            # Plain strings may come back where a tool rewrote the file; dictionary encoding makes both the same.
            # (`read_table` and `to_numpy` would import pandas.)
            with pq.ParquetFile(path, read_dictionary=list(TEXT)) as file:
                table = file.read(columns=[*TEXT, *WHOLE, "value"])
            version = (table.schema.metadata or {}).get(b"kbench.samples.version")
            if version != str(SAMPLES_VERSION).encode():
                raise IntegrityError(f"samples of version {version!r}, not {SAMPLES_VERSION}", where=str(path))
            columns = {name: table.column(name).combine_chunks() for name in (*TEXT, *WHOLE, "value")}
            if any(column.null_count for column in columns.values()):
                raise IntegrityError("a samples file with holes", where=str(path), remedy="restore the file")
        except (pa.ArrowInvalid, KeyError, OSError) as error:
            raise IntegrityError(f"not a readable samples file: {error}", where=str(path)) from error
        codes, values = {}, {}
        for name in TEXT:
            column = columns[name]
            if not pa.types.is_dictionary(column.type):
                column = column.dictionary_encode()
            if isinstance(column, pa.ChunkedArray):
                column = column.unify_dictionaries().combine_chunks()
            codes[name] = np.from_dlpack(column.indices).astype(np.int32)
            values[name] = column.dictionary.to_pylist()
        whole = {name: np.from_dlpack(columns[name]).astype(np.int64) for name in WHOLE}
        value = np.from_dlpack(columns["value"]).astype(np.float64)
        return cls(codes, values, whole, value)


_KEYS = frozenset(item.name for item in fields(Sample))


def sample_from_json(data: dict[str, Any]) -> Sample:
    """The inverse of `dataclasses.asdict`; raises IntegrityError on a missing or foreign key or type."""
    if data.keys() != _KEYS:
        raise IntegrityError(f"a sample with other keys than expected: {sorted(data.keys() ^ _KEYS)}")
    wrong = [name for name in TEXT[:-1] if type(data[name]) is not str]
    wrong += [name for name in WHOLE if type(data[name]) is not int]
    if wrong or type(data["value"]) not in (float, int) or type(data["flags"]) not in (list, tuple):
        raise IntegrityError(f"a sample with values of other types than expected: {wrong or 'value or flags'}")
    return Sample(**{**data, "flags": tuple(data["flags"])})
