"""FlashInfer-Trace as input: a Definition (JSON) and its Workloads (JSON or JSONL) as an operation and its shapes.

Owns the reading of both files and the mapping of `op_type` and axes to operations of `kbench.catalog`. The schema is
that of github.com/flashinfer-ai/flashinfer-bench (`flashinfer_bench/data`, docs/flashinfer-trace). Their reference code
is never run: what is right is said by the oracle of our operation. What cannot be mapped is one line.

Sequence lengths of paged attention are not axes but tensors (`kv_indptr`, `qo_indptr`). Where their safetensors files
are there, lengths are exact up to the last page; else every sequence gets the mean, and a note says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kbench.catalog import DTYPES, Group, Point, parse_shape
from kbench.errors import UsageError
from kbench.suite.shape_files import read_text
from kbench.suite.shapes import Recorded, Row, merged

MOST_GROUPS = 8
"""Lengths of one batch are kept apart up to so many; more are put together with their neighbours."""
Axes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Definition:
    """What of a definition kbench needs."""

    name: str
    op_type: str
    op: str
    axes: Axes
    """The constant ones, by their names."""
    inputs: Mapping[str, Mapping[str, Any]]
    dtype: str
    page_size: int
    """1 where the operation has no pages."""


@dataclass(slots=True)
class Workload:
    """One workload under its definition, with every axis that has a number."""

    definition: Definition
    axes: Axes
    inputs: Mapping[str, Mapping[str, Any]]
    folder: Path
    where: str
    notes: dict[str, None] = field(default_factory=dict)

    def axis(self, *names: str) -> int:
        for name in names:
            if name in self.axes:
                return self.axes[name]
        raise UsageError(f"no axis {' or '.join(names)}", where=self.where, remedy="it belongs to the definition")

    def scalar(self, name: str) -> float | None:
        given = self.inputs.get(name) or {}
        value = given.get("value") if given.get("type") == "scalar" else None
        return float(value) if isinstance(value, int | float) else None

    def offsets(self, name: str) -> list[int] | None:
        """The tensor `name` as whole numbers; None where its file is not there."""
        given = self.inputs.get(name) or {}
        if given.get("type") != "safetensors":
            return None
        path = _found(str(given.get("path", "")), self.folder)
        if path is None:
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as tensors:
                return [int(value) for value in tensors.get_tensor(str(given.get("tensor_key", name))).reshape(-1)]
        except (SafetensorError, OSError, ValueError) as error:
            raise UsageError(
                f"{name} cannot be read: {error}", where=str(path), remedy="fetch the file whole"
            ) from error


@dataclass(frozen=True, slots=True)
class Found:
    definition: Definition
    recorded: Recorded


def read(definition: Path, workload: Path) -> Found:
    """Raises UsageError where a file is not of the schema, or the definition has no counterpart here."""
    known = read_definition(definition)
    rows: list[Row] = []
    notes: dict[str, None] = {}
    for own in _workloads(known, workload):
        text = _MAPPINGS[known.op](own)
        rows.append(Row(str(parse_shape(text)), 1.0, 0.0))
        notes |= own.notes
    if not rows:
        raise UsageError(f"no workload of {known.name}", where=str(workload), remedy="name the file of this definition")
    source = f"{workload.name}, {len(rows)} workloads of {known.name}"
    return Found(known, Recorded(merged(rows), source, steps=False, timed=False, notes=tuple(notes)))


def read_definition(path: Path) -> Definition:
    data = _json(path, read_text(path))
    name, op_type, axes, inputs = (data.get(key) for key in ("name", "op_type", "axes", "inputs"))
    if not (isinstance(name, str) and isinstance(op_type, str) and isinstance(axes, dict) and isinstance(inputs, dict)):
        raise UsageError(
            "no FlashInfer-Trace definition: it needs name, op_type, axes and inputs",
            where=str(path),
            remedy="name one",
        )
    constant = {key: int(axis["value"]) for key, axis in axes.items() if isinstance(axis, dict) and "value" in axis}
    tensors = {key: spec for key, spec in inputs.items() if isinstance(spec, dict)}
    tags = data.get("tags") or []
    op = _operation(op_type, name, [str(tag) for tag in tags], tensors, constant, str(path))
    dtype = next((str(spec.get("dtype")) for spec in tensors.values() if "float" in str(spec.get("dtype"))), "")
    if dtype not in DTYPES:
        raise _unmapped(name, f"its inputs are {dtype or 'no floats'}", f"kbench computes in {', '.join(DTYPES)}", path)
    return Definition(name, op_type, op, constant, tensors, dtype, constant.get("page_size", 1))


def _operation(op_type: str, name: str, tags: list[str], inputs: Mapping[str, Any], axes: Axes, where: str) -> str:
    """Our operation of the same mathematics."""
    family = next((known for known in _FAMILIES if op_type == known or op_type.startswith(f"{known}_")), "")
    text = " ".join((op_type, name, *tags))
    decode = "decode" in text or not ("prefill" in text or "qo_indptr" in inputs)
    if family == "mla_paged" and not decode:
        raise _unmapped(name, "prefill of multi-head latent attention", "only its decode is an operation here", where)
    if family == "moe" and axes.get("num_local_experts", axes.get("num_experts")) != axes.get("num_experts"):
        raise _unmapped(name, "experts of several devices", "kbench's experts are all on one", where)
    if family == "gemm" and any("scale" in key for key in inputs):
        raise _unmapped(name, "a product of scaled operands", "kbench's products have none", where)
    if family == "sampling" and "min_p" in name:
        raise _unmapped(name, "min-p sampling", "kbench's chain has top-k and top-p", where)
    found = {
        "gqa_paged": "attention.decode" if decode else "attention.prefill",
        "gqa_ragged": "attention.prefill",
        "mla_paged": "attention.mla_decode",
        "gemm": "gemm",
        "grouped_gemm": "moe.grouped_gemm",
        "moe": "moe.fused",
        "rmsnorm": "norm.add_rmsnorm" if "residual" in inputs else "norm.rmsnorm",
        "fused_add_rmsnorm": "norm.add_rmsnorm",
        "rope": "rope",
        "sampling": "sampling.chain",
    }.get(family)
    if found is None:
        raise _unmapped(name, f"op_type {op_type}", f"there are {', '.join(_FAMILIES)}", where)
    return found


_FAMILIES = (
    "gqa_paged",
    "gqa_ragged",
    "mla_paged",
    "gemm",
    "grouped_gemm",
    "moe",
    "fused_add_rmsnorm",
    "rmsnorm",
    "rope",
    "sampling",
)


def _unmapped(name: str, what: str, why: str, where: object) -> UsageError:
    return UsageError(f"{name} cannot be mapped: {what}", where=str(where), remedy=why)


# ------------------------------------------------------------------------------------------ workloads


def _workloads(definition: Definition, path: Path) -> list[Workload]:
    text = read_text(path)
    lines = text.splitlines() if path.suffix == ".jsonl" else [json.dumps(one) for one in _list(_any_json(path, text))]
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        item = _json(where, line)
        if item.get("definition", definition.name) != definition.name:
            continue
        own = item.get("workload", item)
        axes, inputs = (own.get(key, {}) if isinstance(own, dict) else None for key in ("axes", "inputs"))
        numbers = isinstance(axes, dict) and all(type(value) is int and value >= 0 for value in axes.values())
        if not numbers or not isinstance(inputs, dict):
            raise UsageError("no workload: axes must be whole numbers", where=where, remedy="see its schema")
        tensors = {key: spec for key, spec in inputs.items() if isinstance(spec, dict)}
        found.append(Workload(definition, {**definition.axes, **(axes or {})}, tensors, path.parent, where))
    return found


def _list(data: Any) -> list[Any]:
    return data if isinstance(data, list) else [data]


def _any_json(where: object, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}", where=str(where), remedy="correct the file") from error


def _json(where: object, text: str) -> dict[str, Any]:
    data = _any_json(where, text)
    if not isinstance(data, dict):
        raise UsageError("not a JSON object", where=str(where), remedy="name a FlashInfer-Trace file")
    return data


def _found(name: str, folder: Path) -> Path | None:
    """A file relative to the root of a trace set, which is the workload's folder or one above it."""
    for root in (folder, *folder.absolute().parents):
        if (root / name).is_file():
            return root / name
    return None


