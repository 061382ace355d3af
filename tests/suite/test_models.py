"""The model of a suite: what the engine cannot host or load is said with file and line, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints.folder import tensors_of, write_checkpoint, write_config, write_tensors
from cli.conftest import kbench
from suite.conftest import Edit, problems

CHECKPOINT = ('preset = "tiny"', 'checkpoint = "mine"')
NORM = "model.layers.1.input_layernorm.weight"


def without_norm(folder: Path) -> None:
    tensors = tensors_of(folder)
    del tensors[NORM]
    write_tensors(folder / "model.safetensors", tensors)


def of_another_shape(folder: Path) -> None:
    write_tensors(folder / "model.safetensors", tensors_of(folder) | {NORM: ("F32", (65,))})


def of_integers(folder: Path) -> None:
    write_tensors(folder / "model.safetensors", tensors_of(folder) | {NORM: ("I32", (64,))})


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def of_another_family(folder: Path) -> None:
    write_config(folder, model_type="gemma2")


def gone(folder: Path) -> None:
    (folder / "config.json").unlink()


BROKEN: dict[Callable[[Path], None], tuple[str, str]] = {
    without_norm: (f"mine: tensor {NORM} [64] is missing", "must belong together"),
    of_another_shape: (f"model.safetensors: tensor {NORM} is [65], config.json says [64]", "must belong together"),
    of_integers: (f"model.safetensors: tensor {NORM} is I32, expected F64, F32, F16 or BF16", "unquantised"),
    truncated: ("model.safetensors: is truncated", "copy the checkpoint again"),
    of_another_family: ("config.json: model_type 'gemma2' cannot be loaded", "one of llama"),
    gone: ("mine: no config.json", "name a Hugging Face checkpoint folder"),
}


@pytest.mark.parametrize("breaking", BROKEN, ids=lambda breaking: breaking.__name__)
def test_a_broken_checkpoint_is_one_line_and_exit_2(
    load: Edit, tmp_path: Path, breaking: Callable[[Path], None]
) -> None:
    folder = write_checkpoint(tmp_path / "mine")
    assert load(CHECKPOINT).suite.model.checkpoint == "mine"
    breaking(folder)
    what, remedy = BROKEN[breaking]
    [problem] = problems(load, CHECKPOINT)
    assert (problem.line, problem.key) == (8, "model.checkpoint")
    assert what in problem.what and remedy in problem.remedy
    said = kbench("step", tmp_path / "suite.toml", "--out", tmp_path / "results")
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1 and "suite.toml:8: model.checkpoint: " in said.err and what in said.err


def test_kernels_are_checked_against_the_heads_of_a_checkpoint(load: Edit, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mine", hidden_size=80, num_attention_heads=4, num_key_value_heads=2)
    found = problems(load, CHECKPOINT, ('"sdpa-gather"', '"triton-paged"'))
    assert any("head_dim: wants 20, has a power of two" in item.what for item in found)


def test_layers_of_a_checkpoint_are_its_own(load: Edit, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mine")
    [problem] = problems(load, ('preset = "tiny"', 'checkpoint = "mine"\nlayers = 3'))
    assert (problem.line, problem.key, problem.what) == (9, "model.layers", "layers is 3, the checkpoint has 2")


def test_a_preset_that_the_engine_lacks_is_for_level_1(load: Edit) -> None:
    found = problems(load, ('preset = "tiny"', 'preset = "gemma-2-9b"'))
    first = next(item for item in found if item.key == "model.preset")
    assert "gemma-2-9b: it has four norms a layer, a GELU gate" in first.what


def test_kernels_must_serve_every_kind_of_layer(load: Edit) -> None:
    window = ('preset = "tiny"', 'preset = "tiny-window"')
    wants = {f"{phase}.{feature}" for item in problems(load, window) for phase, feature in [_parts(item)]}
    assert wants == {"prefill.window", "prefill.sinks", "decode.window", "decode.sinks"}
    both = ('prefill = "sdpa", decode = "sdpa-gather"', 'prefill = "reference", decode = "reference"')
    assert load(window, both).baseline.decode == "reference"


def _parts(problem: object) -> tuple[str, str]:
    text = str(problem)
    assert "cannot serve this variant: feature: wants" in text
    return ("prefill" if "attention.prefill" in text else "decode"), text.split("wants ")[1].split(",")[0]
