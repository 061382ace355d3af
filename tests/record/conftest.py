from __future__ import annotations

from hypothesis import strategies as st

from kbench.record import Sample

texts = st.one_of(st.sampled_from(["", "a", "b,c"]), st.text(st.characters(codec="utf-8"), max_size=4))
flags = st.lists(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), max_size=3).map(tuple)
whole = st.integers(-(2**40), 2**40)
samples = st.builds(
    Sample,
    case=texts,
    level=texts,
    variant=texts,
    metric=texts,
    unit=texts,
    value=st.floats(allow_nan=False),
    scope=st.sampled_from(["window", "session", "segment", "run"]),
    session=whole,
    block=whole,
    position=whole,
    segment=whole,
    mode=texts,
    clock=texts,
    flags=flags,
)