# ------------------------------------------------------------------------------------------- mappings


def _decode(own: Workload) -> str:
    return f"{_batch(own, decode=True)},{_heads(own)}"


def _prefill(own: Workload) -> str:
    if own.definition.op_type.startswith("gqa_ragged"):
        own.notes["keys and values are ragged there and paged here"] = None
    return f"{_batch(own, decode=False)},{_heads(own)}"


def _mla(own: Workload) -> str:
    heads, latent, rope = own.axis("num_qo_heads"), own.axis("head_dim_ckv"), own.axis("head_dim_kpe")
    return f"{_batch(own, decode=True)},heads={heads},latent={latent},rope={rope}"


def _heads(own: Workload) -> str:
    q, kv, dim = own.axis("num_qo_heads"), own.axis("num_kv_heads"), own.axis("head_dim")
    return f"q_heads={q},kv_heads={kv},head_dim={dim}"


def _batch(own: Workload, *, decode: bool) -> str:
    size = own.definition.page_size
    indptr = own.offsets("kv_indptr")
    queries = None if decode else own.offsets("qo_indptr")
    count = len(indptr) - 1 if indptr else own.axes.get("len_indptr", 0) - 1
    count = count if count > 0 else own.axis("batch_size", "total_q") if decode else 1
    if indptr:
        lengths = [size * (end - start) for start, end in pairwise(indptr)]
        if size > 1:
            own.notes["lengths are whole pages: the files do not say how full the last one is"] = None
    else:
        total = own.axes.get("total_kv") or size * own.axis("num_kv_indices", "num_pages")
        lengths = _even(total, count)
        own.notes["kv_indptr is not there: every sequence has the mean length"] = None
    if queries:
        asked = [end - start for start, end in pairwise(queries)]
    else:
        asked = [1] * count if decode else _even(own.axis("total_q"), count)
    pairs = [(query, max(kv, query)) for query, kv in zip(asked, lengths, strict=False) if query > 0 and kv > 0]
    if not decode:
        kept = [pair for pair in pairs if pair[0] > 1]
        if len(kept) < len(pairs):
            own.notes["sequences of one query token among prefills are left out"] = None
        pairs = kept
    if not pairs:
        raise UsageError("a batch without sequences", where=own.where, remedy="leave this workload out")
    return str(Point(_groups(pairs)))


