"""Implementations from a user's file: `FILE.py:NAME`, relative to the suite.

Owns loading and the check of the contract; what a plug-in computes is judged by `measure.kernel`. Two forms:
a function `fn(q, kv, batch, spec) -> Tensor`, or a class (no constructor arguments) with `convert`, `plan` and `run` as
in `kernels.base.Attention`.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import Tensor

from kbench.errors import UsageError
from kbench.kernels.base import Attention
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

FORMS = "a function fn(q, kv, batch, spec) or a class with convert, plan and run; see kbench.kernels.base"
CONTRACT = {"convert": 1, "plan": 3, "run": 4}

AttentionFunction = Callable[[Tensor, PagedKV, AttentionBatch, AttentionSpec], Tensor]


class FunctionAttention:
    """A plain function under the contract: the plan keeps the batch, nothing is converted."""

    def __init__(self, name: str, function: AttentionFunction) -> None:
        self.name = name
        self._function = function

    def convert(self, kv: PagedKV) -> PagedKV:
        return kv

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> FunctionPlan:
        return FunctionPlan(batch, spec)

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        assert isinstance(plan, FunctionPlan)
        return self._function(q, kv, plan.batch, plan.spec)


@dataclass(frozen=True, slots=True)
class FunctionPlan:
    batch: AttentionBatch
    spec: AttentionSpec


def load_plugin(reference: str, op: str, root: Path) -> Attention:
    """The implementation that `reference` names. Raises UsageError with file, what is wrong and what to do."""
    file, _, name = reference.rpartition(":")
    if not file or not name:
        raise UsageError(f"plug-in {reference!r} names no function", remedy="write FILE.py:NAME")
    path = (root / file).resolve()
    if not path.is_file():
        raise UsageError(f"plug-in file {file!r} does not exist", where=str(path), remedy="paths start at the suite")
    module = _import(path, name)
    if not hasattr(module, name):
        raise UsageError(f"plug-in has no {name!r}", where=str(path), remedy=f"define it, or fix {reference!r}")
    found = getattr(module, name)
    if inspect.isclass(found):
        return _from_class(found, name, path)
    if callable(found):
        _check_arguments(found, 4, name, path)
        return FunctionAttention(name, found)
    if _missing(found):
        raise UsageError(f"plug-in {name!r} is {type(found).__name__}", where=str(path), remedy=FORMS)
    return _named(found, name)


def _import(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kbench_plugin_{path.stem}_{abs(hash(str(path)))}", path)
    if spec is None or spec.loader is None:
        raise UsageError("plug-in is no Python file", where=str(path), remedy="write FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        del sys.modules[spec.name]
        what = f"plug-in cannot be imported: {type(error).__name__}: {_one_line(error)}"
        raise UsageError(what, where=str(path), remedy="run the file with python to see where") from error
    return module


def _from_class(found: type, name: str, path: Path) -> Attention:
    missing = _missing(found)
    if missing:
        raise UsageError(f"plug-in class {name!r} lacks {', '.join(missing)}", where=str(path), remedy=FORMS)
    try:
        made = found()
    except Exception as error:  # a user's constructor may raise anything
        what = f"plug-in class {name!r} cannot be made: {type(error).__name__}: {_one_line(error)}"
        raise UsageError(what, where=str(path), remedy="its constructor takes no arguments") from error
    for method, count in CONTRACT.items():
        _check_arguments(getattr(made, method), count, f"{name}.{method}", path)
    return _named(made, name)


def _missing(found: object) -> list[str]:
    return [method for method in CONTRACT if not callable(getattr(found, method, None))]


def _named(made: object, name: str) -> Attention:
    if not hasattr(made, "name"):
        made.name = name  # type: ignore[attr-defined]
    assert isinstance(made, Attention)
    return made


def _check_arguments(function: Callable[..., object], count: int, name: str, path: Path) -> None:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError as error:
        raise UsageError(
            f"plug-in {name!r} does not take {count} arguments: {error}", where=str(path), remedy=FORMS
        ) from error
    except ValueError:
        return  # a compiled function without a signature: calling it will tell


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
