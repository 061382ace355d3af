"""Memory beside an answer, and beside what is read, that nobody may touch.

Owns outputs that lie between guard rows, and the look at those rows afterwards. An implementation that answers in
memory of its own has no guards to write over, and is not asked about them.
"""

from __future__ import annotations

import torch
from torch import Tensor

GUARD_ROWS = 16
"""On either side; sixteen rows keep any width aligned to 16 bytes and more."""
GUARD = 1234.5


def guarded(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[rows, width]`, uninitialised, between guard rows in the same memory."""
    whole = torch.empty((rows + 2 * GUARD_ROWS, width), dtype=dtype, device=device)
    whole[:GUARD_ROWS] = GUARD
    whole[GUARD_ROWS + rows :] = GUARD
    return whole[GUARD_ROWS : GUARD_ROWS + rows]


def guard_problem(have: Tensor) -> str:
    """Whether guard rows beside this answer were written over; empty where they were not or there are none."""
    if not is_guarded(have):
        return ""
    rows, width = have.shape
    whole = torch.as_strided(have, (rows + 2 * GUARD_ROWS, width), (width, 1), 0)
    guard = torch.full((), GUARD, dtype=have.dtype, device=have.device)
    if bool((whole[:GUARD_ROWS] != guard).any()):
        return "rows before the first were written"
    return "rows after the last were written" if bool((whole[GUARD_ROWS + rows :] != guard).any()) else ""


def is_guarded(have: Tensor) -> bool:
    """Whether a tensor is one that `guarded` made."""
    if have.dim() != 2 or not have.is_contiguous():
        return False
    rows, width = have.shape
    size = (rows + 2 * GUARD_ROWS) * width * have.element_size()
    return width > 0 and have.storage_offset() == GUARD_ROWS * width and have.untyped_storage().nbytes() == size


def surrounded(values: Tensor) -> Tensor:
    """The same values `[rows, width]` as a view into memory that is NaN beside and below them."""
    rows, width = values.shape
    whole = torch.full((rows + GUARD_ROWS, width + 8), float("nan"), dtype=values.dtype, device=values.device)
    whole[:rows, :width] = values
    return whole[:rows, :width]
