"""From an operation's name to its class; imported only when used."""

from __future__ import annotations

import importlib
from typing import Any

from kbench import catalog
from kbench.ops.base import Op


def load_op(name: str) -> Op[Any, Any]:
    """The operation's torch side. Raises UsageError for an unknown name."""
    module, _, attribute = catalog.operation(name).entry.partition(":")
    made: Op[Any, Any] = getattr(importlib.import_module(module), attribute)()
    return made
