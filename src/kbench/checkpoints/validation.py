"""Whether a checkpoint folder can be loaded, decided from config.json and the headers of its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kbench.catalog import ModelShape
from kbench.checkpoints.config import read_shape
from kbench.checkpoints.files import FLOATS, Stored, stored_tensors
from kbench.checkpoints.layout import Part, decoder_parts, layer_parts
from kbench.errors import UsageError

_TOGETHER = "config.json and the safetensors files must belong together"
_LEFT_OUT = (".rotary_emb.inv_freq",)
"""Buffers that older checkpoints hold and that follow from config.json."""


def check_checkpoint(folder: Path) -> ModelShape:
    """The shape of a folder whose tensors are all there, in shape and dtype, with none left over.

    Raises UsageError, one line, with file, tensor, what was expected and what was found.
    """
    shape = read_shape(folder)
    stored = stored_tensors(folder)
    expected = {name: sizes for part in all_parts(shape) for name, sizes in part.tensors}
    missing = [name for name in expected if name not in stored]
    if missing:
        more = f", and {len(missing) - 1} more" if missing[1:] else ""
        raise UsageError(
            f"tensor {missing[0]} {list(expected[missing[0]])} is missing{more}", where=str(folder), remedy=_TOGETHER
        )
    for name, sizes in expected.items():
        _check(stored[name], sizes)
    _refuse_left_over(folder, shape, expected.keys(), stored)
    return shape


def all_parts(shape: ModelShape) -> Iterator[Part]:
    yield from decoder_parts(shape).values()
    for index in range(shape.layers):
        yield from layer_parts(shape, index).values()


def _check(tensor: Stored, sizes: tuple[int, ...]) -> None:
    if tensor.shape != sizes:
        raise UsageError(
            f"tensor {tensor.name} is {list(tensor.shape)}, config.json says {list(sizes)}",
            where=str(tensor.file),
            remedy=_TOGETHER,
        )
    if tensor.dtype not in FLOATS:
        raise UsageError(
            f"tensor {tensor.name} is {tensor.dtype}, expected {', '.join(FLOATS[:-1])} or {FLOATS[-1]}",
            where=str(tensor.file),
            remedy="use unquantised weights",
        )


def _refuse_left_over(folder: Path, shape: ModelShape, expected: object, stored: dict[str, Stored]) -> None:
    tied = ("lm_head.weight",) if shape.tied_embeddings else ()
    known = set(expected) | set(tied)  # type: ignore[call-overload]
    left = sorted(name for name in stored if name not in known and not name.endswith(_LEFT_OUT))
    if left:
        first = stored[left[0]]
        more = f", nor are {len(left) - 1} more" if left[1:] else ""
        raise UsageError(
            f"tensor {first.name} {list(first.shape)} is not understood{more}",
            where=str(first.file),
            remedy="the model has a part that the decoder lacks",
        )
