"""The recorded trace: steps and phases marked by name, operators inside, gzip as asked."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from kbench.measure.timeline import PHASE_MARK, STEP_MARK, record_timeline
from kbench.protocol import Status
from kbench.suite.schema import Arm, EngineSettings, ModelSettings
from kbench.timeline import analyse

torch.set_num_threads(1)


def make_arm(decode: str = "sdpa-gather") -> Arm:
    return Arm(
        name="page16",
        model=ModelSettings(preset="tiny"),
        engine=EngineSettings(kv_tokens=64, max_batched_tokens=64),
        prefill="sdpa",
        decode=decode,
        page_size=16,
        layout="NHD",
        seed=1,
        root=".",
    )


def test_steps_and_phases_are_marked_and_hold_the_operators(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "timeline.json.gz"
    outcome = record_timeline(make_arm(), "cpu", ["2*1@100", "1*40"], path, 1)
    assert outcome.status is Status.OK, outcome.message
    assert outcome.facts["kernels"] > 100
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    marks = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert marks[f"{STEP_MARK}2*1@100"] == 3
    assert marks[f"{STEP_MARK}1*40"] == 3
    assert marks[f"{PHASE_MARK}schedule"] == 6
    assert marks[f"{PHASE_MARK}attention"] == 6 * 2  # two layers
    step = next(event for event in events if event["name"] == f"{STEP_MARK}2*1@100")
    inside = [
        event["name"]
        for event in events
        if event.get("cat") == "cpu_op" and step["ts"] <= event["ts"] < step["ts"] + step["dur"]
    ]
    assert "aten::scaled_dot_product_attention" in inside
    assert "aten::linear" in inside


@pytest.mark.parametrize("graph", ["eager", "graph"])
@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_the_engines_own_time_has_names(tmp_path: Path, preset: str, graph: str) -> None:
    engine = EngineSettings(kv_tokens=64, max_batched_tokens=64, graph=graph)  # type: ignore[arg-type]
    arm = make_arm().model_copy(update={"model": ModelSettings(preset=preset), "engine": engine})
    outcome = record_timeline(arm, "cpu", ["4*1@127", "1*40+3*1@90"], tmp_path / "t.json.gz", 1)
    assert outcome.status is Status.OK, outcome.message
    found = analyse(tmp_path / "t.json.gz")
    assert [point["point"] for point in found["points"]] == ["4*1@127", "1*40+3*1@90"]
    assert found["named_share"] >= 0.95
    assert {"attention", "gemm", "norm_rope_activation", "sampling"} <= {
        name for name, item in found["classes"].items() if item["us"]
    }


def test_what_cannot_serve_is_unsupported_and_writes_nothing(tmp_path: Path) -> None:
    outcome = record_timeline(make_arm("triton-paged"), "cpu", ["1*1@100"], tmp_path / "t.json", 1)
    assert outcome.status is Status.UNSUPPORTED
    assert not list(tmp_path.iterdir())
