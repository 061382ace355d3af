"""From a reference in a suite to an instance that can be called.

Owns `load`, and `Loader`, through which a selection looks at its candidates. A reference is a catalogue name
(`kbench.catalog` knows its entry, imported only now) or a plug-in `FILE.py:NAME` relative to the suite. Whether the
implementation fits the case is `kbench.selection`'s question.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbench import catalog
from kbench.catalog import Implementation, Registry
from kbench.errors import UsageError
from kbench.kernels.base import Attention, TensorKernel
from kbench.kernels.declare import declared
from kbench.selection import Reason, absent
from kbench.suite.plugins import is_plugin

PAGED = ("attention.decode", "attention.prefill")


def load(reference: str, op: str, root: Path | None = None, names: Registry | None = None) -> Any:
    """An instance of the implementation `reference` of `op`: an `Attention` for paged attention, else a `TensorKernel`.

    `root` is where relative plug-in paths start; `names` is what is known by name (default: what ships and what
    packages bring).
    """
    if is_plugin(reference):
        from kbench.kernels.plugin import load_plugin

        return load_plugin(reference, op, root or Path())
    known = (names or catalog.registry()).get(reference, op)
    if known.installed:
        from kbench.kernels.plugin import load_plugin

        return load_plugin(known.entry, op, root or Path())
    missing = absent(known)
    if missing:
        packages = ", ".join(reason.want for reason in missing)
        raise UsageError(f"{reference} needs {packages}", remedy="install it or name another implementation")
    module, _, attribute = known.entry.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, OSError) as error:  # OSError: a shared library that it links is gone
        raise UsageError(
            f"{reference} needs a package that is not installed: {one_line(error)}",
            remedy="install it or name another kernel",
        ) from error
    if not isinstance(made, Attention if op in PAGED else TensorKernel):
        raise UsageError(
            f"{reference} ({known.entry}) lacks part of the contract", remedy="it needs convert, plan and run"
        )
    return made


@dataclass(slots=True)
class Loader:
    """Looks at candidates of a selection by loading them, each once. `made` holds what could be loaded."""

    root: Path
    names: Registry
    strict: bool = True
    """Let the error of a user's own code pass as it is; else it is one more reason to take somebody else."""
    made: dict[tuple[str, str], Any] = field(default_factory=dict)

    def __call__(self, reference: str, op: str) -> tuple[Implementation | None, Sequence[Reason]]:
        """What `reference` declares, and why it cannot be had at all (`kbench.selection.Look`)."""
        known = None if is_plugin(reference) else self.names.get(reference, op)
        if known is not None and (missing := absent(known)):
            return known, missing
        try:
            made = self.load(reference, op)
        except UsageError as error:
            problem = error.problems[0]
            if self.strict and (known is None or known.installed):
                raise  # nobody else may serve: say what is wrong with the file, and where
            return known, (Reason("import", reference if known is None else known.entry, problem.what),)
        own = declared(made)
        return (known if own is None else own), ()

    def load(self, reference: str, op: str) -> Any:
        key = (reference, op)
        if key not in self.made:
            self.made[key] = load(reference, op, self.root, self.names)
        return self.made[key]

    def facts(self, reference: str, op: str) -> Implementation | None:
        """What is known of a loaded implementation: its own declaration, else the catalogue's; None of a plug-in that
        declares nothing."""
        own = declared(self.load(reference, op))
        if own is not None or is_plugin(reference):
            return own
        known = self.names.get(reference, op)
        return None if known.installed else known


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


__all__ = ["Loader", "is_plugin", "load"]
