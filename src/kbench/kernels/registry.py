"""From a reference in a suite to an instance that can be called.

Owns `load`. A reference is a catalogue name (`kbench.catalog` knows its entry, imported only now) or a plug-in
`FILE.py:NAME` relative to the suite. Whether the implementation fits the case is `kbench.selection`'s question.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from kbench import catalog
from kbench.errors import UsageError
from kbench.kernels.base import Attention, TensorKernel
from kbench.suite.plugins import is_plugin

PAGED = ("attention.decode", "attention.prefill")


def load(reference: str, op: str, root: Path | None = None) -> Any:
    """An instance of the implementation `reference` of `op`: an `Attention` for paged attention, else a `TensorKernel`.

    `root` is where relative plug-in paths start.
    """
    if is_plugin(reference):
        from kbench.kernels.plugin import load_plugin

        return load_plugin(reference, op, root or Path())
    known = catalog.implementation(reference, op)
    if known.installed:
        from kbench.kernels.plugin import load_plugin

        return load_plugin(known.entry, op, Path())
    absent = [package for package in known.requires if importlib.util.find_spec(package) is None]
    if absent:
        raise UsageError(f"{reference} needs {', '.join(absent)}", remedy="install it or name another implementation")
    module, _, attribute = known.entry.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise UsageError(
            f"{reference} needs a package that is not installed: {error}", remedy="install it or name another kernel"
        ) from error
    if not isinstance(made, Attention if op in PAGED else TensorKernel):
        raise UsageError(
            f"{reference} ({known.entry}) lacks part of the contract", remedy="it needs convert, plan and run"
        )
    return made


__all__ = ["is_plugin", "load"]