def _even(total: int, count: int) -> list[int]:
    return [max(1, total // count)] * count


def _groups(pairs: list[tuple[int, int]]) -> tuple[Group, ...]:
    """Equal sequences together; of many different ones neighbours, as their mean."""
    ordered = sorted(pairs)
    distinct = sorted(set(ordered))
    if len(distinct) <= MOST_GROUPS:
        return tuple(Group(ordered.count(pair), *pair) for pair in distinct)
    groups: list[Group] = []
    for part in range(MOST_GROUPS):
        members = ordered[part * len(ordered) // MOST_GROUPS : (part + 1) * len(ordered) // MOST_GROUPS]
        query, kv = (round(sum(member[side] for member in members) / len(members)) for side in (0, 1))
        groups.append(Group(len(members), query, max(query, kv)))
    return tuple(groups)


def _gemm(own: Workload) -> str:
    return f"m={own.axis('M')},n={own.axis('N')},k={own.axis('K')}"


def _grouped(own: Workload) -> str:
    groups, rows = own.axis("G"), own.axis("M")
    own.notes["groups of equal rows are experts under balanced routing"] = None
    return f"tokens={groups * rows},experts={groups},top_k=1,n={own.axis('N')},k={own.axis('K')}"


def _moe(own: Workload) -> str:
    named = re.search(r"topk(\d+)", own.definition.name)
    top_k = own.axes.get("top_k") or (int(named[1]) if named else 0)
    if not top_k:
        raise _unmapped(own.definition.name, "no top_k among its axes or in its name", "kbench needs one", own.where)
    own.notes["the router is softmax and top-k here, whatever it is there"] = None
    sizes = f"hidden={own.axis('hidden_size')},intermediate={own.axis('intermediate_size')}"
    return f"tokens={own.axis('seq_len', 'num_tokens')},experts={own.axis('num_experts')},top_k={top_k},{sizes}"


def _norm(own: Workload) -> str:
    eps = own.scalar("eps")
    return f"rows={own.axis('batch_size')},hidden={own.axis('hidden_size')}" + (f",eps={eps:.10f}" if eps else "")


def _rope(own: Workload) -> str:
    q, kv = own.axis("num_qo_heads"), own.axis("num_kv_heads")
    dim, rotary = own.axis("head_size"), own.axis("rotary_dim")
    style = int("gptj" in own.definition.name)
    part = 0 if rotary == dim else rotary
    return f"tokens={own.axis('num_tokens')},q_heads={q},kv_heads={kv},head_dim={dim},rotary={part},interleaved={style}"


def _sampling(own: Workload) -> str:
    """From logits without penalties or mask, where theirs starts from probabilities."""
    own.notes["from logits here, from probabilities there"] = None
    filters = {"k": 0.0, "p": 1.0}
    for axis, name in (("k", "top_k"), ("p", "top_p")):
        if name in own.definition.inputs:
            value = own.scalar(name)
            if value is None:
                value = {"k": 50.0, "p": 0.9}[axis]
                own.notes[f"{name} is a tensor of its own there and {value:g} for every row here"] = None
            filters[axis] = value
    rows, vocab = own.axis("batch_size"), own.axis("vocab_size")
    chain = f"history=0,allowed=1.0,temperature=1.0,k={filters['k']:.0f},p={filters['p']:g}"
    return f"rows={rows},vocab={vocab},{chain}"


_MAPPINGS: Mapping[str, Callable[[Workload], str]] = {
    "attention.decode": _decode,
    "attention.prefill": _prefill,
    "attention.mla_decode": _mla,
    "gemm": _gemm,
    "moe.grouped_gemm": _grouped,
    "moe.fused": _moe,
    "norm.rmsnorm": _norm,
    "norm.add_rmsnorm": _norm,
    "rope": _rope,
    "sampling.chain": _sampling,
}
