from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kbench.clock.cache import COLD_FACTOR, last_level_bytes, plan_rotation

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
