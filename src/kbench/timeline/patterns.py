"""A user's own classes of work, from a TOML file.

    [classes]
    attention = "my_paged_decode|^vendor_attn"     # a class that exists
    speculation = "draft_|verify_"                  # or a new one

Owns the reading. The order of the file is the order in which patterns are tried, all before the built-in tables.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from kbench.errors import UsageError
from kbench.timeline.classes import Classifier

_REMEDY = 'a table [classes] of NAME = "regular expression"'


def read_patterns(path: Path) -> dict[str, str]:
    """Class → pattern, in the order of the file. UsageError: no file, not TOML, another form, or a bad pattern."""
    where = str(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the classes: {error.strerror or error}", where=where) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not TOML: {' '.join(str(error).split())}", where=where, remedy=_REMEDY) from error
    classes = document.pop("classes", None)
    if document or not isinstance(classes, dict) or not classes:
        more = f"{next(iter(document))!r} is not understood" if document else "no [classes]"
        raise UsageError(more, where=where, remedy=_REMEDY)
    for name, pattern in classes.items():
        if not isinstance(pattern, str):
            raise UsageError(f"classes.{name} is no text", where=where, remedy=_REMEDY)
    try:
        Classifier.of(classes)
    except UsageError as error:
        raise UsageError(error.problems[0].what, where=where, remedy=error.problems[0].remedy) from error
    return dict(classes)
