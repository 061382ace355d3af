"""Headers of safetensors files: everything that is wrong with a folder is said before a tensor is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints.folder import Tensors, tensors_of, write_checkpoint, write_config, write_tensors
from kbench.checkpoints import check_checkpoint
from kbench.errors import UsageError

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "llama")


def refused(folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        check_checkpoint(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def rewritten(folder: Path, changes: Tensors, *, without: str = "") -> str:
    tensors = tensors_of(folder) | changes
    tensors.pop(without, None)
    write_tensors(folder / "model.safetensors", tensors)
    return refused(folder)


def test_a_whole_folder_is_its_shape(llama: Path) -> None:
    shape = check_checkpoint(llama)
    assert (shape.name, shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim) == ("llama", 2, 4, 2, 16)


def test_tensors_that_are_missing_are_named(llama: Path) -> None:
    assert f"tensor {NORM} [64] is missing (" in rewritten(llama, {}, without=NORM)
    write_config(write_checkpoint(llama), num_hidden_layers=3)
    assert "tensor model.layers.2.input_layernorm.weight [64] is missing, and 8 more" in refused(llama)


def test_another_shape_or_dtype_is_named_with_file_found_and_expected(llama: Path) -> None:
    text = rewritten(llama, {NORM: ("F32", (65,))})
    assert text.startswith(f"{llama / 'model.safetensors'}: tensor {NORM} is [65], config.json says [64]")
    assert f"tensor {NORM} is I32, expected F64, F32, F16 or BF16" in rewritten(llama, {NORM: ("I32", (64,))})
    assert f"tensor {NORM} is F8_E4M3, expected" in rewritten(llama, {NORM: ("F8_E4M3", (64,))})


def test_a_tensor_that_is_not_understood_is_named(llama: Path) -> None:
    text = rewritten(llama, {"model.layers.0.adapter.weight": ("BF16", (3, 2))})
    assert "tensor model.layers.0.adapter.weight [3, 2] is not understood" in text


def test_buffers_of_older_files_and_a_tied_head_are_passed_over(llama: Path) -> None:
    extra: Tensors = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (8,))}
    write_tensors(llama / "model.safetensors", tensors_of(llama) | extra)
    assert not check_checkpoint(llama).tied_embeddings
    write_config(llama, tie_word_embeddings=True)
    assert check_checkpoint(llama).tied_embeddings


@pytest.mark.parametrize("kept", [0, 7, 8, 200, -1, -4_000])
def test_truncated_files_are_named(llama: Path, kept: int) -> None:
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    text = refused(llama)
    assert str(file) in text and "copy the checkpoint again" in text
    if kept < 0:
        assert f"is truncated: {len(whole) + kept} bytes instead of {len(whole)}" in text


def test_a_header_that_contradicts_itself_is_refused(llama: Path) -> None:
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def replaced(entry: object) -> str:
        changed = json.dumps(header | {NORM: entry}).encode()
        file.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[8 + length :])
        return refused(llama)

    assert f"tensor {NORM} F32 [65] has 256 bytes, not 260" in replaced(header[NORM] | {"shape": [65]})
    assert "cannot be read" in replaced({"dtype": "F32"})
    assert "cannot be read" in replaced([])


def test_shards_must_be_there_and_hold_what_the_index_says(llama: Path) -> None:
    def indexed(weight_map: object) -> str:
        (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return refused(llama)

    assert "shard gone.safetensors is missing" in indexed({"a": "gone.safetensors"})
    assert "is missing" in indexed({"a": "../model.safetensors"})
    assert "cannot be read" in indexed([1])
    assert "tensor b is missing, which model.safetensors.index.json promises" in indexed({"b": "model.safetensors"})
    (llama / "model.safetensors.index.json").write_text("{")
    assert "cannot be read" in refused(llama)


def test_two_shards(llama: Path) -> None:
    tensors = tensors_of(llama)
    write_tensors(llama / "a.safetensors", {NORM: tensors.pop(NORM)})
    assert f"tensor {NORM} is in a.safetensors too" in refused(llama)
    write_tensors(llama / "model.safetensors", tensors)
    check_checkpoint(llama)
    index = dict.fromkeys(tensors, "model.safetensors") | {NORM: "a.safetensors"}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check_checkpoint(llama)


def test_a_folder_without_weights_says_so(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert "no safetensors file" in refused(llama)
    (llama / "model.safetensors").write_bytes(b"no tensors")
    assert "cannot be read" in refused(llama)
