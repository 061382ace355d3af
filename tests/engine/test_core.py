"""Configuration, requests and plans."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kbench.engine.core import EngineConfig, ExactContent, Request, Scheduled, StepPlan
from kbench.errors import UsageError
from kbench.suite.schema import Arm, EngineSettings, ModelSettings


def arm(kv_tokens: int, page_size: int) -> Arm:
    return Arm(
        name="a",
        model=ModelSettings(preset="tiny"),
        engine=EngineSettings(kv_tokens=kv_tokens, max_batched_tokens=64, max_seqs=4, watermark=0.1),
        prefill="sdpa",
        decode="blocked",
        page_size=page_size,
        layout="NHD",
        seed=1,
        root=".",
    )


def test_config_of_an_arm_counts_whole_pages() -> None:
    config = EngineConfig.from_arm(arm(1_000, 64))
    assert config == EngineConfig(64, 15, 64, 4, watermark=0.1)


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(UsageError, match="holds no page"):
        EngineConfig.from_arm(arm(32, 64))


@pytest.mark.parametrize("wrong", [{"pages": 0}, {"page_size": 0}, {"max_seqs": 0}, {"watermark": 1.0}])
def test_impossible_engines_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        EngineConfig(**{"page_size": 4, "pages": 4, "max_batched_tokens": 4, "max_seqs": 1, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0)])
def test_a_request_needs_a_prompt_and_an_output(prompt: int, output: int) -> None:
    with pytest.raises(UsageError):
        Request(1, prompt, output, ExactContent(list))


def test_exact_content_lists_its_keys_when_asked() -> None:
    asked = []

    def source() -> list[int]:
        asked.append(1)
        return [7, 8, 9]

    content = ExactContent(source)
    assert not asked
    assert content.page_keys(0, 2) == [7, 8]
    assert content.page_key(2) == content.page_proof(2) == 9
    assert len(asked) == 1


def test_a_plan_sums_up() -> None:
    request = Request(0, 5, 2, ExactContent(list))
    plan = StepPlan((Scheduled(request, 4, 4, False), Scheduled(request, 1, 5, True)))
    assert plan.query_tokens == 5
    assert [item.kv_tokens for item in plan.sampling] == [5]
    assert [item.is_decode for item in plan.scheduled] == [False, True]


@pytest.mark.parametrize(
    "module", ["engine.blocks", "engine.scheduler", "engine.costs", "targets.virtual", "measure.workload"]
)
def test_importing_leaves_torch_out(module: str) -> None:
    code = f"import kbench.{module}, sys; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
