"""Turns that follow each other, as numbers: what importers of sessions share. A row without a parent has -1."""

from __future__ import annotations

import numpy as np

from kbench.traces.columns import Int64s, Lists


def parents_column(parent: Int64s) -> Lists:
    """The column of at most one parent a row."""
    has = parent >= 0
    return Lists.packed(has.astype(np.int64), parent[has], np.ones(parent.size, np.bool_))


def roots_of(parent: Int64s) -> Int64s:
    """The first ancestor of each row. Rows on a cycle get some row of it; the cycle itself is refused later."""
    above = np.where(parent >= 0, parent, np.arange(parent.size))
    for _ in range(64):  # each step doubles the distance
        further = above[above]
        if np.array_equal(further, above):
            break
        above = further
    return above


def previous_in_session(session: Int64s, *keys: Int64s) -> Int64s:
    """The row before each row of the same session, sessions ordered by `keys`, the first key first; -1 for none."""
    order = np.lexsort((*reversed(keys), session))
    before = np.full(session.size, -1, np.int64)
    same = session[order][1:] == session[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before
