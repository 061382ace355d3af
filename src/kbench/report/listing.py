"""What `kbench list` prints for people: one entry a paragraph where there is much to say, aligned columns where little.

Owns the layout of plain text; the rows are those of `kbench list --json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from kbench.report.text import clean

Row = Mapping[str, Any]
WIDTH = 100
BATCHES = {
    "decode": "batches of one-token queries",
    "prefill": "batches of longer queries",
    "any": "any batch, or axes alone",
    "none": "axes alone",
}

_CAPTURED = {
    "single-token": "can be captured in a CUDA graph, one query token a sequence",
    "uniform": "can be captured in a CUDA graph, queries of one length",
    "always": "can be captured in a CUDA graph",
}


def lines(topic: str, rows: Sequence[Row]) -> Iterator[str]:
    """`topic` as `kbench list` names it."""
    tell = _TOPICS.get(topic)
    if tell is None:
        yield from ("  ".join(clean(value) for value in row.values()) for row in rows)
        return
    width = max((len(clean(row["name"])) for row in rows), default=0)
    for row in rows:
        first, *more = tell(row)
        head = clean(row["name"]).ljust(width)
        yield from _indented(f"{head}  ", first, width + 2)
        for text in more:
            yield from _indented(" " * (width + 2), text, width + 2)


def _indented(head: str, text: str, indent: int) -> Iterator[str]:
    for place, part in enumerate(wrap(clean(text), max(30, WIDTH - indent), break_on_hyphens=False) or [""]):
        yield ((head if place == 0 else " " * indent) + part).rstrip()


def _op(row: Row) -> Iterator[str]:
    yield str(row["summary"])
    yield f"a function of it is {row['function']}"
    yield f"at {_batches(row)}; axes {row['axes']}"
    yield f"kernels {row['kernels']}" if row["kernels"] else "no kernel is built in: bring your own, FILE.py:NAME"


def _batches(row: Row) -> str:
    """A projection and a cache take their sizes from a model, so they need a batch."""
    sized = row["name"].startswith(("gemm.", "kv."))
    return "any batch" if sized else BATCHES.get(row["batches"], str(row["batches"]))


def _kernel(row: Row) -> Iterator[str]:
    yield str(row["summary"])
    yield f"{row['ops']}; on {row['devices']}"
    limits = [f"pages a multiple of {row['page_multiple_of']}"] if row["page_multiple_of"] != 1 else []
    limits += [f"also {row['features']}"] if row["features"] else []
    limits += [_CAPTURED[row["graph"]]] if row["graph"] in _CAPTURED else []
    limits += [f"{row['dtypes']} only"] if row["dtypes"].count(",") < 2 else []
    limits += [f"needs {row['requires']}"] if row["requires"] else []
    if limits:
        yield "; ".join(limits)


def _model(row: Row) -> Iterator[str]:
    group = row["q_heads"] // row["kv_heads"]
    heads = f"{row['q_heads']}/{row['kv_heads']} heads of {row['head_dim']} (GQA {group})"
    sizes = f"MLP {row['intermediate']:,}, vocab {row['vocab']:,}"
    yield f"{row['layers']} layers, hidden {row['hidden']:,}, {heads}, {sizes}"
    extras = [_experts(row)] if row["experts"] else []
    extras += [f"latent KV of {row['latent']} + {row['latent_rope']}"] if row["latent"] else []
    extras += [f"layers in turn: {' / '.join(row['kinds'])}"] if row["kinds"] != ["full"] else []
    extras += ["normalised queries and keys"] if row["qk_norm"] else []
    extras += ["tied embeddings"] if row["tied_embeddings"] else []
    if extras:
        yield "; ".join(extras)
    yield "runs at all levels" if row["hosted"] else f"level 1 only, the engine lacks: {', '.join(row['foreign'])}"
    yield f"from {row['source']}"


def _experts(row: Row) -> str:
    shared = f" and a shared one of {row['shared_intermediate']:,}" if row["shared_intermediate"] else ""
    return f"{row['experts']} experts, {row['experts_per_token']} a token, of {row['expert_intermediate']:,}{shared}"


_TOPICS: Mapping[str, Callable[[Row], Iterator[str]]] = {"ops": _op, "kernels": _kernel, "models": _model}
