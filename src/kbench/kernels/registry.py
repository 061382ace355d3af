"""From a reference in a suite to an instance that can be called.

Owns `load`. A reference is a catalogue name (`kbench.catalog` knows its entry, imported only now) or a plug-in
`FILE.py:NAME` relative to the suite. Whether the implementation fits the case is `kbench.selection`'s question.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from kbench import catalog
from kbench.errors import UsageError
from kbench.kernels.base import Attention


def is_plugin(reference: str) -> bool:
    """Whether `reference` names a file rather than a catalogue entry."""
    return ".py:" in reference or reference.endswith(".py")


def load(reference: str, op: str, root: Path | None = None) -> Attention:
    """An instance of the implementation `reference` of `op`; `root` is where relative plug-in paths start."""
    if is_plugin(reference):
        from kbench.kernels.plugin import load_plugin

        return load_plugin(reference, op, root or Path())
    entry = catalog.implementation(reference, op).entry
    module, _, attribute = entry.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise UsageError(
            f"{reference} needs a package that is not installed: {error}", remedy="install it or name another kernel"
        ) from error
    if not isinstance(made, Attention):
        raise UsageError(f"{reference} ({entry}) lacks part of the contract", remedy="it needs convert, plan and run")
    return made
