"""The tuner: what is kept, what each policy does with it, and what it costs whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbench.catalog import Point, Resolved, model_shape, parse_point, parse_shape, resolve_shape
from kbench.errors import UsageError
from kbench.kernels.drift import Trials, drift
from kbench.kernels.tuner import (
    POLICIES,
    Key,
    Policy,
    Tuner,
    TuningCache,
    bucket_of,
    implementation_hash,
    rounded,
    tunable,
)

TIMES = {1: 10.0, 2: 4.0, 3: 7.0}
"""The rule of thumb (1) is slower than 2."""


class Tiled:
    def __init__(self, tile: int = 1) -> None:
        self.tile = tile

    def configurations(self, shape: Resolved) -> list[dict[str, int]]:
        return [{"tile": tile} for tile in TIMES]

    def with_configuration(self, one: dict[str, int]) -> Tiled:
        return Tiled(one["tile"])


def shape(text: str = "4*1@1000", op: str = "attention.decode") -> Resolved:
    return resolve_shape(op, parse_shape(text), model_shape("tiny"))


def key(bucket: str = "4*1@1024", **changed: str) -> Key:
    fields = {"op": "attention.decode", "dtype": "float32", "layout": "NHD16", "device": "cpu", "implementation": "x"}
    return Key(bucket=bucket, **{**fields, **changed})


def time_of(implementation: Any) -> float | None:
    return TIMES[implementation.tile]


def tuner(policy: Policy, folder: Path) -> Tuner:
    return Tuner(policy, TuningCache(folder))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_each_policy_does_with_a_shape_that_nobody_has_tuned(policy: Policy, tmp_path: Path) -> None:
    own = tuner(policy, tmp_path)
    made = own.configured(Tiled(), key(), shape(), time_of)
    counters = own.counters
    assert made.tile == (2 if policy == "live" else 1)
    assert (counters.misses, counters.outliers) == {"heuristic": (0, 0), "live": (1, 1)}.get(policy, (1, 0))
    assert (counters.spent_us > 0.0) == (policy == "live")
    again = own.configured(Tiled(), key(), shape(), time_of)
    assert again.tile == made.tile
    assert own.counters.hits == (1 if policy == "live" else 0)


@pytest.mark.parametrize("policy", ["build", "warm-up", "live"])
def test_what_was_tuned_before_is_found_by_another_process(policy: Policy, tmp_path: Path) -> None:
    tuner("warm-up", tmp_path).warm(Tiled(), key(), shape(), time_of)
    own = tuner(policy, tmp_path)
    assert own.configured(Tiled(), key(), shape(), time_of).tile == 2
    assert (own.counters.hits, own.counters.misses, own.counters.spent_us) == (1, 0, 0.0)
    [entry] = TuningCache(tmp_path).entries()
    assert (entry.time_us, entry.heuristic_us, entry.configuration) == (4.0, 10.0, {"tile": 2})


@pytest.mark.parametrize("field", ["op", "bucket", "dtype", "layout", "device", "implementation"])
def test_an_entry_of_another_key_is_none(field: str, tmp_path: Path) -> None:
    tuner("warm-up", tmp_path).warm(Tiled(), key(), shape(), time_of)
    own = tuner("build", tmp_path)
    assert own.configured(Tiled(), key(**{field: "other"}), shape(), time_of).tile == 1
    assert own.counters.misses == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 99}'])
def test_a_damaged_entry_is_tuned_again_and_no_draft_is_left(damage: str, tmp_path: Path) -> None:
    tuner("warm-up", tmp_path).warm(Tiled(), key(), shape(), time_of)
    [file] = tmp_path.iterdir()
    file.write_text(damage)
    own = tuner("live", tmp_path)
    assert own.configured(Tiled(), key(), shape(), time_of).tile == 2 and own.counters.misses == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert json.loads(file.read_text())["configuration"] == {"tile": 2}


def test_luck_does_not_beat_the_rule_of_thumb(tmp_path: Path) -> None:
    """The second reading of what looked fastest is slower than the rule of thumb's."""
    readings = iter([10.0, 4.0, 12.0, 11.0, 9.5])
    found = tuner("live", tmp_path).tune(Tiled(), key(), shape(), lambda _: next(readings))
    assert found is not None and found.best == {"tile": 1}


