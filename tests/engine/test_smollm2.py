"""A trained model: SmolLM2-135M, greedy text against transformers. Opt-in: it needs the checkpoint and a minute.

`KBENCH_SMOLLM2=FOLDER pytest -m slow tests/engine/test_smollm2.py`, where the folder is the Hugging Face checkpoint of
SmolLM2-135M-Instruct with its tokenizer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kbench.engine.runner import Engine
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

FOLDER = os.environ.get("KBENCH_SMOLLM2", "")
PROMPTS = (
    "The page size of a KV cache decides",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Question: Why is the sky blue?\nAnswer:",
)
TOKENS = 64

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="KBENCH_SMOLLM2 names no checkpoint folder"),
]


def engine_of(page_size: int = 16, **engine: Any) -> Engine:
    folder = Path(FOLDER)
    arm = Arm(
        name="arm",
        model=ModelSettings(checkpoint=folder.name),
        engine=EngineSettings(**({"kv_tokens": 4_096, "max_batched_tokens": 512} | engine)),
        prefill="sdpa",
        decode="sdpa-gather",
        page_size=page_size,
        layout="NHD",
        seed=1,
        root=str(folder.parent),
    )
    return Engine(arm, "cpu", poison=True)


@pytest.fixture(scope="module")
def text() -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Prompts, and what transformers continues them with in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    prompts, expected = [], []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            made = model.generate(
                **ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        prompts.append(ids["input_ids"][0].tolist())
        expected.append(tuple(made[0, len(prompts[-1]) :].tolist()))
    return prompts, expected


def test_greedy_text_equals_transformers(text: tuple[list[list[int]], list[tuple[int, ...]]]) -> None:
    prompts, expected = text
    assert all(len(set(tokens)) > 10 for tokens in expected)
    assert engine_of().generate(prompts, TOKENS) == expected


@pytest.mark.parametrize(
    "changes",
    [{"page_size": 64}, {"max_batched_tokens": 9}, {"kv_tokens": 160}, {"page_size": 5, "kv_tokens": 165}],
    ids=["pages of 64", "chunked prefill", "preemption", "pages of 5 and preemption"],
)
def test_pages_chunks_and_preemption_change_no_text(
    text: tuple[list[list[int]], list[tuple[int, ...]]], changes: dict[str, Any]
) -> None:
    prompts, expected = text
    engine = engine_of(**changes)
    assert engine.generate(prompts, TOKENS) == expected
    if "kv_tokens" in changes:
        assert engine.scheduler.counters.preemptions > 0
