"""Hugging Face checkpoint folders: config.json and safetensors, whole or sharded, into the decoder's weights.

Owns the families it can read (Llama, Mistral, Qwen2, Qwen3, Mixtral), their tensor names, and what it refuses: a
feature that the decoder lacks, a tensor that is missing, has another shape or is not understood. It never downloads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kbench.catalog import ModelShape, Rope
from kbench.engine.mlp import Dense, Experts
from kbench.engine.model import Layer, Weights
from kbench.errors import UsageError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral")
_IGNORED = (".rotary_emb.inv_freq",)


def load_checkpoint(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[ModelShape, Weights]:
    """Shape and weights of a checkpoint folder. Anything odd is a UsageError with file, tensor and shapes."""
    config = _config(folder)
    shape = checkpoint_shape(folder)
    with _Tensors.open(folder, dtype, device) as tensors:
        embedding = tensors.take("model.embed_tokens.weight", (shape.vocab, shape.hidden))
        layers = tuple(_layer(tensors, shape, index, str(config["model_type"])) for index in range(shape.layers))
        norm = tensors.take("model.norm.weight", (shape.hidden,))
        if shape.tied_embeddings:
            tensors.ignore("lm_head.weight")
            head = embedding
        else:
            head = tensors.take("lm_head.weight", (shape.vocab, shape.hidden))
        tensors.expect_all_taken()
    return shape, Weights(embedding, layers, norm, head)


def checkpoint_shape(folder: Path) -> ModelShape:
    """The model's shape from config.json alone."""
    config = _config(folder)
    file = str(folder / "config.json")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UsageError(f"model_type {family!r} cannot be loaded", where=file, remedy=f"one of {', '.join(FAMILIES)}")
    _refuse(config, file)

    def number(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{key} is {value!r}", where=file, remedy="a whole number of 1 or more")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    moe = family == "mixtral"
    return ModelShape(
        name=folder.name,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        q_heads=heads,
        kv_heads=number("num_key_value_heads") if config.get("num_key_value_heads") else heads,
        head_dim=number("head_dim") if config.get("head_dim") else hidden // heads,
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        rope_theta=float(_rope(config).get("rope_theta", 10_000.0)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        attention_bias=family == "qwen2",
        experts=number("num_local_experts") if moe else 0,
        experts_per_token=number("num_experts_per_tok") if moe else 0,
        expert_intermediate=number("intermediate_size") if moe else 0,
        max_context=number("max_position_embeddings"),
        rope=_scaling(folder / "config.json", config),
        source=file,
    )


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError("no config.json", where=str(folder), remedy="name a Hugging Face checkpoint folder") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(file), remedy="copy the checkpoint again") from error
    if not isinstance(config, dict):
        raise UsageError("is not an object", where=str(file), remedy="copy the checkpoint again")
    return config


def _refuse(config: dict[str, Any], file: str) -> None:
    """Features that would change the logits and that the decoder does not have."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UsageError(f"hidden_act {activation!r} is not supported", where=file, remedy="silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UsageError(f"{key} is not supported", where=file, remedy="use a checkpoint without it")
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", config.get("model_type") in ("mistral", "mixtral"))
    if window and uses_window:
        raise UsageError(f"a sliding window of {window} is not supported", where=file, remedy="use full attention")
    if config.get("quantization_config"):
        raise UsageError("quantised weights are not supported", where=file, remedy="use the unquantised checkpoint")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings, from the newer `rope_parameters` or the older `rope_scaling` and `rope_theta`."""
    merged = dict(config.get("rope_scaling") or {})
    merged.update(config.get("rope_parameters") or {})
    if "rope_theta" not in merged and config.get("rope_theta"):
        merged["rope_theta"] = config["rope_theta"]
    return merged


def _scaling(file: Path, config: dict[str, Any]) -> Rope:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Rope()
    if kind == "linear":
        return Rope("linear", factor=float(rope["factor"]))
    if kind == "llama3":
        factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        return Rope("llama3", factor, int(rope["original_max_position_embeddings"]), low, high)
    raise UsageError(f"rope_type {kind!r} is not supported", where=str(file), remedy="default, linear or llama3")


def _layer(tensors: _Tensors, shape: ModelShape, index: int, family: str) -> Layer:
    at = f"model.layers.{index}."
    q_rows, kv_rows = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    parts = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    qkv = torch.cat([tensors.take(f"{at}self_attn.{n}_proj.weight", (rows, shape.hidden)) for n, rows in parts])
    bias = None
    if shape.attention_bias:
        bias = torch.cat([tensors.take(f"{at}self_attn.{n}_proj.bias", (rows,)) for n, rows in parts])
    norms = [tensors.take(f"{at}self_attn.{n}_norm.weight", (shape.head_dim,)) for n in "qk"] if shape.qk_norm else None
    return Layer(
        input_norm=tensors.take(f"{at}input_layernorm.weight", (shape.hidden,)),
        qkv=qkv,
        qkv_bias=bias,
        q_norm=norms[0] if norms else None,
        k_norm=norms[1] if norms else None,
        output=tensors.take(f"{at}self_attn.o_proj.weight", (shape.hidden, q_rows)),
        post_norm=tensors.take(f"{at}post_attention_layernorm.weight", (shape.hidden,)),
        mlp=_experts(tensors, shape, at) if family == "mixtral" else _dense(tensors, shape, at),
    )


def _dense(tensors: _Tensors, shape: ModelShape, at: str) -> Dense:
    size = (shape.intermediate, shape.hidden)
    return Dense(
        gate_up=torch.cat([tensors.take(f"{at}mlp.{name}_proj.weight", size) for name in ("gate", "up")]),
        down=tensors.take(f"{at}mlp.down_proj.weight", (shape.hidden, shape.intermediate)),
    )


def _experts(tensors: _Tensors, shape: ModelShape, at: str) -> Experts:
    at += "block_sparse_moe."
    size = (shape.expert_intermediate, shape.hidden)
    every = range(shape.experts)
    return Experts(
        router=tensors.take(f"{at}gate.weight", (shape.experts, shape.hidden)),
        gate_up=torch.stack(
            [torch.cat([tensors.take(f"{at}experts.{e}.{w}.weight", size) for w in ("w1", "w3")]) for e in every]
        ),
        down=torch.stack([tensors.take(f"{at}experts.{e}.w2.weight", size[::-1]) for e in every]),
    )


class _Tensors:
    """The tensors of all safetensors files of a folder, each read when it is taken, and what was not taken."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._homes: dict[str, tuple[str, Any]] = {}
        self._taken: set[str] = set()

    @classmethod
    @contextmanager
    def open(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> Iterator[_Tensors]:
        from safetensors import SafetensorError, safe_open

        self = cls(folder, dtype, device)
        with ExitStack() as stack:
            for file in _files(folder):
                try:
                    handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                except (OSError, SafetensorError) as error:
                    raise UsageError(
                        f"cannot be read: {error}", where=str(file), remedy="copy the checkpoint again"
                    ) from error
                for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no dict
                    self._homes[name] = (file.name, handle)
            yield self

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._homes:
            raise UsageError(
                f"tensor {name} {list(shape)} is missing",
                where=str(self._folder),
                remedy="config.json and the safetensors files must belong together",
            )
        file, handle = self._homes[name]
        have = tuple(handle.get_slice(name).get_shape())
        if have != shape:
            raise UsageError(
                f"tensor {name} is {list(have)}, config.json says {list(shape)}",
                where=str(self._folder / file),
                remedy="config.json and the safetensors files must belong together",
            )
        self._taken.add(name)
        tensor: Tensor = handle.get_tensor(name)
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise UsageError(
                f"tensor {name} is {tensor.dtype}", where=str(self._folder / file), remedy="use unquantised weights"
            )
        return tensor.to(self._device, self._dtype)

    def ignore(self, name: str) -> None:
        self._taken.add(name)

    def expect_all_taken(self) -> None:
        left = sorted(name for name in self._homes if name not in self._taken and not name.endswith(_IGNORED))
        if left:
            shape = list(self._homes[left[0]][1].get_slice(left[0]).get_shape())
            raise UsageError(
                f"tensor {left[0]} {shape} is not understood" + (f", nor {len(left) - 1} more" if left[1:] else ""),
                where=str(self._folder / self._homes[left[0]][0]),
                remedy="the model has a part that the decoder lacks",
            )


def _files(folder: Path) -> list[Path]:
    """The shards that the index names, or every safetensors file of the folder."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UsageError("no safetensors file", where=str(folder), remedy="convert the checkpoint to safetensors")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(index), remedy="copy the checkpoint again") from error
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise UsageError(f"shard {missing[0]} is missing", where=str(index), remedy="copy the checkpoint again")
    return [folder / name for name in names]
