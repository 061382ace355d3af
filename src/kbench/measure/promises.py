"""What an implementation promises to be seen by, held against the names that a trace has.

Owns the comparison. A promised kernel whose name begins with `aten::` is looked for on a CPU, any other on CUDA; a
promised operator wherever operators were seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from kbench.catalog import Implementation

OPERATOR = "aten::"
_SHOWN = 4


def expects_here(expected: str, device_type: str) -> bool:
    return bool(expected) and expected.startswith(OPERATOR) == (device_type == "cpu")


def promises(facts: Implementation | None, device_type: str) -> bool:
    """Whether a trace on this device may tell that somebody else ran."""
    if facts is None:
        return False
    return expects_here(facts.expects_kernel, device_type) or bool(facts.expects_operator or facts.never)


def held(facts: Implementation, names: Sequence[str], device_type: str, others: Sequence[str] = ()) -> str | None:
    """What is wrong with the names that were seen; empty where a promise was kept; None where none could be judged.

    `others`: kernels of which it is not known whose they are; they can keep a promise, and break none. Where only
    kernels were seen, promises about operators are not judged.
    """
    if not names:
        return "nothing was seen"
    seen = (*names, *others)
    shown = ", ".join(list(names)[:_SHOWN])
    operators = [name for name in names if name.startswith(OPERATOR)]
    judged = False
    if expects_here(facts.expects_kernel, device_type):
        judged = True
        if not _any(facts.expects_kernel, seen):
            return f"no {facts.expects_kernel} among {shown}"
    if facts.expects_operator and operators:
        judged = True
        if not _any(facts.expects_operator, operators):
            return f"no {facts.expects_operator} among {shown}"
    for foreign in facts.never if operators else ():
        judged = True
        if _any(foreign, operators):
            return next(name for name in operators if foreign in name)
    return "" if judged else None


def _any(part: str, names: Sequence[str]) -> bool:
    return any(part in name for name in names)
