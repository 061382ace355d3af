"""Where kbench keeps what belongs to a machine rather than to a suite."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`KBENCH_CACHE`, else `kbench` under XDG_CACHE_HOME, else under ~/.cache. It need not exist."""
    own = os.environ.get("KBENCH_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kbench"
