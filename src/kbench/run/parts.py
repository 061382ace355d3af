"""Tables that workers wrote, one file an arm and replay, joined into one file a kind when a run closes."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kbench.errors import MeasurementError

KINDS = ("requests", "steps", "kv")


def part_paths(folder: Path, label: str) -> dict[str, str]:
    """Where one replay writes its tables."""
    return {kind: str(folder / "parts" / f"{kind}-{label}.parquet") for kind in KINDS}


def merge(folder: Path) -> None:
    """Join `parts/KIND-*.parquet` into `KIND.parquet`; columns that a part lacks are null. Safe to repeat.

    The column `part` tells replays of one trace and arm apart: `virtual-…`, `slice-…`, `modelled-slice-…`, `exec-…`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for kind in KINDS:
        files = sorted((folder / "parts").glob(f"{kind}-*.parquet"))
        if not files:
            continue
        target = folder / f"{kind}.parquet"
        partial = target.with_suffix(".partial")
        try:
            tables = []
            for file in files:
                table = pq.read_table(file)
                label = pa.array([file.stem.removeprefix(f"{kind}-")] * len(table), pa.string())
                tables.append(table.append_column("part", label))
            table = pa.concat_tables(tables, promote_options="permissive")
            pq.write_table(table, partial, compression="zstd")
            partial.replace(target)
        except OSError as error:
            raise MeasurementError(
                f"cannot write: {error.strerror or error}", where=str(target), remedy="free space, then --resume"
            ) from error


def discard(folder: Path) -> None:
    """Remove the parts of a closed run: what they hold stands in its joined tables. Logs of workers stay."""
    for file in (folder / "parts").glob("*.parquet"):
        with contextlib.suppress(OSError):
            file.unlink()
