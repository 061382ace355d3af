"""How a plug-in says what it supports: a decorator whose keys are the catalogue's.

Without it a plug-in is asked for everything, and says no by raising NotImplementedError with a reason. With it, a case
that it does not serve is answered with all reasons at once, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kbench.catalog import DTYPES, LAYOUTS, Implementation, operation

ATTRIBUTE = "__kbench__"
T = TypeVar("T", bound=Callable[..., Any])


def implementation(
    op: str,
    *,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    dtypes: tuple[str, ...] = DTYPES,
    page_multiple_of: int = 1,
    layouts: tuple[str, ...] = LAYOUTS,
    head_dims: tuple[int, ...] = (),
    features: tuple[str, ...] = (),
    graph: bool = True,
    expects_kernel: str = "",
) -> Callable[[T], T]:
    """Declare a function or class as an implementation of `op`; see `kbench.catalog.Implementation` for the keys."""
    operation(op)

    def mark(found: T) -> T:
        declared = Implementation(
            found.__name__,
            (op,),
            "",
            (found.__doc__ or "").strip().partition("\n")[0],
            devices=devices,
            dtypes=dtypes,
            page_multiple_of=page_multiple_of,
            layouts=layouts,
            head_dims=head_dims,
            features=features,
            graph=graph,
            expects_kernel=expects_kernel,
        )
        setattr(found, ATTRIBUTE, declared)
        return found

    return mark


def declared(found: object) -> Implementation | None:
    """What a plug-in declared, or None."""
    made = getattr(found, ATTRIBUTE, None)
    return made if isinstance(made, Implementation) else None
