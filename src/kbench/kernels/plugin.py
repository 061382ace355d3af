"""Implementations from a user's file: `FILE.py:NAME`, relative to the suite.

Owns loading and the check of the contract; what a plug-in computes is judged by `measure.kernel`. Two forms: a
function of the operation's arguments (`fn(q, kv, batch, spec)` for paged attention, `fn(x, weight, eps)` for a norm:
see `kbench list ops`) that returns the answer, or a class (no constructor arguments) with `convert`, `plan` and `run`
as in `kernels.base`. A function that also takes `out` gets the tensors that it may fill.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from kbench.env.places import cache_folder
from kbench.errors import UsageError
from kbench.kernels.base import PlainKernel
from kbench.kernels.declare import ATTRIBUTE, declared
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV
from kbench.ops.base import Outputs
from kbench.ops.registry import load_op
from kbench.suite.plugins import Plugin, parse_plugin, plugin_source

PAGED = ("attention.decode", "attention.prefill")
ATTENTION_CONTRACT = {"convert": 1, "plan": 3, "run": 4}
TENSOR_CONTRACT = {"convert": 1, "plan": 1, "run": 3}

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


class FunctionKernel(PlainKernel):
    """A plain function of an operation's arguments under the contract."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: tuple[str, ...], takes_out: bool) -> None:
        self.name = name
        self._function = function
        self._arguments = arguments
        self._takes_out = takes_out

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Any:
        given = {name: state[name] for name in self._arguments}
        return self._function(**given, out=out) if self._takes_out else self._function(**given)


def load_plugin(reference: str, op: str, root: Path) -> Any:
    """The implementation that `reference` names. Raises UsageError with file, what is wrong and what to do."""
    plugin = parse_plugin(reference)
    name, path = plugin.name, (root / plugin.file).resolve() if plugin.file else Path(plugin.module)
    module = _module(plugin, path, root)
    if not hasattr(module, name):
        raise UsageError(f"plug-in has no {name!r}", where=str(path), remedy=f"define it, or fix {reference!r}")
    found = getattr(module, name)
    made = _under_contract(found, name, path, op)
    if declared(found) is not None and made is not found:
        setattr(made, ATTRIBUTE, declared(found))
    return made


def _under_contract(found: Any, name: str, path: Path, op: str) -> Any:
    arguments = load_op(op).arguments
    contract = ATTENTION_CONTRACT if op in PAGED else TENSOR_CONTRACT
    forms = f"a function fn({', '.join(arguments)}) or a class with convert, plan and run; see kbench.kernels.base"
    if inspect.isclass(found):
        return _from_class(found, name, path, contract, forms)
    if not _missing(found, contract):
        return _named(found, name)
    if callable(found):
        return _from_function(found, name, path, op, arguments, forms)
    raise UsageError(f"plug-in {name!r} is {type(found).__name__}", where=str(path), remedy=forms)


def _from_function(
    found: Callable[..., Any], name: str, path: Path, op: str, arguments: tuple[str, ...], forms: str
) -> Any:
    if op in PAGED:
        _check_arguments(found, range(4), {}, name, path, forms)
        return FunctionAttention(name, found)
    by_name = dict.fromkeys(arguments)
    takes_out = "out" in _parameters(found)
    _check_arguments(found, (), {**by_name, "out": None} if takes_out else by_name, name, path, forms)
    return FunctionKernel(name, found, arguments, takes_out)


def _parameters(found: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return ()


def _module(plugin: Plugin, path: Path, root: Path) -> ModuleType:
    if plugin.module:
        try:
            return importlib.import_module(plugin.module)
        except Exception as error:  # somebody else's module may raise anything
            what = f"plug-in cannot be imported: {type(error).__name__}: {_one_line(error)}"
            raise UsageError(what, where=plugin.module, remedy="import it with python to see where") from error
    if plugin.ref:
        source = plugin_source(plugin, root)
        kept = cache_folder() / "plugins" / hashlib.sha256(source).hexdigest()[:32] / path.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_bytes(source)
        draft.replace(kept)
        return _import(kept)
    if not path.is_file():
        raise UsageError(
            f"plug-in file {plugin.file!r} does not exist", where=str(path), remedy="paths start at the suite"
        )
    return _import(path)


def _import(path: Path) -> ModuleType:
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


def _from_class(found: type, name: str, path: Path, contract: dict[str, int], forms: str) -> Any:
    missing = _missing(found, contract)
    if missing:
        raise UsageError(f"plug-in class {name!r} lacks {', '.join(missing)}", where=str(path), remedy=forms)
    try:
        made = found()
    except Exception as error:  # a user's constructor may raise anything
        what = f"plug-in class {name!r} cannot be made: {type(error).__name__}: {_one_line(error)}"
        raise UsageError(what, where=str(path), remedy="its constructor takes no arguments") from error
    for method, count in contract.items():
        _check_arguments(getattr(made, method), range(count), {}, f"{name}.{method}", path, forms)
    return _named(made, name)


def _missing(found: object, contract: dict[str, int]) -> list[str]:
    return [method for method in contract if not callable(getattr(found, method, None))]


def _named(made: Any, name: str) -> Any:
    if not hasattr(made, "name"):
        made.name = name
    return made


def _check_arguments(
    function: Callable[..., object],
    positional: Iterable[int],
    named: dict[str, Any],
    name: str,
    path: Path,
    forms: str,
) -> None:
    given = tuple(positional)
    try:
        inspect.signature(function).bind(*given, **named)
    except TypeError as error:
        count = len(given) + len(named)
        raise UsageError(
            f"plug-in {name!r} does not take {count} arguments: {error}", where=str(path), remedy=forms
        ) from error
    except ValueError:
        return  # a compiled function without a signature: calling it will tell


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