def test_a_configuration_that_is_wrong_is_never_taken(tmp_path: Path) -> None:
    def wrong_when_fast(implementation: Any) -> float | None:
        return None if implementation.tile == 2 else TIMES[implementation.tile]

    assert tuner("live", tmp_path).configured(Tiled(), key(), shape(), wrong_when_fast).tile == 3
    assert tuner("live", tmp_path / "none").configured(Tiled(), key(), shape(), lambda _: None).tile == 1


def test_an_entry_that_the_implementation_no_longer_offers_is_a_miss(tmp_path: Path) -> None:
    class Fewer(Tiled):
        def configurations(self, shape: Resolved) -> list[dict[str, int]]:
            return [{"tile": 1}, {"tile": 3}]

    tuner("warm-up", tmp_path).warm(Tiled(), key(), shape(), time_of)
    own = tuner("build", tmp_path)
    assert own.configured(Fewer(), key(), shape(), time_of).tile == 1 and own.counters.misses == 1


def test_what_has_nothing_to_tune_passes_through(tmp_path: Path) -> None:
    plain = object()
    own = tuner("live", tmp_path)
    assert not tunable(plain) and own.configured(plain, key(), shape(), time_of) is plain
    assert own.counters.misses == 0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="tuning cannot be kept"):
        tuner("live", tmp_path / "file").configured(Tiled(), key(), shape(), time_of)


@pytest.mark.parametrize(
    ("op", "text", "bucket"),
    [
        ("attention.decode", "3*1@1000", "4*1@1024,head_dim=32,kv_heads=2,q_heads=8"),
        ("attention.decode", "4*1@1024,window=128", "4*1@1024,head_dim=32,kv_heads=2,q_heads=8,window=128"),
        ("attention.prefill", "2*100@300", "2*128@512,head_dim=32,kv_heads=2,q_heads=8"),
        ("norm.rmsnorm", "rows=33,hidden=96", "hidden=96,rows=64"),
        ("gemm", "m=17,n=96,k=64", "k=64,m=32,n=96"),
    ],
)
def test_what_a_batch_makes_larger_shares_a_bucket(op: str, text: str, bucket: str) -> None:
    assert bucket_of(shape(text, op)) == bucket


@given(st.integers(1, 300), st.integers(1, 5_000))
def test_a_bucket_is_a_point_that_covers_its_batches(count: int, context: int) -> None:
    text = rounded(parse_point(f"{count}*1@{context}"))
    found = parse_point(text)
    assert isinstance(found, Point) and rounded(found) == text
    assert count <= found.batch < 2 * count or count == found.batch
    assert context <= found.context < 2 * context or context == found.context


def test_another_source_is_another_hash() -> None:
    class Local:
        pass

    assert implementation_hash(Tiled()) == implementation_hash(Tiled(3))
    assert implementation_hash(Tiled()) != implementation_hash(parse_point("1"))
    assert len(implementation_hash(Local())) == 64


def test_drift_by_hand() -> None:
    """Tuned on a, a; then a, b, b, b: of b nobody knew."""
    trials = {"a": Trials(10.0, 8.0, 100.0), "b": Trials(20.0, 10.0, 500.0)}
    found = drift(["a", "a", "x", "a", "a", "b", "b", "b"], trials, first=0.5, calls_a_step=2)
    assert (found["first_steps"], found["later_steps"], found["buckets_new"]) == (4, 4, 1)
    policies = found["policies"]
    assert {name: own["kernel_us"] for name, own in policies.items()} == {
        "heuristic": 140.0,
        "build": 136.0,
        "warm-up": 136.0,
        "live": 76.0,
    }
    assert [policies[name]["miss_rate"] for name in POLICIES] == [0.0, 0.75, 0.75, 0.25]
    assert [policies[name]["outliers"] for name in POLICIES] == [0, 0, 0, 1]
    assert [policies[name]["start_us"] for name in POLICIES] == [0.0, 0.0, 100.0, 0.0]
    assert policies["live"]["waited_us"] == 500.0 and policies["live"]["net_us"] == 576.0
    assert found["heuristic_against_tuned"]["b"]["ratio"] == 0.5
    json.dumps(found, allow_nan=False)


def test_a_trace_that_does_not_drift_misses_nothing() -> None:
    found = drift(["a"] * 10, {"a": Trials(10.0, 8.0, 100.0)})
    assert found["policies"]["build"]["miss_rate"] == 0.0
    assert found["policies"]["live"]["saving_over_heuristic"] == pytest.approx(0.2)
    assert drift([], {})["policies"]["build"]["miss_rate"] is None
