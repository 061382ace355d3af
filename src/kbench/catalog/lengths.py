"""KV lengths that attributes of a step change or share: tails of pages and common prefixes.

Owns both rules. They work in units of 64 tokens, or of the page where that is no part of 64, so that arms with pages of
16 and of 64 tokens get the same lengths; whoever compares two arms checks that they do.
"""

from __future__ import annotations

import math

from kbench.catalog.attributes import Tail
from kbench.catalog.points import Group, Point

UNIT = 64


def tailed(point: Point, tail: Tail, page_size: int) -> Point:
    """The batch with the last pages as asked: `partial` makes even KV lengths one shorter, `full` rounds them up.

    A whole prompt (query = KV length) stays whole. A length of one token has no shorter one and stays.
    """
    if tail == "as-written":
        return point
    return Point(tuple(_tailed(group, tail, page_size) for group in point.groups))


def _tailed(group: Group, tail: Tail, page_size: int) -> Group:
    kv = group.kv_tokens
    if tail == "full":
        unit = math.lcm(UNIT, page_size)
        kv = -(-kv // unit) * unit
    elif kv % 2 == 0:
        kv -= 1
    query = kv if group.query_tokens == group.kv_tokens else group.query_tokens
    return Group(group.count, min(query, kv), kv, group.chunked, group.drafts)


def shared_tokens(point: Point, share: float, page_size: int) -> int:
    """Tokens at the start of every sequence that all have in common: whole units of what was there before the step."""
    unit = math.lcm(UNIT, page_size)
    shortest = min(group.kv_tokens - group.query_tokens for group in point.groups)
    return int(share * shortest) // unit * unit
