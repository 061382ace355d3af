"""What a kernel takes, and what tuning did, in words."""

from __future__ import annotations

from kbench.catalog import Case, model_shape, resolve_shape
from kbench.report.explain import explain

CASE = Case("kernel", "attention.decode", "tiny", "1*1@127")
NOTHING = {"median": None, "low": None, "high": None, "sessions": 0}
RESOURCES = {"kernel": "_paged", "registers": 168, "spills": 4, "shared_bytes": 33_024, "occupancy": 0.1875}
TUNING = {
    "policy": "live",
    "bucket": "1*1@128",
    "configuration": {"tile_bytes": 524_288},
    "hits": 0,
    "misses": 1,
    "spent_us": 250_000.0,
    "outliers": 1,
}


def test_resources_and_tuning_are_told() -> None:
    row = {
        "variant": "mine",
        "status": "ok",
        "message": "",
        "latency_us": NOTHING,
        "scopes_us": {},
        "flags": [],
        "resources": [RESOURCES],
        "tuning": TUNING,
    }
    shape = resolve_shape("attention.decode", CASE.shape, model_shape("tiny"))
    text = "\n".join(explain(CASE, shape, "float32", 2, [row])["measured"])
    assert "kernel _paged, 168 registers a thread, 4 spilled" in text and "theoretical occupancy 19%" in text
    assert "policy live for bucket 1*1@128: tile_bytes 524288" in text and "250 ms of trials" in text
