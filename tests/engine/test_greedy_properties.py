"""Greedy tokens are the model's: pages, launches, cache, preemption and chunks, in any combination, change none."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbench.engine.runner import Engine
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

torch.set_num_threads(1)
OUTPUT = 10
WAYS = {"tiny": ("sdpa", "sdpa-gather"), "tiny-moe": ("sdpa", "sdpa-gather"), "tiny-window": ("reference", "reference")}
"""Who computes attention; windows and sinks have one implementation on a CPU."""


def make_engine(preset: str, page_size: int, layout: str, **engine: object) -> Engine:
    prefill, decode = WAYS[preset]
    arm = Arm(
        name="arm",
        model=ModelSettings(preset=preset),
        engine=EngineSettings.model_validate({"max_seqs": 8, **engine}),
        prefill=prefill,
        decode=decode,
        page_size=page_size,
        layout=layout,  # type: ignore[arg-type]
        seed=1,
        root=".",
    )
    return Engine(arm, "cpu", poison=True)


@cache
def prompts() -> list[list[int]]:
    """One token, parts of a page, several pages, and two that share a beginning."""
    draw = random.Random(11)
    head = [draw.randrange(512) for _ in range(70)]
    made = [[draw.randrange(512) for _ in range(length)] for length in (1, 7, 33, 90)]
    return [*made, [*head, *made[1]], [*head, *made[2]]]


@cache
def alone(preset: str) -> list[tuple[int, ...]]:
    """Each prompt by itself: one page size, launched, whole, nothing cached."""
    settings = {"kv_tokens": 2_048, "max_batched_tokens": 256, "prefix_caching": False}
    return [make_engine(preset, 16, "NHD", **settings).generate([prompt], OUTPUT)[0] for prompt in prompts()]


@pytest.mark.parametrize("preset", WAYS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    page_size=st.sampled_from([1, 5, 16, 48, 64]),
    layout=st.sampled_from(["NHD", "HND"]),
    graph=st.sampled_from(["eager", "graph"]),
    kv_tokens=st.sampled_from([192, 320, 2_048]),
    budget=st.sampled_from([9, 40, 128]),
    caching=st.booleans(),
    chunked=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1]),
)
def test_no_setting_changes_a_token(
    preset: str,
    page_size: int,
    layout: str,
    graph: str,
    kv_tokens: int,
    budget: int,
    caching: bool,
    chunked: bool,
    watermark: float,
) -> None:
    if WAYS[preset][1] == "reference":
        graph = "eager"  # it reads lengths on the host
    engine = make_engine(
        preset,
        page_size,
        layout,
        graph=graph,
        kv_tokens=kv_tokens,
        max_batched_tokens=budget if chunked else 128,
        prefix_caching=caching,
        chunked_prefill=chunked,
        watermark=watermark,
    )
    assert engine.generate(prompts(), OUTPUT) == alone(preset)
    modes = {mode for mode, _ in engine.runner.steps}
    assert modes == ({"eager"} if graph == "eager" else modes & {"eager", "padded"})
    if graph == "graph":
        assert "padded" in modes
