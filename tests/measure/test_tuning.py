"""Tuning on a real device, this CPU: the cheap end of it, without a claim about times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kbench.catalog import Case, model_shape, parse_shape, resolve_shape
from kbench.errors import UsageError
from kbench.kernels.blocked_tuned import BlockedTunedDecode
from kbench.kernels.registry import load
from kbench.kernels.tuner import TuningCache
from kbench.kernels.verify import verify
from kbench.measure.tuning import configured, tune_job
from kbench.ops.base import InputSettings
from kbench.ops.registry import load_op
from kbench.protocol import Status
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

CASE = Case("kernel", "attention.decode", "nano", "3*1@600")


def arm(folder: Path, decode: str = "blocked-tuned") -> Arm:
    return Arm(
        name="mine",
        model=ModelSettings(preset="nano"),
        engine=EngineSettings(),
        prefill="reference",
        decode=decode,
        page_size=16,
        layout="NHD",
        seed=1,
        root=str(folder),
    )


def settings(policy: str) -> Measure:
    return Measure.model_validate({"tuning": policy, "tuning_cache": "tuned", "cache": "hot"})


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("policy", "counted"),
    [
        ("heuristic", (0, 0, 0, 0)),
        ("build", (0, 1, 0, 0)),
        ("warm-up", (1, 0, 1, 0)),
        ("live", (0, 1, 1, 1)),
    ],
)
def test_a_trial_is_told_what_its_policy_did(policy: str, counted: tuple[int, ...], tmp_path: Path) -> None:
    made, facts = configured(BlockedTunedDecode(), CASE, arm(tmp_path), "cpu", settings(policy))
    assert isinstance(made, BlockedTunedDecode)
    assert tuple(facts[name] for name in ("hits", "misses", "tuned", "outliers")) == counted
    assert facts["bucket"].startswith("4*1@1024") and facts["policy"] == policy
    assert (facts["spent_us"] > 0.0) == (facts["tuned"] > 0)
    json.dumps(facts, allow_nan=False)


def test_what_has_nothing_to_tune_comes_back_as_it_is(tmp_path: Path) -> None:
    plain = load("blocked", "attention.decode")
    assert configured(plain, CASE, arm(tmp_path), "cpu", settings("live")) == (plain, {})


def test_a_policy_without_a_cache_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a cache"):
        configured(BlockedTunedDecode(), CASE, arm(tmp_path), "cpu", Measure(tuning="live"))


def job(folder: Path, decode: str = "blocked-tuned", **options: Any) -> dict[str, Any]:
    shapes = ["3*1@600", "4*1@900", "1*1@100"]
    given = {"op": "attention.decode", "shapes": shapes, "cache": str(folder / "tuned"), **options}
    return tune_job(arm(folder, decode), "cpu", settings("build"), **given).facts


def test_shapes_of_one_bucket_are_tuned_once_and_kept(tmp_path: Path) -> None:
    found = job(tmp_path)
    assert [row["bucket"].partition(",")[0] for row in found["rows"]] == ["4*1@1024", "1*1@128"]
    assert {row["status"] for row in found["rows"]} == {"tuned"}
    assert len(TuningCache(tmp_path / "tuned").entries()) == 2
    again = job(tmp_path)
    assert ({row["status"] for row in again["rows"]}, again["hits"], again["tuned"]) == ({"kept"}, 2, 0)
    assert job(tmp_path, again=True)["tuned"] == 2


WRONG = """
class Wrong:
    name = "wrong"
    def __init__(self, right=False): self.right = right
    def configurations(self, shape): return [{"right": 0}]
    def with_configuration(self, one): return self
    def convert(self, kv): return kv
    def plan(self, batch, spec, kv): return None
    def run(self, q, kv, plan, out): return out.zero_()
"""


def test_where_no_configuration_is_right_nothing_is_kept_and_the_reason_told(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    found = job(tmp_path, "wrong.py:Wrong")
    assert all("relative L2 error" in row["status"] for row in found["rows"])
    assert not TuningCache(tmp_path / "tuned").entries()


def test_every_tile_is_right() -> None:
    shape = resolve_shape("attention.decode", parse_shape("3*1@2000+1*1@77"), model_shape("tiny"))
    own = BlockedTunedDecode()
    configurations = own.configurations(shape)
    assert len(configurations) > 2
    for one in configurations:
        where = InputSettings(16, "HND", torch.bfloat16, torch.device("cpu"), 3)
        found = verify(own.with_configuration(one), load_op("attention.decode"), shape, where, thorough=False)
        assert found.status is Status.OK, (one, found.message)
