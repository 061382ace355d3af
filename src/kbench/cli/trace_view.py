"""What `kbench trace info` shows people: the dictionary of `traces.statistics` as three small tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.report.grids import Grid
from kbench.report.tables import Tables
from kbench.report.text import MISSING, clean, duration, number, percent

Document = Mapping[str, Any]
_LENGTHS = ("mean", "min", "p50", "p90", "p99", "max")


def info_tables(info: Document) -> Tables:
    """Facts, lengths, and reuse by page size and by cache size."""
    return Tables((_facts(info), _length_grid(info), _hit_grid(info), _curve_grid(info)))


def _facts(info: Document) -> Grid:
    source = info["source"]
    rows = [
        ("requests", number(info["requests"])),
        ("sessions", f"{number(info['sessions'])}, at most {number(info['turns_per_session_max'])} turns"),
        ("duration", duration(info["duration_s"] * 1e6)),
        ("rate", _with(info["request_rate_per_s"], "requests/s")),
        ("CV of the gaps between arrivals", number(_rounded(info["inter_arrival_cv"]))),
        ("grid of the arrivals", duration(info["timestamp_quantum_us"])),
        ("content known as", info["content"]),
        ("made by", _importer(source)),
        ("licence", clean(source["licence"])),
    ]
    if source["dropped"]:
        rows.append(("rows left out", ", ".join(f"{clean(why)}: {n:,}" for why, n in source["dropped"].items())))
    notes = []
    if info["timestamp_quantum_us"] >= 1_000_000 and not _spread(source["options"]):
        notes.append("The arrivals were rounded: a replay sends a burst at every mark. Import with --dejitter.")
    return Grid(clean(source["name"]), ("", "value"), tuple(rows), notes=tuple(notes))


def _importer(source: Document) -> str:
    """How the trace came to be, the last step first."""
    steps, importer, options = [], source["importer"], source["options"]
    while True:
        said = str(options.get("command", importer))
        steps.append(f"{said} --dejitter" if options.get("dejittered") else said)
        if "of" not in options:
            return clean(" of ".join(steps))
        importer, options = options["of"]["importer"], options["of"]["options"]


def _spread(options: Document) -> bool:
    return bool(options.get("dejittered")) or ("of" in options and _spread(options["of"]["options"]))


def _length_grid(info: Document) -> Grid:
    rows = []
    for name, title in (("input_tokens", "prompt"), ("output_tokens", "output")):
        rows.append((title, *(f"{info[name][key]:,.0f}" for key in _LENGTHS)))
    return Grid("tokens a request", ("", *_LENGTHS), tuple(rows))


def _hit_grid(info: Document) -> Grid:
    rough = set(info["lower_bound_page_sizes"])
    rows = []
    for size, ratio in info["infinite_cache_hit_ratio"].items():
        rows.append((f"{int(size):,} tokens", percent(ratio), "at least" if int(size) in rough else "exact"))
    note = "Share of the prompt tokens that a prefix cache without an end would have."
    return Grid("hits by page size", ("page", "hit ratio", "known"), tuple(rows), notes=(note,))


def _curve_grid(info: Document) -> Grid:
    curve = info["miss_ratio_curve"]
    whole = curve["footprint_tokens"]
    rows = []
    for point in curve["points"]:
        share = point["cache_tokens"] / whole if whole else None
        rows.append((f"{point['cache_tokens']:,}", percent(share), percent(point["miss_ratio"])))
    note = (
        f"{curve['tokens_for_90_percent_of_hits']:,} tokens of cache have 90 % of the hits that any cache could have."
    )
    title = f"misses by cache size, pages of {curve['tokens_per_page']:,} tokens, LRU"
    return Grid(title, ("cache, tokens", "of all that was said", "miss ratio"), tuple(rows), notes=(note,))


def _with(value: float | None, unit: str) -> str:
    return MISSING if value is None else f"{number(_rounded(value))} {unit}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
