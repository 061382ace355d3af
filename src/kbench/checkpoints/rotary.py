"""Rotary settings of a config.json: the newer `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""

from __future__ import annotations

import math

from kbench.catalog import Rope
from kbench.checkpoints.keys import Keys

KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(keys: Keys, default_theta: float, *, partial: bool) -> tuple[float, Rope]:
    """(base, scaling). `partial`: the family can turn a share of a head's elements only.

    Kinds that depend on the length of the sequence at hand (dynamic, longrope) are refused by name.
    """
    theta = keys.number("rope_theta", default_theta)
    share = keys.number("partial_rotary_factor", 1.0)
    if keys.has("rope_parameters") and keys.has("rope_scaling"):
        raise keys.error("rope_scaling", "stands beside rope_parameters", "keep one of them")
    rope = keys.object("rope_parameters" if keys.has("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta", theta)
    share = rope.number("partial_rotary_factor", share)
    if share > 1 or (share != 1 and not partial):
        raise keys.error("partial_rotary_factor", f"{share:g} is not supported", "1" if not partial else "at most 1")
    kind = rope.raw("rope_type", rope.raw("type", "default"))
    rope.raw("type")
    if kind not in KINDS:
        raise rope.error("rope_type", f"{kind!r} is not supported", f"one of {', '.join(KINDS)}")
    if share != 1 and kind != "default":
        raise rope.error("rope_type", f"{kind!r} with a partial rotary factor is not supported", "default")
    made = _scaling(rope, str(kind), keys, share)
    rope.refuse_unread(frozenset({"original_max_position_embeddings"}) if kind == "default" else frozenset())
    return theta, made


def _scaling(rope: Keys, kind: str, keys: Keys, share: float) -> Rope:
    if kind == "linear":
        rope.raw("original_max_position_embeddings")
        return Rope("linear", factor=rope.number("factor"))
    if kind == "llama3":
        return Rope(
            "llama3",
            factor=rope.number("factor"),
            original_context=rope.whole("original_max_position_embeddings"),
            low_turns=rope.number("low_freq_factor"),
            high_turns=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        factor = rope.number("factor")
        return Rope(
            "yarn",
            factor=factor,
            original_context=rope.whole("original_max_position_embeddings", keys.whole("max_position_embeddings")),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            magnitude=_magnitude(rope, factor),
        )
    return Rope(share=share)


def _magnitude(rope: Keys, factor: float) -> float:
    """yarn's factor of cos and sin (Peng et al. 2023, eq. 22), unless the file states another."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    stated = rope.raw("attention_factor")
    above, below = rope.raw("mscale"), rope.raw("mscale_all_dim")
    if stated is not None:
        return rope.number("attention_factor")
    if above and below:
        return of(rope.number("mscale")) / of(rope.number("mscale_all_dim"))
    return of(1.0)
