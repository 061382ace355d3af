"""A kernel case in words: what must be done, what limits it, what was measured, and what each flag means.

Owns sentences, not numbers: those come from `report.views` and `catalog.costs`. What was not measured is left out or
said to be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kbench.catalog import Case, Resolved, operation
from kbench.catalog.costs import ITEMSIZE, attention_traffic, fusion, tile_efficiency, tile_fill

GLOSSARY: Mapping[str, str] = {
    "LAUNCH_BOUND": "the host launches more slowly than the device runs: device time was not isolated",
    "WARM_CACHE": "the wanted cache state was not reached: some of the data was still cached",
    "THROTTLED": "the device ran below its clocks, for a reason that the driver names",
    "IMPOSSIBLE": "faster than the device's physical peak: the work was not done, or not where it was looked for",
    "ASYNC_ESCAPE": "work went on after the timer had stopped",
    "UNSTABLE": "the readings drifted within a window",
    "NON_DISCRIMINATING": "the error limit would accept a wrong answer",
    "FALLBACK": "another implementation ran than was asked for",
    "UNUSABLE_SAMPLES": "some samples are no times; nothing is estimated from them",
}
STATES: Mapping[str, str] = {
    "serving": "weights and KV come from memory, activations from the cache, as in serving",
    "cold": "everything comes from memory: at least three caches' worth of other data is read in between",
    "hot": "the same buffers again, all of them in the cache",
    "flush": "twice the cache is overwritten before every call",
    "warm": "the wanted state was not reached",
    "unverified": "nobody knows how large the cache is",
}
LAUNCH_EAGER_US, LAUNCH_NODE_US, STEP_US = 4.0, 0.87, 5_000.0
"""A launch of some µs, one as a node of a captured graph, and a decode step: an example's, not this host's."""


def explain(case: Case, shape: Resolved, dtype: str, layers: int, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """`rows`: the entries of `kbench kernel --json` for this case, one a variant."""
    sections = {
        "what": list(_what(case, shape, dtype)),
        "limit": list(_limit(rows)),
        "why": list(_why(shape, dtype, layers)),
        "measured": [line for row in rows for line in _measured(row)],
    }
    if not rows:
        sections["measured"] = ["nothing was measured of this case yet"]
    return {"case": str(case), "axes": dict(shape.axes), **sections}


def _what(case: Case, shape: Resolved, dtype: str) -> Iterator[str]:
    yield f"{case.op}: {operation(case.op).summary}; {dtype}"
    if shape.point is not None:
        point = shape.point
        context = f"{point.kv_tokens:,} tokens of context in all"
        yield f"{point.batch} sequences, {point.query_tokens} query tokens, {context}"
    axes = ", ".join(f"{name} = {value}" for name, value in shape.axes.items() if value not in (0, 0.0))
    if axes:
        yield axes


def _limit(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    cost = next((row["cost"] for row in rows if isinstance(row.get("cost"), Mapping)), None)
    line = next((row["roofline"] for row in rows if isinstance(row.get("roofline"), Mapping)), None)
    if cost is None:
        yield "what a call must move and compute is known once the case was measured"
        return
    yield f"a call must do {cost['flops'] / 1e6:,.1f} MFLOP and move {cost['bytes'] / 1e6:,.2f} MB at least"
    if line is None:
        yield "no ceilings of this device were measured: kbench run measures them in its traced pass"
        return
    side = "below" if line["bound"] == "memory" else "above"
    yield (
        f"{line['intensity']:.3g} FLOP a byte, {side} this device's crossover of {line['crossover']:.3g}: bound by "
        + ("memory traffic" if line["bound"] == "memory" else "arithmetic")
    )
    yield (
        f"at the measured ceilings ({line['bytes_per_us'] / 1e3:,.0f} GB/s, {line['flops_per_us'] / 1e6:,.1f} TFLOP/s) "
        f"a call takes {line['floor_us']:,.2f} µs"
    )


def _why(shape: Resolved, dtype: str, layers: int) -> Iterator[str]:
    """What the shape itself says about where time goes."""
    size = ITEMSIZE.get(dtype, 2)
    if shape.op.startswith("attention.") and shape.point is not None and "head_dim" in shape.axes:
        group = max(shape.point.groups, key=lambda one: one.kv_tokens)
        moved = attention_traffic(group.query_tokens, group.kv_tokens, shape.integer("head_dim"), size)
        yield (
            f"one head of the longest sequence: its scores are {_size(moved.scores)}; materialised they cost "
            f"{_size(moved.naive)} of traffic, streaming K and V costs {_size(moved.tiled)}"
        )
        if group.query_tokens == 1:
            yield "a decode reads the whole history for one row of scores: tiling cannot save those bytes"
    if shape.op.startswith("gemm"):
        m, n, k = (shape.integer(name) for name in ("m", "n", "k"))
        yield (
            f"in tiles of 128 × 128 × 64 it fills {tile_efficiency(m, n, k):.1%} of the arithmetic; "
            f"{m} rows fill {tile_fill(m):.0%} of a tile's edge"
        )
    if shape.op.startswith("norm."):
        eager = fusion(shape.integer("hidden"), size, layers, LAUNCH_EAGER_US, STEP_US)
        node = fusion(shape.integer("hidden"), size, layers, LAUNCH_NODE_US, STEP_US)
        yield (
            f"{_size(eager.bytes_per_position)} a position; a fused pair saves a round trip of "
            f"{_size(eager.round_trip_bytes)} and a launch in each of {layers} layers: at {LAUNCH_EAGER_US:g} µs a "
            f"launch {eager.launch_us:.0f} µs, {eager.share:.1%} of a step of {STEP_US / 1e3:g} ms; as nodes of a "
            f"captured graph ({LAUNCH_NODE_US:g} µs) {node.launch_us:.0f} µs, {node.share:.1%}"
        )


def _measured(row: Mapping[str, Any]) -> Iterator[str]:
    name = row["variant"]
    if row["status"] != "ok":
        yield f"{name}: {row['status']}: {row['message']}"
    latency = row["latency_us"]
    if latency["median"] is not None:
        line = row.get("roofline") or {}
        above = f", {line['headroom']:.0%} of it above the roofline" if line.get("headroom") is not None else ""
        yield (
            f"{name}: {latency['median']:,.2f} µs (95 % {_limits(latency)}, {latency['sessions']} sessions){above}; "
            f"read by {row['timer']}, caches {row['cache']}: {STATES.get(str(row['cache']), 'unknown')}"
        )
    scopes = {key: value for key, value in row["scopes_us"].items() if value is not None}
    if scopes:
        yield f"{name}: outside of it " + ", ".join(f"{key} {value:,.1f} µs" for key, value in scopes.items())
    correctness = row.get("correctness") or {}
    if correctness.get("rel_l2") is not None:
        yield f"{name}: worst row's relative L2 error {correctness['rel_l2']:.2e}, limit {correctness['limit']:.2e}"
    for resource in row.get("resources") or ():
        yield f"{name}: {_resources(resource)}"
    if row.get("tuning"):
        yield f"{name}: {_tuning(row['tuning'])}"
    for flag in row["flags"]:
        yield f"{name}: {flag}: {GLOSSARY.get(flag, 'see the documentation')}"


def _resources(found: Mapping[str, Any]) -> str:
    parts = [f"kernel {found.get('kernel', '?')}"]
    for key, unit in (
        ("registers", "registers a thread"),
        ("spills", "spilled"),
        ("shared_bytes", "bytes shared memory"),
    ):
        if found.get(key) is not None:
            parts.append(f"{found[key]} {unit}")
    if found.get("occupancy") is not None:
        parts.append(f"theoretical occupancy {found['occupancy']:.0%}")
    return ", ".join(parts)


def _tuning(found: Mapping[str, Any]) -> str:
    chosen = ", ".join(f"{key} {value}" for key, value in (found.get("configuration") or {}).items())
    return (
        f"policy {found['policy']} for bucket {found['bucket']}: {chosen or 'its own rule of thumb'}; "
        f"{found['hits']} hits, {found['misses']} misses, {found['spent_us'] / 1e3:,.0f} ms of trials, "
        f"{found['outliers']} calls had to wait"
    )


def _limits(latency: Mapping[str, Any]) -> str:
    if latency["low"] is None or latency["high"] is None:
        return "interval unknown"
    return f"{latency['low']:,.2f} to {latency['high']:,.2f}"


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.3g} {unit}"
    return f"{count} bytes"
