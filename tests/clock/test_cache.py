from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kbench.clock.cache import COLD_FACTOR, STATES, Flush, State, last_level_bytes, plan_rotation, plan_state

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.mark.parametrize("size", [1 << 10, 520_192, 60 * MIB, 537 * MIB])
def test_cold_is_only_said_where_the_rotation_is_large_enough(size: int) -> None:
    state = plan_rotation(size, 60 * MIB, "cuda")
    assert (state.label == "cold") == (state.sets * size >= COLD_FACTOR * 60 * MIB)
    assert state.rotated_bytes == state.sets * size and state.sets >= 2


def test_small_inputs_need_many_sets_and_too_many_are_not_claimed() -> None:
    assert plan_rotation(520_192, 60 * MIB, "cuda").sets == 363
    tiny = plan_rotation(1_024, 60 * MIB, "cuda")
    assert (tiny.label, tiny.sets) == ("warm", 1_024)
    assert plan_rotation(2 * MIB, 300 * MIB, "cpu").label == "warm"
    assert plan_rotation(8 * MIB, 8 * MIB, "cpu").label == "cold"


def test_an_unknown_cache_is_unverified() -> None:
    state = plan_rotation(MIB, 0, "cpu")
    assert (state.label, state.cache_bytes, state.sets) == ("unverified", 0, 2)


def test_the_last_level_is_read_from_sys(tmp_path: Path) -> None:
    for index, (level, size) in enumerate([(1, "48K"), (1, "32K"), (2, "2048K"), (3, "300M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    assert last_level_bytes(CPU, tmp_path) == 300 * MIB
    (tmp_path / "index3" / "size").write_text("nonsense")
    assert last_level_bytes(CPU, tmp_path) == 2 * MIB
    assert last_level_bytes(CPU, tmp_path / "absent") == 0


@pytest.mark.parametrize("streamed", [0, 1 << 10, 520_192, 60 * MIB, 537 * MIB])
@pytest.mark.parametrize("activations", [0, 64 << 10, 100 * MIB])
@pytest.mark.parametrize("wanted", STATES)
def test_a_label_is_only_given_where_it_is_met(streamed: int, activations: int, wanted: State) -> None:
    cache = 60 * MIB
    state = plan_state(streamed, activations, cache, "cuda", wanted)
    whole = streamed + activations
    allowed = (wanted, "warm", "cold", "hot") if wanted == "serving" else (wanted, "warm", "cold")
    assert state.wanted == wanted and state.label in allowed
    if state.label == "cold":
        assert max(state.rotated_bytes, whole) >= COLD_FACTOR * cache
    if state.label == "hot":
        assert (state.sets, state.activation_sets, state.flush_bytes) == (1, 1, 0) and whole <= cache
    if state.label == "flush":
        assert state.flush_bytes >= 2 * cache and state.sets == 1
    if state.label == "serving":
        assert state.activation_sets == 1
        assert streamed <= 0.01 * whole or state.sets * streamed >= COLD_FACTOR * cache


def test_serving_keeps_activations_and_rotates_what_is_streamed() -> None:
    weights, activations = 32 * MIB, 512 << 10
    state = plan_state(weights, activations, 60 * MIB, "cuda", "serving")
    assert (state.label, state.sets, state.activation_sets) == ("serving", 6, 1)
    assert state.rotated_bytes == 6 * weights + activations
    norm = plan_state(0, activations, 60 * MIB, "cuda", "serving")
    assert (norm.label, norm.sets) == ("serving", 1), "a norm streams nothing: its activations are hot"
    decode = plan_state(512 * MIB, activations, 60 * MIB, "cuda", "serving")
    assert decode.label == "serving", "a thousandth of the data makes no difference"
    prefill = plan_state(100 * MIB, 100 * MIB, 60 * MIB, "cuda", "serving")
    assert (prefill.label, prefill.activation_sets) == ("cold", 2), "its activations find no room in the cache"
    assert plan_state(180 * MIB, 100 * MIB, 60 * MIB, "cuda", "serving").label == "cold"


@pytest.mark.parametrize(
    ("rows", "label", "sets"), [(1, "hot", 1), (32, "serving", 1), (2_048, "cold", 3), (8_192, "cold", 2)]
)
def test_a_norms_weight_does_not_multiply_its_activations(rows: int, label: str, sets: int) -> None:
    """4,096 bf16 values a row, read twice and written twice; 8 KiB of weight would want 23,000 sets to be cold."""
    state = plan_state(8 << 10, 4 * rows * (8 << 10), 60 * MIB, "cuda", "serving")
    assert (state.label, state.sets, state.activation_sets) == (label, sets, sets)


def test_cold_counts_activations_too() -> None:
    state = plan_state(30 * MIB, 30 * MIB, 60 * MIB, "cuda", "cold")
    assert (state.label, state.sets, state.activation_sets) == ("cold", 3, 3)


def test_nothing_is_claimed_of_an_unknown_or_a_huge_cache() -> None:
    for wanted in STATES:
        assert plan_state(MIB, MIB, 0, "cpu", wanted).label == "unverified"
    assert plan_state(MIB, 0, 1 << 30, "cpu", "flush").label == "warm"
    assert plan_state(MIB, 0, 300 * MIB, "cpu", "flush").flush_bytes == 600 * MIB


def test_a_flush_writes_all_of_its_buffer_each_time() -> None:
    flush = Flush(CPU, 4_096)
    assert flush.bytes == 4_096
    seen = []
    for _ in range(3):
        flush()
        seen.append(flush._buffer.unique().tolist())
    assert seen == [[1], [0], [1]]
