"""One spelling per meaning, and differences exactly where hashes differ."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbench.hashing import canonical, difference, sha256_of, sha256_of_file

steady = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
)
PLAIN = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
TABLE = st.dictionaries(st.text(min_size=1, max_size=3), PLAIN, max_size=4)
RULE: dict[str, Any] = {
    "rule": {"alpha": 0.05, "regime": [{"id": "long", "require": [{"margin": 0.02}, {"margin": 0.03, "test": "ni"}]}]}
}


@steady
@given(PLAIN)
def test_the_spelling_reads_back_and_does_not_depend_on_order(value: Any) -> None:
    spelled = canonical(value)
    assert json.loads(spelled) == value
    assert canonical(json.loads(spelled)) == spelled
    assert spelled.isascii() and b"\n" not in spelled
    if isinstance(value, dict):
        assert canonical(dict(reversed(value.items()))) == spelled
    assert sha256_of(value) == hashlib.sha256(spelled).hexdigest()


@steady
@given(TABLE, TABLE)
def test_no_difference_exactly_where_the_hashes_agree(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert (difference(old, new) == []) == (sha256_of(old) == sha256_of(new))
    assert difference(old, copy.deepcopy(old)) == []


def test_a_changed_margin_is_named_with_its_place() -> None:
    new = copy.deepcopy(RULE)
    new["rule"]["regime"][0]["require"][1]["margin"] = 0.05
    assert difference(RULE, new) == ["rule.regime[0].require[1].margin: 0.03 → 0.05"]


def test_added_and_removed_parts_are_shown() -> None:
    new = copy.deepcopy(RULE)
    del new["rule"]["alpha"]
    new["rule"]["regime"][0]["require"].append({"margin": 0.1})
    new["seed"] = 2
    assert difference(RULE, new) == [
        "rule.alpha: 0.05 → (absent)",
        'rule.regime[0].require[2]: (absent) → {"margin": 0.1}',
        "seed: (absent) → 2",
    ]
    assert difference(new, RULE)[0] == "rule.alpha: (absent) → 0.05"


@pytest.mark.parametrize(
    ("old", "new"), [(1, 1.0), (1, True), (0, False), ("1", 1), (None, False), (0.0, -0.0), ([], {})]
)
def test_look_alikes_differ(old: object, new: object) -> None:
    assert canonical(old) != canonical(new)
    assert len(difference({"x": old}, {"x": new})) == 1


def test_a_tuple_is_a_list() -> None:
    assert canonical((1, [2])) == canonical([1, (2,)]) == b"[1,[2]]"
    assert difference({"x": (1,)}, {"x": [1]}) == []


def test_long_values_are_shortened_where_they_are_shown() -> None:
    (line,) = difference({"x": "a" * 500}, {"x": "b"})
    assert len(line) < 120 and "…" in line


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, math.nan]}, r"a\[1\]"),
        ({"a": {"b": math.inf}}, r"a\.b"),
        ({"a": {1: "x"}}, r"^a has the key 1"),
        ({"a": {1, 2}}, "a is a set"),
        (b"bytes", "value is a bytes"),
    ],
)
def test_what_has_no_spelling_is_refused_with_its_place(value: object, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        canonical(value)
    with pytest.raises(ValueError):
        difference({"x": value}, {})


def test_a_file_is_hashed_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    assert sha256_of_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
