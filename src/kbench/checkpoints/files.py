"""The safetensors files of a folder: what their headers promise, and whether the bytes are there.

Owns the shards, the headers and their arithmetic. Format: 8 bytes little-endian length, that many bytes of JSON (name →
dtype, shape, offsets), then the data. No tensor is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench.errors import UsageError

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
"""What weights may be stored as; narrower ones are quantised."""
MOST_HEADER_BYTES = 100_000_000
_AGAIN = "copy the checkpoint again"


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a header describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's shards by name. UsageError where a file is missing, cut short or no safetensors."""
    files, index = _files(folder)
    found: dict[str, Stored] = {}
    for file in files:
        for tensor in _header(file):
            if tensor.name in found:
                raise UsageError(
                    f"tensor {tensor.name} is in {found[tensor.name].file.name} too", where=str(file), remedy=_AGAIN
                )
            found[tensor.name] = tensor
    for name, home in index.items():
        if name not in found or found[name].file.name != home:
            raise UsageError(
                f"tensor {name} is missing, which model.safetensors.index.json promises",
                where=str(folder / home),
                remedy=_AGAIN,
            )
    return found


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The shards that the index names and the index, or every safetensors file of the folder."""
    listing = folder / "model.safetensors.index.json"
    if not listing.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UsageError("no safetensors file", where=str(folder), remedy="convert the checkpoint to safetensors")
        return files, {}
    try:
        index = json.loads(listing.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(index.values()))
        inside = all(Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(listing), remedy=_AGAIN) from error
    missing = [name for name in names if not inside or not (folder / name).is_file()]
    if missing:
        raise UsageError(f"shard {missing[0]} is missing", where=str(listing), remedy=_AGAIN)
    return [folder / name for name in names], index


def _header(file: Path) -> list[Stored]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise UsageError(
                    f"cannot be read: {size} bytes cannot hold a header of {length}",
                    where=str(file),
                    remedy=f"it is truncated or no safetensors file; {_AGAIN}",
                )
            entries = json.loads(stream.read(length))
        tensors = [_entry(file, name, entry) for name, entry in entries.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(file), remedy=_AGAIN) from error
    promised = max((end for _, end in tensors), default=0)
    if promised > size - 8 - length:
        last = max(tensors, key=lambda tensor: tensor[1])[0].name
        raise UsageError(
            f"is truncated: {size} bytes instead of {promised + 8 + length}, tensor {last} ends beyond them",
            where=str(file),
            remedy=_AGAIN,
        )
    return [tensor for tensor, _ in tensors]


def _entry(file: Path, name: str, entry: dict[str, Any]) -> tuple[Stored, int]:
    """The tensor, and where its bytes end."""
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    bits = math.prod(shape) * BITS.get(dtype, 0)
    if dtype in BITS and (end - begin) * 8 != bits:
        raise UsageError(
            f"tensor {name} {dtype} {list(shape)} has {end - begin} bytes, not {bits // 8}",
            where=str(file),
            remedy=_AGAIN,
        )
    return Stored(name, file, dtype, shape), end
