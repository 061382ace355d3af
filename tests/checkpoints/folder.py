"""A tiny checkpoint folder written byte by byte: all weights are zero."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbench.checkpoints import read_shape
from kbench.checkpoints.validation import all_parts

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}
Tensors = dict[str, tuple[str, tuple[int, ...]]]
ITEMSIZE = {"F32": 4, "BF16": 2, "I32": 4, "F8_E4M3": 1}


def write_config(folder: Path, **changes: object) -> Path:
    """config.json of a tiny Llama with some keys changed; `...` leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> Tensors:
    """What the folder's config.json asks for."""
    return {name: ("F32", sizes) for part in all_parts(read_shape(folder)) for name, sizes in part.tensors}


def write_tensors(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, sizes) in tensors.items():
        begin, end = end, end + math.prod(sizes) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(sizes), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_checkpoint(folder: Path, **changes: object) -> Path:
    write_config(folder, **changes)
    write_tensors(folder / "model.safetensors", tensors_of(folder))
    return folder
