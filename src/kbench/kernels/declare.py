"""How a plug-in says what it supports: a decorator whose keys are the catalogue's.

Without it a plug-in is asked for everything, and says no by raising NotImplementedError with a reason. With it, a case
that it does not serve is answered with all reasons at once, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kbench.catalog import DTYPES, LAYOUTS, ROLES, Capability, GraphSupport, Implementation, operation

ATTRIBUTE = "__kbench__"
T = TypeVar("T", bound=Callable[..., Any])


def implementation(
    op: str,
    *,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    lowest_capability: Capability | None = None,
    highest_capability: Capability | None = None,
    dtypes: tuple[str, ...] = DTYPES,
    kv_dtypes: tuple[str, ...] = (),
    page_multiple_of: int = 1,
    page_sizes: tuple[int, ...] = (),
    layouts: tuple[str, ...] = LAYOUTS,
    head_dims: tuple[int, ...] = (),
    masks: tuple[str, ...] = ("causal",),
    features: tuple[str, ...] = (),
    longest_query: int = 0,
    graph: bool | GraphSupport = True,
    roles: tuple[str, ...] = ROLES,
    expects_kernel: str = "",
    expects_operator: str = "",
    never: tuple[str, ...] = (),
) -> Callable[[T], T]:
    """Declare a function or class as an implementation of `op`; see `kbench.catalog.Implementation` for the keys.

    `graph`: True is ALWAYS, False NEVER.
    """
    operation(op)
    captured = GraphSupport.ALWAYS if graph is True else GraphSupport(int(graph))

    def mark(found: T) -> T:
        declared = Implementation(
            found.__name__,
            (op,),
            "",
            (found.__doc__ or "").strip().partition("\n")[0],
            devices=devices,
            lowest_capability=lowest_capability,
            highest_capability=highest_capability,
            dtypes=dtypes,
            kv_dtypes=kv_dtypes,
            page_multiple_of=page_multiple_of,
            page_sizes=page_sizes,
            layouts=layouts,
            head_dims=head_dims,
            masks=masks,
            features=features,
            longest_query=longest_query,
            graph=captured,
            roles=roles,
            expects_kernel=expects_kernel,
            expects_operator=expects_operator,
            never=never,
        )
        setattr(found, ATTRIBUTE, declared)
        return found

    return mark


def declared(found: object) -> Implementation | None:
    """What a plug-in declared, or None."""
    made = getattr(found, ATTRIBUTE, None)
    return made if isinstance(made, Implementation) else None
