"""What is said on a worker's pipe is what is heard, and noise on it is one error and no traceback."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbench.errors import MeasurementError
from kbench.protocol import (
    Measurement,
    Outcome,
    Reply,
    Request,
    Status,
    decode_reply,
    decode_request,
    encode,
)

texts = st.text(st.characters(codec="utf-8"), max_size=20)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
facts = st.dictionaries(texts, plain, max_size=4)
measurements = st.builds(
    Measurement,
    texts,
    texts,
    st.floats(allow_nan=False),
    texts,
    st.lists(texts, max_size=3).map(tuple),
    st.integers(-1, 2**31),
)
outcomes = st.builds(Outcome, st.sampled_from(Status), texts, st.lists(measurements, max_size=3).map(tuple), facts)


@given(st.integers(0, 2**53), texts, facts)
def test_a_request_arrives_as_sent_on_one_line(seq: int, op: str, args: dict[str, Any]) -> None:
    line = encode(Request(seq, op, args))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode_request(line) == Request(seq, op, args)


@given(st.integers(0, 2**53), outcomes)
def test_a_reply_arrives_as_sent_on_one_line(seq: int, outcome: Outcome) -> None:
    line = encode(Reply(seq, outcome))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode_reply(line) == Reply(seq, outcome)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_travel_too(value: float) -> None:
    reply = decode_reply(encode(Reply(1, Outcome(measurements=(Measurement("m", "us", value),)))))
    arrived = reply.outcome.measurements[0].value
    assert math.isnan(arrived) if math.isnan(value) else arrived == value


LINE = encode(Reply(3, Outcome(Status.OK, "m", (Measurement("m", "us", 1.0),), {"a": 1})))


@given(st.binary(max_size=40))
def test_noise_is_a_measurement_error(noise: bytes) -> None:
    for decode in (decode_reply, decode_request):
        with pytest.raises(MeasurementError):
            decode(noise)


@given(st.integers(0, len(LINE) - 2))
def test_a_torn_line_is_a_measurement_error(length: int) -> None:
    with pytest.raises(MeasurementError):
        decode_reply(LINE[:length])


@pytest.mark.parametrize(
    "change",
    [
        {"seq": "x"},
        {"seq": None},
        {"outcome": None},
        {"outcome": {"status": "splendid", "message": "", "measurements": [], "facts": {}}},
        {"outcome": {"status": "ok", "message": "", "measurements": [1], "facts": {}}},
        {"outcome": {"status": "ok", "message": "", "measurements": [{"metric": "m"}], "facts": {}}},
        {"outcome": {"status": "ok", "message": "", "measurements": [], "facts": 5}},
        {"outcome": {"status": "ok"}},
    ],
)
def test_a_reply_of_another_shape_is_a_measurement_error(change: dict[str, Any]) -> None:
    with pytest.raises(MeasurementError, match="malformed"):
        decode_reply(json.dumps({**json.loads(LINE), **change}).encode())
