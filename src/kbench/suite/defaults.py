"""A declaration with its defaults written out, so that a change from or to one is shown as two values.

What is locked leaves out keys at their default (`kbench.plan`). That is right for a hash and no help to a reader:
`rule.alpha: 0.05 → 0.1` says more than that a table named rule appeared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from kbench.suite.schema import Suite


def with_defaults(declared: Mapping[str, Any], table: type[BaseModel] = Suite) -> dict[str, Any]:
    """`declared` as plain data of `table`, with the default of every key that it lacks. Keys without one stay out.

    It is for reading only: files stand for their hashes in a declaration, so it need not be a valid suite.
    """
    filled = {key: value for key, value in declared.items() if value is not None}
    for name, field in table.model_fields.items():
        key = field.alias or name
        if key in filled:
            filled[key] = _inside(filled[key], field.annotation)
        elif not field.is_required():
            default = to_jsonable_python(field.get_default(call_default_factory=True), by_alias=True)
            if default is not None:
                filled[key] = _inside(default, field.annotation)
    return filled


def _inside(value: Any, annotation: Any) -> Any:
    """The tables that `value` holds, by itself, in a list or by name."""
    table = _table_of(annotation)
    if table is None:
        return value
    if isinstance(value, list | tuple):
        return [with_defaults(item, table) if isinstance(item, Mapping) else item for item in value]
    if not isinstance(value, Mapping):
        return value
    if _named(annotation):
        return {name: with_defaults(item, table) if isinstance(item, Mapping) else item for name, item in value.items()}
    return with_defaults(value, table)


def _table_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_table_of, get_args(annotation))), None)


def _named(annotation: Any) -> bool:
    """Whether it is a mapping from names to tables."""
    return getattr(annotation, "__origin__", None) is dict
